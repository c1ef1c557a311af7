"""Distillation from stale completions: does the direction of the KL decide whether it works?

AsyncOPD (2606.24143) reports that the forward KL is robust to stale completions and that the reverse KL is not, unless
it is recomputed under the current student. Here completions are 0, 4 or 16 updates old, or fresh and used for 1, 4 or
16 updates. The arms are both directions, exact over the vocabulary or, for the oldest completions, over the teacher's
64 most likely tokens and the sampled one. Both are recomputed under the current student; the former needs no weights,
and in the latter the sampled token has its importance ratio. The other arms are sampled, without weights: k1 for the
reverse KL, k3 for the forward KL. The learning rate is one at which the exact token-level term of `exp_fig8.py` ends
within 5% of its best.

With `rollout_lag_repeats` the first batch is trained on until the next is old enough: at a lag of 16 for 17 of 40
updates, so that such a run has 24 different batches. Two more ages tell the age from that repetition. With "filled-16"
different batches of the start wait before the first update, so all 40 are different; with "fresh-24" each of 24 batches
is used once or twice, when it has just been sampled.

    python benchmarks/exp_stale_distill.py MODEL

Result: src/klgrad/papers/recorded/stale_distill.csv.
"""

import argparse
from pathlib import Path
from typing import Any

from distill_runs import COMMON, LAYERS, UPDATES, train
from experiment import command
from packed import Job, Row

RATE = 3e-4
SEEDS = (0, 1, 2)
REPEATS = {"rollout_lag_repeats": "true"}
STALE = {
    "fresh": {},
    "lag-16": {"rollout_lag": 16, **REPEATS},
    "reuse-16": {"num_iterations": 16},
    "lag-4": {"rollout_lag": 4, **REPEATS},
    "reuse-4": {"num_iterations": 4},
    "filled-16": {"rollout_lag": 16},
    "fresh-24": {"rollout_lag": 1, **REPEATS},
}
EXTREMES, BETWEEN, EQUAL = ("fresh", "lag-16", "reuse-16"), ("lag-4", "reuse-4"), ("filled-16", "fresh-24")
BATCHES = 24
"""Of "fresh-24". Its `rollout_lag` makes the trainer keep the log-probs of the sampler; `SomeAgain` takes the place of
the queue."""
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
    """First the extremes, exact and sampled and then top-k, then what lies between, then with equal numbers of batches.

    Each part goes seed by seed, so that an early end leaves whole comparisons.
    """
    plain = [arm for arm in ARMS if "top" not in arm]
    parts = [(EXTREMES, plain), (EXTREMES, [arm for arm in ARMS if "top" in arm]), (BETWEEN, plain)]
    found = [_job(given, arm, stale, seed) for ages, arms in parts for seed in SEEDS for stale in ages for arm in arms]
    return [*found, *equal_batches(given)]


def equal_batches(given: argparse.Namespace) -> list[Job]:
    """All arms with as many different batches as fresh ones, and fresh ones with as many as those that are old."""
    return [_job(given, arm, stale, seed) for seed in SEEDS for stale in EQUAL for arm in ARMS]


def _job(given: argparse.Namespace, arm: str, stale: str, seed: int) -> Job:
    label = {"arm": arm, "stale": stale, "learning_rate": f"{RATE:g}", "seed": seed}
    chosen = {**COMMON, "num_iterations": 1, "learning_rate": RATE, "seed": seed, **STALE[stale]}
    chosen |= {"teacher": given.model, "model": f"{given.model}:{LAYERS}", "rollout_lag_uncorrected": "true"}
    flags = [str(x) for name, value in chosen.items() for x in (f"--{name}", value)]
    name = f"{arm}_{stale}_{RATE:g}_{seed}"
    return Job(name, {"job": name, **label}, [*flags, *ARMS[arm].split()])


class SomeAgain:
    """Takes the place of the trainer's queue, and gives each of `BATCHES` batches once or twice in a row."""

    def __init__(self) -> None:
        self.updates, self.batch = 0, None

    def exchange(self, fresh: Any) -> Any:
        """The new batch, or the one before it again."""
        last, number = ((self.updates + i) * BATCHES // UPDATES for i in (-1, 0))
        self.updates += 1
        if number != last:
            self.batch = fresh
        return self.batch


def train_stale(job: Job, folder: Path) -> list[Row]:
    """`train`, with the batches of the job's age."""
    if job.settings["stale"] == "fresh-24":
        return train(job, folder, change=lambda trainer: setattr(trainer, "lag_queue", SomeAgain()))
    return train(job, folder)


def create_student(given: argparse.Namespace) -> None:
    """Write the student's weights, which all jobs start from."""
    from klgrad.models import resolve

    resolve(f"{given.model}:{LAYERS}")


if __name__ == "__main__":
    command(__doc__, jobs, train_stale, "stale_distill.csv", create_student)
