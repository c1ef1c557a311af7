"""Distillation from stale completions: does the direction of the KL decide whether it works?

AsyncOPD (2606.24143) reports that the forward KL is robust to stale completions and that the reverse KL is not, unless
it is recomputed under the current student. Here completions are 0, 4 or 16 updates old, or fresh and used for 1, 4 or
16 updates. The arms are both directions, exact over the vocabulary or over the teacher's 64 most likely tokens and the
sampled one, which are recomputed under the current student and need no weights; and sampled, without weights: k1 for
the reverse KL, k3 for the forward KL. The learning rate is the best of `exp_fig8.py` for the exact token-level term.

    python benchmarks/exp_stale_distill.py MODEL

Result: src/klgrad/papers/recorded/stale_distill.csv.
"""

import argparse
from pathlib import Path

from distill_runs import COMMON, LAYERS, train
from harness import RECORDED, provenance, read, write
from packed import Job, run_all

RATE = 1e-4
SEEDS = (0, 1, 2)
STALE = {
    "fresh": {},
    "lag-16": {"rollout_lag": 16},
    "reuse-16": {"num_iterations": 16},
    "lag-4": {"rollout_lag": 4},
    "reuse-4": {"num_iterations": 4},
}
ARMS = {
    f"{direction}-{name}": f"--kl_divergence {direction} --kl_level token --kl_reduction sequence {flags}"
    for direction, sampled in (("reverse", "k1"), ("forward", "k3"))
    for name, flags in (
        ("exact", "--kl_estimator exact"),
        ("top-64", "--kl_estimator exact --kl_top_k 64"),
        ("sampled", f"--kl_estimator {sampled}"),
    )
}


def jobs(given: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that an early end leaves whole comparisons."""
    return [_job(given, arm, stale, seed) for seed in SEEDS for stale in STALE for arm in ARMS]


def _job(given: argparse.Namespace, arm: str, stale: str, seed: int) -> Job:
    label = {"arm": arm, "stale": stale, "learning_rate": f"{RATE:g}", "seed": seed}
    chosen = {**COMMON, "num_iterations": 1, "learning_rate": RATE, "seed": seed, **STALE[stale]}
    chosen |= {"teacher": given.model, "model": f"{given.model}:{LAYERS}", "rollout_lag_uncorrected": "true"}
    flags = [str(x) for name, value in chosen.items() for x in (f"--{name}", value)]
    name = f"{arm}_{stale}_{RATE:g}_{seed}"
    return Job(name, {"job": name, **label}, [*flags, *ARMS[arm].split()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the unpacked model, the teacher")
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the CSV file")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of unfinished work")
    parser.add_argument("--workers", type=int, default=8, help="jobs at once; each takes up to 15 GiB")
    parser.add_argument("--only", default="", help="only jobs whose name contains this")
    given = parser.parse_args()
    from klgrad.training.model.resolve import resolve

    resolve(f"{given.model}:{LAYERS}")  # create it once, before the workers start
    path = given.out / "stale_distill.csv"
    measured = read(path)
    done = {row["job"] for row in measured}
    missing = [job for job in jobs(given) if job.name not in done and given.only in job.name]
    rows = run_all(missing, train, given.runs / path.stem, given.workers)
    write([*measured, *({**row, **provenance()} for row in rows)], path)


if __name__ == "__main__":
    main()
