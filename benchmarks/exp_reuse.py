"""How near does a student come to its teacher with a given number of sampled completions?

Sampling takes most of the time of on-policy distillation, and the exact KL of a token needs no importance weights on
completions of an earlier student. So every arm has 40 batches of 256 completions, and uses each batch for 1,
2, 4 or 8 updates, at several learning rates, which are constant or fall to 0 by a cosine. `sweep` trains every setting
with one seed, and `seeds` the best setting of each number of uses with two more. The student, the teacher and the
evaluation are those of `exp_fig8.py`; TRL's trainer with the same completions is in `bench_distill.py`.

    python benchmarks/exp_reuse.py sweep MODEL

Results: src/klgrad/papers/recorded/reuse_sweep.csv and reuse_seeds.csv.
"""

import argparse
import math
import sys

from distill_runs import COMMON, EVERY, LAYERS, UPDATES, train
from exp_stale_distill import create_student
from experiment import command
from harness import read
from packed import Job

USES = (4, 2, 8, 1)
RATES = (6e-4, 3e-4, 1e-3)
SCHEDULES = ("cosine", "constant")
SEEDS = (1, 2)
TERM = "--kl_estimator exact --kl_level token --kl_reduction sequence"
OF_A_PROMPT = 2
"""Completions; the term needs no groups, and more prompts are better than more completions of one."""


def sweep(given: argparse.Namespace) -> list[Job]:
    """Every setting with one seed."""
    return [_job(given, uses, rate, schedule, 0) for rate in RATES for schedule in SCHEDULES for uses in USES]


def seeds(given: argparse.Namespace) -> list[Job]:
    """The setting with the lowest last KL per token, of each number of uses, with two more seeds."""
    last = [row for row in read(given.out / "reuse_sweep.csv") if int(row["update"]) == UPDATES * int(row["uses"])]
    last = [row for row in last if math.isfinite(float(row["kl_per_token"]))]
    last.sort(key=lambda row: -float(row["kl_per_token"]))
    best = {int(row["uses"]): (float(row["learning_rate"]), row["schedule"]) for row in last}  # the lowest is set last
    return [_job(given, uses, *best[uses], seed) for seed in SEEDS for uses in USES if uses in best]


def _job(given: argparse.Namespace, uses: int, rate: float, schedule: str, seed: int) -> Job:
    label = {"uses": uses, "learning_rate": f"{rate:g}", "schedule": schedule, "seed": seed, "every": EVERY * uses}
    chosen = {**COMMON, "max_steps": UPDATES * uses, "num_iterations": uses, "num_generations": OF_A_PROMPT}
    chosen |= {"learning_rate": rate, "lr_scheduler_type": schedule, "seed": seed}
    chosen |= {"teacher": given.model, "model": f"{given.model}:{LAYERS}"}
    flags = [str(x) for name, value in chosen.items() for x in (f"--{name}", value)]
    name = f"{uses}_{rate:g}_{schedule}_{seed}"
    return Job(name, {"job": name, **label}, [*flags, *TERM.split()])


jobs = sweep
"""What `--help` and the tests of settings see."""

if __name__ == "__main__":
    parts = {"sweep": sweep, "seeds": seeds}
    part = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in parts else "sweep"
    command(__doc__, parts[part], train, f"reuse_{part}.csv", create_student)
