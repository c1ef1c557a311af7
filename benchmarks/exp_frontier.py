"""Reward against KL in training near the reference: Tang & Munos (2025), Fig. 7.

The paper claims that a KL penalty buys reward at a lower KL, that k1 differentiated as a loss is the least efficient,
and that k3 as a loss is close to the sound gradient where the KL is low. With a fixed coefficient the arms end at
different KLs, so every arm has several coefficients, and the arms are compared by their KL at equal reward. Advantages
are centred in their group and not divided by a standard deviation, on the task of `rl_runs.py`. The experiments
`exp_comedy.py` and `exp_std.py` have the same task and settings; here are the coefficients and arms that they lack.

    python benchmarks/exp_frontier.py MODEL

Result: src/klgrad/papers/recorded/frontier.csv.
"""

import argparse

from experiment import command
from packed import Job
from rl_runs import RATE, SEEDS, job, train

ARMS = {
    "k1-loss": "--kl_cell k1-loss",
    "k3-loss": "--kl_cell k3-loss",
    "k2-loss": "--kl_cell k2-loss",
    "k1-reward": "--kl_cell k1-reward-leave-one-out",
    "exact-loss": "--kl_estimator exact --kl_level token",
    "exact-discount-0.9": "--kl_estimator exact --kl_discount 0.9 --kl_baseline leave_one_out",
}
"""The paper's arms, and two of ours, under the names of `exp_comedy.py`."""
COEFFICIENTS = {"exact-discount-0.9": (0.1, 0.03, 0.01), "k1-loss": (0.01, 0.3)}
"""Of an arm that has others than 0.01."""


def jobs(given: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that an early end leaves whole comparisons."""
    return [_job(given, arm, coef, seed) for seed in SEEDS for arm in ARMS for coef in COEFFICIENTS.get(arm, (0.01,))]


def _job(given: argparse.Namespace, arm: str, coef: float, seed: int) -> Job:
    label = {"arm": arm, "kl_coef": coef, "learning_rate": RATE, "seed": seed}
    return job(label, ARMS[arm], given.model, scale_rewards="none")


if __name__ == "__main__":
    command(__doc__, jobs, train, "frontier.csv")
