"""Long runs with a small coefficient, which Tang & Munos (2025) leave open: where do the arms end?

With few updates a small coefficient hardly matters. Here 300 updates, with k3 or k2 as a loss, k1 in the reward, and
without a KL, on the task of `rl_runs.py`, with advantages that are centred in their group and not divided. k1 in the
reward also has a larger coefficient, with which it should end about as far from the reference as k3 as a loss does.
More arms follow, of which few or none learn much in 60 updates (`exp_comedy.py`, `exp_std.py`): k3 in the reward and k1
as a loss at larger coefficients, and k1 in the reward with advantages that are divided by their group's standard
deviation.

    python benchmarks/exp_long.py MODEL

Result: src/klgrad/papers/recorded/long.csv.
"""

import argparse

from experiment import command
from packed import Job
from rl_runs import RATE, SEEDS, job, train

UPDATES = 300
EVERY = 30
ARMS = {
    "k3-loss": ("--kl_cell k3-loss", 0.03),
    "k1-reward": ("--kl_cell k1-reward-leave-one-out", 0.03),
    "k2-loss": ("--kl_cell k2-loss", 0.03),
    "none": ("", 0.0),
    "k1-reward-near": ("--kl_cell k1-reward-leave-one-out", 0.07),
}
"""Settings and coefficient."""
POOR = {
    "k3-reward-0.1": ("--kl_cell k3-reward-leave-one-out", 0.1),
    "k1-loss-0.1": ("--kl_cell k1-loss", 0.1),
    "k3-reward-1": ("--kl_cell k3-reward-leave-one-out", 1.0),
    "k1-loss-1": ("--kl_cell k1-loss", 1.0),
}
DIVIDED = {"k1-reward-divided": ("--kl_placement reward --scale_rewards group", 0.03)}
"""The coefficient is that of `k1-reward`."""


def jobs(given: argparse.Namespace) -> list[Job]:
    """Arm by arm, so that the first calls have every seed of the arms that differ most."""
    return [_job(given, arm, *own, seed) for arm, own in (ARMS | POOR | DIVIDED).items() for seed in SEEDS]


def _job(given: argparse.Namespace, arm: str, flags: str, coef: float, seed: int) -> Job:
    label = {"arm": arm, "kl_coef": coef, "learning_rate": RATE, "seed": seed}
    return job(label, flags, given.model, scale_rewards="none", max_steps=UPDATES, eval_every=EVERY)


if __name__ == "__main__":
    command(__doc__, jobs, train, "long.csv")
