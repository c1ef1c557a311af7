"""Long runs with a small coefficient, which Tang & Munos (2025) leave open: where do the arms end?

With few updates a small coefficient hardly matters. Here 300 updates, with k3 or k2 as a loss, k1 in the reward, and
without a KL, on the task of `rl_runs.py`, with advantages that are centred in their group and not divided. k1 in the
reward also has a larger coefficient, with which it should end about as far from the reference as k3 as a loss does.

    python benchmarks/exp_long.py MODEL

Result: src/klgrad/papers/recorded/long.csv.
"""

import argparse

from experiment import command
from packed import Job
from rl_runs import job, train

UPDATES = 300
EVERY = 30
RATE = 1e-5
SEEDS = (0, 1, 2)
ARMS = {
    "k3-loss": ("--kl_cell k3-loss", 0.03),
    "k1-reward": ("--kl_cell k1-reward-leave-one-out", 0.03),
    "k2-loss": ("--kl_cell k2-loss", 0.03),
    "none": ("", 0.0),
    "k1-reward-near": ("--kl_cell k1-reward-leave-one-out", 0.07),
}
"""Settings and coefficient."""


def jobs(given: argparse.Namespace) -> list[Job]:
    """Arm by arm, so that the first calls have every seed of the arms that differ most."""
    return [_job(given, arm, seed) for arm in ARMS for seed in SEEDS]


def _job(given: argparse.Namespace, arm: str, seed: int) -> Job:
    flags, coef = ARMS[arm]
    label = {"arm": arm, "kl_coef": coef, "learning_rate": RATE, "seed": seed}
    own = {"kl_coef": coef, "learning_rate": RATE, "seed": seed, "max_steps": UPDATES, "eval_every": EVERY}
    return job(label, flags, given.model, scale_rewards="none", **own)


if __name__ == "__main__":
    command(__doc__, jobs, train, "long.csv")
