"""How near does a student come to its teacher with a given number of sampled completions?

Sampling takes most of the time of on-policy distillation, and the exact KL of a token needs no importance weights on
completions of an earlier student. So every arm has 40 batches of 256 completions, and uses each batch for 1,
2, 4 or 8 updates, at several learning rates, which are constant or fall to 0 by a cosine. `sweep` trains every setting
with one seed, and `seeds` the best setting of each number of uses with two more. `trl` and `trl-seeds` do the same with
TRL's own trainer, which uses each batch once, for three divergences. `prompts` uses each batch once, with fewer prompts
and more completions of each. The student, the teacher and the evaluation are those of `exp_fig8.py` in all parts.

    python benchmarks/exp_reuse.py sweep MODEL

Results: src/klgrad/papers/recorded/reuse_sweep.csv, reuse_seeds.csv, reuse_trl.csv and
reuse_prompts.csv.
"""

import argparse
import math
import sys
from typing import Any

import trl_distill_runs
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
"""Completions; the term needs no groups."""
LARGER_GROUP = 8
"""As in `exp_fig8.py`, where the same term came nearer with one use of a batch."""


def sweep(given: argparse.Namespace) -> list[Job]:
    """Every setting with one seed."""
    return [_job(given, uses, rate, schedule, 0) for rate in RATES for schedule in SCHEDULES for uses in USES]


def seeds(given: argparse.Namespace) -> list[Job]:
    """The setting with the lowest last KL per token, of each number of uses, with two more seeds."""
    best = {int(uses): setting for uses, setting in _best(given, "reuse_sweep.csv", "uses").items()}
    return [_job(given, uses, *best[uses], seed) for seed in SEEDS for uses in USES if uses in best]


def trl_sweep(given: argparse.Namespace) -> list[Job]:
    """Every setting of TRL's trainer with one seed."""
    trainers = trl_distill_runs.BETAS
    return [_trl_job(given, name, rate, schedule, 0) for rate in RATES for schedule in SCHEDULES for name in trainers]


def trl_seeds(given: argparse.Namespace) -> list[Job]:
    """The best setting of each of its divergences, by the same rule, with two more seeds."""
    best = _best(given, "reuse_trl.csv", "trainer")
    return [_trl_job(given, name, *best[name], seed) for seed in SEEDS for name in best]


def prompts(given: argparse.Namespace) -> list[Job]:
    """One use of each batch at constant rates: larger groups, and more seeds of a setting of `sweep`."""
    larger = [(rate, seed, LARGER_GROUP) for seed in (*SEEDS, 0) for rate in (6e-4, 3e-4)]
    return [
        _job(given, 1, rate, "constant", seed, size)
        for rate, seed, size in (*larger, *((6e-4, seed, OF_A_PROMPT) for seed in SEEDS))
    ]


def _best(given: argparse.Namespace, file: str, kind: str) -> dict[str, tuple[float, str]]:
    """Rate and schedule with the lowest last KL per token, of each kind, from the first seed."""
    last = [row for row in read(given.out / file) if int(row["update"]) == UPDATES * int(row["uses"])]
    last = [row for row in last if row["seed"] == "0" and math.isfinite(float(row["kl_per_token"]))]
    last.sort(key=lambda row: -float(row["kl_per_token"]))
    return {row[kind]: (float(row["learning_rate"]), row["schedule"]) for row in last}  # the lowest is set last


def _job(
    given: argparse.Namespace, uses: int, rate: float, schedule: str, seed: int, of_a_prompt: int = OF_A_PROMPT
) -> Job:
    label = {"uses": uses, "learning_rate": f"{rate:g}", "schedule": schedule, "seed": seed, "every": EVERY * uses}
    name = f"{uses}_{rate:g}_{schedule}_{seed}"
    if of_a_prompt != OF_A_PROMPT:
        label, name = {**label, "of_a_prompt": of_a_prompt}, f"{name}_{of_a_prompt}"
    return Job(name, {"job": name, **label}, _flags(given, uses, rate, schedule, seed, of_a_prompt))


def _trl_job(given: argparse.Namespace, trainer: str, rate: float, schedule: str, seed: int) -> Job:
    """The flags are those of the arm that uses each batch once; `trl_distill_runs` takes from them what TRL has."""
    label = {"trainer": trainer, "uses": 1, "learning_rate": f"{rate:g}", "schedule": schedule, "seed": seed}
    name = f"{trainer}_{rate:g}_{schedule}_{seed}"
    return Job(name, {"job": name, **label, "every": EVERY}, _flags(given, 1, rate, schedule, seed, OF_A_PROMPT))


def _flags(given: argparse.Namespace, uses: int, rate: float, schedule: str, seed: int, of_a_prompt: int) -> list[str]:
    chosen: dict[str, Any] = {**COMMON, "max_steps": UPDATES * uses, "num_iterations": uses}
    chosen |= {"num_generations": of_a_prompt, "learning_rate": rate, "lr_scheduler_type": schedule, "seed": seed}
    chosen |= {"teacher": given.model, "model": f"{given.model}:{LAYERS}"}
    return [*(str(x) for name, value in chosen.items() for x in (f"--{name}", value)), *TERM.split()]


jobs = sweep
"""What `--help` and the tests of settings see."""
PARTS = {
    "sweep": (sweep, train, "reuse_sweep.csv"),
    "seeds": (seeds, train, "reuse_seeds.csv"),
    "prompts": (prompts, train, "reuse_prompts.csv"),
    "trl": (trl_sweep, trl_distill_runs.train, "reuse_trl.csv"),
    "trl-seeds": (trl_seeds, trl_distill_runs.train, "reuse_trl.csv"),
}

if __name__ == "__main__":
    part = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in PARTS else "sweep"
    made, work, file = PARTS[part]
    command(__doc__, made, work, file, create_student)
