"""How much of the sequence-level gradient is worth its variance? Distillation with a discounted future.

With discount 0 a token is only responsible for its own KL, with discount 1 for the KL of all later tokens as well. The
more of the future is included, the smaller the bias of the sequence-level gradient and the larger its variance. Here
the exact KL with five discounts, with and without a per-step leave-one-out baseline, and k1 with three, at batches of
256 and of 64 completions, with completions of fixed length, so that no arm lowers its KL by ending early. The rest is
as in `exp_fig8.py`.

    python benchmarks/exp_discount.py MODEL

Result: src/klgrad/papers/recorded/discount.csv.
"""

import argparse

from distill_runs import COMMON, LAYERS, train
from exp_fig8 import fixed_length
from experiment import command
from packed import Job

RATE = 1e-4
SEEDS = (0, 1, 2)
BATCHES = (256, 64)
GROUP = 8
DISCOUNTS = (0.0, 0.9, 0.5, 1.0, 0.75)
SAMPLED = (0.0, 0.9, 1.0)
LEAVE_ONE_OUT, BASELINE = "-leave-one-out", "--kl_baseline leave_one_out"
ARMS = {
    **{f"exact-{d:g}": f"--kl_estimator exact --kl_discount {d}" for d in DISCOUNTS},
    **{f"exact-{d:g}{LEAVE_ONE_OUT}": f"--kl_estimator exact --kl_discount {d} {BASELINE}" for d in DISCOUNTS if d},
    **{f"k1-{d:g}{LEAVE_ONE_OUT}": f"--kl_estimator k1 --kl_discount {d} {BASELINE}" for d in SAMPLED},
}
"""Without a future the exact KL has no sampled part, so that a baseline would change nothing."""
FIRST = (
    "exact-0",
    *(f"exact-{d:g}{LEAVE_ONE_OUT}" for d in (0.5, 0.9, 1.0)),
    *(f"k1-{d:g}{LEAVE_ONE_OUT}" for d in (0.0, 1.0)),
)
"""The arms that span the range."""


def jobs(given: argparse.Namespace) -> list[Job]:
    """The larger batch first, with the arms of `FIRST` before the others; each seed by seed."""
    parts = [FIRST, [arm for arm in ARMS if arm not in FIRST]]
    return [_job(given, arm, size, seed) for size in BATCHES for arms in parts for seed in SEEDS for arm in arms]


def _job(given: argparse.Namespace, arm: str, size: int, seed: int) -> Job:
    teacher = given.runs / "teacher-fixed-length"
    label = {"arm": arm, "completions": size, "learning_rate": f"{RATE:g}", "seed": seed}
    chosen = {**COMMON, "per_device_train_batch_size": size, "num_generations": GROUP, "num_iterations": 1}
    chosen |= {"learning_rate": RATE, "seed": seed, "teacher": teacher, "model": f"{teacher}:{LAYERS}"}
    flags = [str(x) for name, value in chosen.items() for x in (f"--{name}", value)]
    name = f"{arm}_{size}_{RATE:g}_{seed}"
    return Job(name, {"job": name, **label}, [*flags, *ARMS[arm].split(), "--kl_reduction", "sequence"])


def create_models(given: argparse.Namespace) -> None:
    """Write the teacher with completions of fixed length, and the student that all jobs start from."""
    from klgrad.models.resolve import resolve

    given.runs.mkdir(parents=True, exist_ok=True)
    resolve(f"{fixed_length(given.model, given.runs)}:{LAYERS}")


if __name__ == "__main__":
    command(__doc__, jobs, train, "discount.csv", create_models)
