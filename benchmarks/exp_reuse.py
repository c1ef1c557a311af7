"""How near does a student come to its teacher with a given number of sampled completions?

Sampling takes most of the time of on-policy distillation, and the exact KL of a token needs no importance weights on
completions of an earlier student. So every arm has 10,240 completions, in 40 batches of 256, and uses each batch for 1,
2, 4 or 8 updates, at several learning rates, which are constant or fall to 0 by a cosine. More updates also come from
smaller batches: other arms have 160 batches of 64, each used once or twice. `sweep` trains every setting with one seed,
and `seeds` the best setting of each arm with three others. `trl` and `trl-seeds` do the same with TRL's own trainer,
which uses each batch once, for three divergences, and for one of them with batches of 64 too. `small`, `small-seeds`
and `small-trl` have batches of 32, used once, at two rates with all seeds; TRL's trainer without the cosine. The
student, the teacher and the evaluation are those of `exp_fig8.py` in all parts.

    python benchmarks/exp_reuse.py sweep MODEL

Results: src/klgrad/papers/recorded/reuse_sweep.csv, reuse_seeds.csv and reuse_trl.csv.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import trl_distill_runs
from distill_runs import COMMON, EVERY, LAYERS, UPDATES, train
from exp_stale_distill import create_student
from experiment import command
from packed import Job

from klgrad.papers.own import reuse
from klgrad.papers.runs import rows_in

USES = (4, 2, 8, 1)
SETTINGS = tuple((rate, schedule) for rate in ("0.0006", "0.0003", "0.001") for schedule in ("cosine", "constant"))
"""Learning rate and schedule."""
SEEDS = (1, 2, 3)
"""Of the best settings; the settings are chosen by seed 0."""
TERM = "--kl_estimator exact --kl_level token --kl_reduction sequence"
OF_A_PROMPT = 2
"""Completions; the term needs no groups."""
WHOLE, SMALL = 256, 64
"""Completions of a batch."""
USES_OF_SMALL = (1, 2)
SETTINGS_OF_SMALL = tuple(setting for setting in SETTINGS if setting[0] != "0.001")
"""Without the largest rate, and TRL's trainer with one divergence: these runs take several times as long."""
TRL_OF_SMALL = ("trl-reverse",)
SMALLEST = 32
SETTINGS_OF_SMALLEST = tuple((rate, schedule) for schedule in ("constant", "cosine") for rate in ("0.0003", "0.0006"))

Setting = tuple[str, str]


def sweep(given: argparse.Namespace) -> list[Job]:
    """Every setting with one seed."""
    large = [(uses, WHOLE, setting) for setting in SETTINGS for uses in USES]
    small = [(uses, SMALL, setting) for setting in SETTINGS_OF_SMALL for uses in USES_OF_SMALL]
    return [_job(given, *each, 0) for each in (*large, *small)]


def seeds(given: argparse.Namespace) -> list[Job]:
    """The best setting of each number of uses and size of a batch, with more seeds."""
    best = _best(given.out / "reuse_sweep.csv")
    arms = [*((uses, WHOLE) for uses in USES), *((uses, SMALL) for uses in USES_OF_SMALL)]
    chosen = [(*arm, best[name]) for arm in arms if (name := reuse.named("klgrad", *arm)) in best]
    return [_job(given, uses, size, setting, seed) for seed in SEEDS for uses, size, setting in chosen]


def trl_sweep(given: argparse.Namespace) -> list[Job]:
    """Every setting of TRL's trainer with one seed."""
    large = [(name, WHOLE, setting) for setting in SETTINGS for name in trl_distill_runs.BETAS]
    small = [(name, SMALL, setting) for setting in SETTINGS_OF_SMALL for name in TRL_OF_SMALL]
    return [_trl_job(given, *each, 0) for each in (*large, *small)]


