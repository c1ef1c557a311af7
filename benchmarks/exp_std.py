"""Test whether a KL in the reward still works if advantages are divided by the group's standard deviation.

Shah et al. (Comedy of Estimators) find k1 in the reward the best place for the KL, with advantages that are not divided
by a standard deviation. Yao et al. (FRPO, 2601.10201) find that it collapses, with GRPO's division. This experiment
varies only the division: k1 in the reward, k1 in the advantage (after the division), and the gradients of k2 and of k3
as losses, each with and without it, at several coefficients, on the task of `rl_runs.py`.

    python benchmarks/exp_std.py MODEL                 every arm, coefficient and seed
    python benchmarks/exp_std.py MODEL --only none     some of them

Result: src/klgrad/papers/recorded/std.csv.
"""

import argparse

from experiment import command
from packed import Job
from rl_runs import RATE, SEEDS, job, train

COEFFICIENTS = (0.1, 0.03, 0.3)
ARMS = {
    "k1-reward": "--kl_placement reward",
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
    return found


def _job(given: argparse.Namespace, arm: str, division: str, coef: float, seed: int) -> Job:
    label = {"arm": arm, "division": division, "kl_coef": coef, "learning_rate": RATE, "seed": seed}
    return job(label, ARMS.get(arm, ""), given.model, scale_rewards=DIVISIONS[division])


if __name__ == "__main__":
    command(__doc__, jobs, train, "std.csv")
