"""On-policy training with the estimators and placements of Shah et al., A Comedy of Estimators.

The paper claims that training with biased gradients becomes unstable, that the unbiased configurations are better in
and out of the domain, and that a larger coefficient is more stable. Here k1 and k3 in the reward, as loss, or in both
places, and the exact KL as a loss, at three coefficients, on the task of `rl_runs.py`. Advantages are centred in their
group, which is leave-one-out up to a constant, and not divided by a standard deviation. A run has collapsed if its last
reward is below its first.

    python benchmarks/exp_comedy.py MODEL

Result: src/klgrad/papers/recorded/comedy.csv.
"""

import argparse

from experiment import command
from packed import Job
from rl_runs import RATE, SEEDS, job, train

COEFFICIENTS = (0.1, 1.0, 0.03)
ARMS = {
    "none": "",
    "k1-reward": "--kl_cell k1-reward-leave-one-out",
    "k3-reward": "--kl_cell k3-reward-leave-one-out",
    "k1-loss": "--kl_cell k1-loss",
    "k3-loss": "--kl_cell k3-loss",
    "k1-both": "--kl_cell k1-both",
    "k3-both": "--kl_cell k3-both-leave-one-out",
    "exact-loss": "--kl_estimator exact --kl_level token",
}


def jobs(given: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that an early end leaves whole comparisons."""
    found = []
    for seed in SEEDS:
        found.append(_job(given, "none", 0.0, seed))
        found += [_job(given, arm, coef, seed) for coef in COEFFICIENTS for arm in ARMS if arm != "none"]
    return found


def _job(given: argparse.Namespace, arm: str, coef: float, seed: int) -> Job:
    label = {"arm": arm, "kl_coef": coef, "learning_rate": RATE, "seed": seed}
    return job(label, ARMS[arm], given.model, scale_rewards="none")


if __name__ == "__main__":
    command(__doc__, jobs, train, "comedy.csv")
