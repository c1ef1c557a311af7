"""Test whether a KL in the reward still works if advantages are divided by the group's standard deviation.

Shah et al. (Comedy of Estimators) find k1 in the reward the best place for the KL, with advantages that are not divided
by a standard deviation. Yao et al. (FRPO, 2601.10201) find that it collapses, with GRPO's division. This experiment
varies only the division: k1 in the reward, k1 in the advantage (after the division, with and without leave-one-out) and
the gradients of k2 and of k3 as losses, each with and without it, at several coefficients, on the task of `rl_runs.py`.

    python benchmarks/exp_std.py MODEL                 every arm, coefficient and seed
    python benchmarks/exp_std.py MODEL --only none     some of them

MODEL is the folder of the unpacked model. Result: benchmarks/results/std.csv.
"""

import argparse
from pathlib import Path

from harness import RESULTS, provenance, write
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
"""On-policy, k2 as a loss has the gradient of the token-level reverse KL by k1, and k3 that of the forward KL by k3."""
DIVISIONS = {"undivided": "none", "divided": "group"}


def jobs(given: argparse.Namespace) -> list[Job]:
    """All jobs, ordered by seed, so that an early end leaves complete comparisons."""
    found = []
    for seed in SEEDS:
        found += [_job(given, "none", division, 0.0, seed) for division in DIVISIONS]
        found += [_job(given, arm, d, coef, seed) for coef in COEFFICIENTS for d in DIVISIONS for arm in ARMS]
    return [each for each in found if given.only in each.name]


def _job(given: argparse.Namespace, arm: str, division: str, coef: float, seed: int) -> Job:
    label = {"arm": arm, "division": division, "kl_coef": coef, "learning_rate": given.rate, "seed": seed}
    name = f"{arm}_{division}_{coef:g}_{given.rate:g}_{seed}"
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
    rows = run_all(jobs(given), train, given.runs, given.workers)
    write([{**row, **provenance()} for row in rows], given.out / "std.csv")


if __name__ == "__main__":
    main()
