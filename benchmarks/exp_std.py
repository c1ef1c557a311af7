"""Does a KL in the reward survive the division by the group's standard deviation?

Shah et al. (Comedy of Estimators) find k1 in the reward the best place for the KL, with advantages that are not divided
by a standard deviation. Yao et al. (FRPO, 2601.10201) find that it collapses, with GRPO's division. This experiment
varies only the division: k1 in the reward, k1 in the advantage (after the division, with and without leave-one-out) and
the gradients of k2 and of k3 as losses, each with and without it, at several coefficients, on the task of `rl_runs.py`.

    python benchmarks/exp_std.py MODEL                 every arm, coefficient and seed
    python benchmarks/exp_std.py MODEL --only none     some of them

MODEL is the folder of the unpacked model. Result: benchmarks/results/std.csv; jobs that it has are not run again.
"""

import argparse
from pathlib import Path

from harness import RESULTS, provenance, read, write
from packed import Job, run_all
from rl_runs import job, train

UPDATES = 60
EVERY = 20
RATE = 1e-5
SEEDS = (0, 1, 2)
COEFFICIENTS = (0.1, 0.03, 0.3)
ARMS = {
    "k1-reward": "--kl_placement reward",
    "k1-advantage": "--kl_placement advantage",
    "k1-advantage-leave-one-out": "--kl_placement advantage --kl_baseline leave_one_out",
    "k2-loss": "--kl_level token --kl_estimator k1",
    "k3-loss": "--kl_divergence forward --kl_level token --kl_estimator k3",
}
"""On-policy the gradient of k2 as a loss is the token-level reverse KL's by k1, that of k3 the forward KL's by k3."""
DIVISIONS = {"undivided": "none", "divided": "group"}


def jobs(given: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that an early end leaves whole comparisons."""
    found = []
    for seed in SEEDS:
        found += [_job(given, "none", division, 0.0, seed) for division in DIVISIONS]
        found += [_job(given, arm, d, coef, seed) for coef in COEFFICIENTS for d in DIVISIONS for arm in ARMS]
    return [each for each in found if given.only in each.name]


def _job(given: argparse.Namespace, arm: str, division: str, coef: float, seed: int) -> Job:
    name = f"{arm}_{division}_{coef:g}_{given.rate:g}_{seed}"
    label = {"job": name, "arm": arm, "division": division, "kl_coef": coef, "learning_rate": given.rate, "seed": seed}
    return job(
        name,
        label,
        ARMS.get(arm, ""),
        given.model,
        kl_coef=coef,
        scale_rewards=DIVISIONS[division],
        learning_rate=given.rate,
        seed=seed,
        max_steps=given.updates,
        eval_every=EVERY,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV file")
    parser.add_argument("--runs", type=Path, default=Path("runs/std"), help="folder of unfinished work")
    parser.add_argument("--workers", type=int, default=10, help="jobs at once; each takes 13 GiB")
    parser.add_argument("--only", default="", help="only jobs whose name contains this")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--updates", type=int, default=UPDATES)
    given = parser.parse_args()
    path = given.out / "std.csv"
    measured = read(path)
    done = {row["job"] for row in measured}
    rows = run_all([each for each in jobs(given) if each.name not in done], train, given.runs, given.workers)
    write([*measured, *({**row, **provenance()} for row in rows if not row["problem"])], path)


if __name__ == "__main__":
    main()
