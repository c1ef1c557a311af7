"""How much of the sequence-level gradient is worth its variance? Distillation with a discounted future.

With discount 0 a token is only responsible for its own KL, with discount 1 for the KL of all later tokens as well. The
more of the future is included, the smaller the bias of the sequence-level gradient and the larger its variance. Here
the exact KL with five discounts, with and without a per-step leave-one-out baseline, and k1 with three, at batches of
256 and of 64 completions, with completions of fixed length, so that no arm lowers its KL by ending early. `sweep`
trains every arm with one seed at three learning rates, and `seeds` trains it with three other seeds at the rate with
the lowest KL on the student's completions. The rest is as in `exp_fig8.py`.

    python benchmarks/exp_discount.py sweep MODEL
    python benchmarks/exp_discount.py seeds MODEL

Results: src/klgrad/papers/recorded/discount_sweep.csv and discount.csv.
"""

import argparse
import sys

from distill_runs import COMMON, LAYERS, train
from exp_fig8 import fixed_length
from experiment import command
from packed import Job

from klgrad.papers.own.discount import best_rates
from klgrad.papers.runs import rows_in

RATES = (6e-4, 3e-4, 1e-4)
SEEDS = (1, 2, 3)
"""At the best rates; the rates are chosen by seed 0."""
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


def sweep(given: argparse.Namespace) -> list[Job]:
    """The larger batch first, with the arms of `FIRST` before the others; each at every rate."""
    return [_job(given, arm, size, rate, 0) for size in BATCHES for arm in _ordered() for rate in RATES]


def seeds(given: argparse.Namespace) -> list[Job]:
    """Every arm at its best rate, seed by seed."""
    sweep = given.out / "discount_sweep.csv"
    best = best_rates(rows_in(sweep) if sweep.exists() else [])
    known = [(arm, size) for size in BATCHES for arm in _ordered() if f"{size} {arm}" in best]
    return [_job(given, arm, size, best[f"{size} {arm}"], seed) for seed in SEEDS for arm, size in known]


def _ordered() -> list[str]:
    return [*FIRST, *(arm for arm in ARMS if arm not in FIRST)]


def _job(given: argparse.Namespace, arm: str, size: int, rate: float, seed: int) -> Job:
    teacher = given.runs / "teacher-fixed-length"
    label = {"arm": arm, "completions": size, "learning_rate": f"{rate:g}", "seed": seed}
    chosen = {**COMMON, "per_device_train_batch_size": size, "num_generations": GROUP, "num_iterations": 1}
    chosen |= {"learning_rate": rate, "seed": seed, "teacher": teacher, "model": f"{teacher}:{LAYERS}"}
    flags = [str(x) for name, value in chosen.items() for x in (f"--{name}", value)]
    name = f"{arm}_{size}_{rate:g}_{seed}"
    return Job(name, {"job": name, **label}, [*flags, *ARMS[arm].split(), "--kl_reduction", "sequence"])


def create_models(given: argparse.Namespace) -> None:
    """Write the teacher with completions of fixed length, and the student that all jobs start from."""
    from klgrad.models import resolve

    given.runs.mkdir(parents=True, exist_ok=True)
    resolve(f"{fixed_length(given.model, given.runs)}:{LAYERS}")


jobs = sweep
"""What `--help` and the tests of settings see."""
FILES = {"sweep": "discount_sweep.csv", "seeds": "discount.csv"}

if __name__ == "__main__":
    part = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in FILES else "sweep"
    command(__doc__, {"sweep": sweep, "seeds": seeds}[part], train, FILES[part], create_models)
