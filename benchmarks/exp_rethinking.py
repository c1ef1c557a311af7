"""GRPO as published, with k1, k2 or k3 as a loss: Liu et al., Rethinking KL Regularization in RLHF, Figs. 2 to 5.

The paper claims that k1 as a loss does not keep the policy near the reference, and that k2 keeps it nearer than k3 and
trains more steadily. Here with GRPO's own reductions (`loss_type=grpo`, advantages divided by the standard deviation of
their group), at two learning rates, on the task of `rl_runs.py`. Steadiness is the noise of the training reward: its
standard deviation without its trend.

    python benchmarks/exp_rethinking.py MODEL

Result: src/klgrad/papers/recorded/rethinking.csv.
"""

import argparse

from experiment import command
from packed import Job
from rl_runs import SEEDS, job, train

COEF = 0.1
RATES = (1e-5, 3e-5)
ARMS = {"none": "", "k1-loss": "--kl_cell k1-loss", "k2-loss": "--kl_cell k2-loss", "k3-loss": "--kl_cell k3-loss"}


def jobs(given: argparse.Namespace) -> list[Job]:
    """Rate by rate and seed by seed, so that an early end leaves whole comparisons."""
    return [_job(given, arm, rate, seed) for rate in RATES for seed in SEEDS for arm in ARMS]


def _job(given: argparse.Namespace, arm: str, rate: float, seed: int) -> Job:
    coef = 0.0 if arm == "none" else COEF
    label = {"arm": arm, "kl_coef": coef, "learning_rate": rate, "seed": seed}
    return job(label, ARMS[arm], given.model, scale_rewards="group", loss_type="grpo")


if __name__ == "__main__":
    command(__doc__, jobs, train, "rethinking.csv")