def trl_seeds(given: argparse.Namespace) -> list[Job]:
    """The best setting of each of its divergences and sizes of a batch, with more seeds."""
    best = _best(given.out / "reuse_trl.csv")
    arms = [*((name, WHOLE) for name in trl_distill_runs.BETAS), *((name, SMALL) for name in TRL_OF_SMALL)]
    chosen = [(name, size, best[arm]) for name, size in arms if (arm := reuse.named(name, 1, size)) in best]
    return [_trl_job(given, name, size, setting, seed) for seed in SEEDS for name, size, setting in chosen]


def _best(path: Path) -> dict[str, Setting]:
    """The best setting of each arm; none before a sweep."""
    best = reuse.best_settings(reuse.labelled(rows_in(path) if path.exists() else []))
    return {arm: (setting.split()[0], setting.split()[1]) for arm, setting in best.items()}


def small(given: argparse.Namespace) -> list[Job]:
    """Batches of 32, with the seed that chooses their rate."""
    return [_job(given, 1, SMALLEST, setting, 0) for setting in SETTINGS_OF_SMALLEST]


def small_seeds(given: argparse.Namespace) -> list[Job]:
    """The same with the seeds that judge it."""
    return [_job(given, 1, SMALLEST, setting, seed) for seed in SEEDS for setting in SETTINGS_OF_SMALLEST]


def small_trl(given: argparse.Namespace) -> list[Job]:
    """TRL's trainer with batches of 32, with all seeds."""
    order = [(seed, setting, name) for seed in (0, *SEEDS) for setting in SETTINGS_OF_SMALLEST for name in TRL_OF_SMALL]
    return [_trl_job(given, name, SMALLEST, setting, seed) for seed, setting, name in order]


def _job(given: argparse.Namespace, uses: int, size: int, setting: Setting, seed: int) -> Job:
    rate, schedule = setting
    label = {"uses": uses, "learning_rate": rate, "schedule": schedule, "seed": seed, "completions": size}
    name = _named(uses, *setting, seed, size)
    every = EVERY * uses * WHOLE // size
    return Job(name, {"job": name, **label, "every": every}, _flags(given, uses, size, setting, seed))


def _trl_job(given: argparse.Namespace, trainer: str, size: int, setting: Setting, seed: int) -> Job:
    """The flags are those of the arm that uses each batch once; `trl_distill_runs` takes from them what TRL has."""
    job = _job(given, 1, size, setting, seed)
    name = _named(trainer, *setting, seed, size)
    return Job(name, {**job.settings, "job": name, "trainer": trainer}, job.flags)


def _named(*parts: str | int) -> str:
    """The size of a batch stands last, and only if it is another than `WHOLE`: runs were recorded before it varied."""
    return "_".join(map(str, parts[:-1] if parts[-1] == WHOLE else parts))


def _flags(given: argparse.Namespace, uses: int, size: int, setting: Setting, seed: int) -> list[str]:
    chosen: dict[str, Any] = {**COMMON, "max_steps": UPDATES * uses * WHOLE // size, "num_iterations": uses}
    chosen |= {"per_device_train_batch_size": size, "num_generations": OF_A_PROMPT, "seed": seed}
    chosen |= {"learning_rate": setting[0], "lr_scheduler_type": setting[1]}
    chosen |= {"teacher": given.model, "model": f"{given.model}:{LAYERS}"}
    return [*(str(x) for name, value in chosen.items() for x in (f"--{name}", value)), *TERM.split()]


jobs = sweep
"""What `--help` and the tests of settings see."""
PARTS = {
    "sweep": (sweep, train, "reuse_sweep.csv"),
    "seeds": (seeds, train, "reuse_seeds.csv"),
    "trl": (trl_sweep, trl_distill_runs.train, "reuse_trl.csv"),
    "trl-seeds": (trl_seeds, trl_distill_runs.train, "reuse_trl.csv"),
    "small": (small, train, "reuse_sweep.csv"),
    "small-seeds": (small_seeds, train, "reuse_seeds.csv"),
    "small-trl": (small_trl, trl_distill_runs.train, "reuse_trl.csv"),
}

if __name__ == "__main__":
    part = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in PARTS else "sweep"
    made, work, file = PARTS[part]
    command(__doc__, made, work, file, create_student)
