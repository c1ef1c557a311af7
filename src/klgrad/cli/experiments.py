"""`klgrad reproduce --run`: the training runs of an experiment, made again by its script in benchmarks/."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ExperimentError

if TYPE_CHECKING:
    from ..papers import Study


def measure(named: Sequence[Study], known: dict[str, Study], out: Path) -> str:
    """Make the training runs of the named studies; runs that an interrupted call has finished are not repeated.

    Args:
        named: the studies; all must be experiments.
        known: every study by its name.
        out: the folder of the command; the CSV files go to `runs` in it.

    Returns:
        The folder of the CSV files.
    """
    import torch

    from ..models.resolve import resolve
    from ..papers.recorded_runs import CHECKOUT

    experiments = [name for name, study in known.items() if study.experiment]
    if not named or any(study.experiment is None for study in named):
        given = ", ".join(study.name for study in named if study.experiment is None) or "no name"
        raise ExperimentError("with --run, names of experiments", given, f"choose from {', '.join(experiments)}")
    benchmarks = CHECKOUT / "benchmarks"
    if not benchmarks.is_dir():
        raise ExperimentError("the scripts of benchmarks/", "an installed package without them", "run it in a checkout")
    if not torch.cuda.is_available():
        raise ExperimentError("a CUDA GPU", "none", "leave out --run to see the committed numbers")
    folder = out.resolve() / "runs"
    for command in commands(named, benchmarks, resolve("smollm2"), folder):
        if subprocess.run(command, check=False).returncode != 0:
            raise ExperimentError("runs that succeed", f"a failure of {command[1]}", f"see the logs in {folder}")
    return str(folder)


def commands(named: Sequence[Study], benchmarks: Path, model: str, folder: Path) -> Iterable[list[str]]:
    """The calls of the experiments' scripts, in order."""
    for study in named:
        assert study.experiment is not None
        own = ["--out", str(folder), "--runs", str(folder / study.name)]
        for experiment in (study.experiment, *study.experiment.also):
            for part in experiment.parts or (None,):
                yield [sys.executable, str(benchmarks / experiment.script), *([part] if part else []), model, *own]
