"""`klgrad reproduce`."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..errors import ExperimentError, MissingExtraError, SettingError, UnknownNameError
from ..support import ensure_folder, text_table
from .console import INTERRUPTED, argument, bar, lines, option, print_path, stderr, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from ..papers import Outcome, Settings, Study
    from ..papers.study import Comparison


# `klgrad reproduce --run`: the training runs of an experiment, made again by its script in benchmarks/.


def measure(named: Sequence[Study], out: Path) -> str:
    """Make the training runs of the named studies; runs that an interrupted call has finished are not repeated.

    Args:
        named: the studies; all must be experiments.
        out: the folder of the command; the CSV files go to `runs` in it.

    Returns:
        The folder of the CSV files.
    """
    import torch

    from ..models import resolve
    from ..papers.runs import CHECKOUT
    from ..papers.study import studies

    if not named or any(study.experiment is None for study in named):
        others = ", ".join(study.name for study in named if study.experiment is None) or "no name"
        experiments = ", ".join(name for name, study in studies().items() if study.experiment)
        raise ExperimentError("with --run, names of experiments", others, f"choose from {experiments}")
    benchmarks = CHECKOUT / "benchmarks"
    if not benchmarks.is_dir():
        raise ExperimentError("the scripts of benchmarks/", "an installed package without them", "run it in a checkout")
    if not torch.cuda.is_available() and not all(study.experiment and study.experiment.on_cpu for study in named):
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
        folders = ["--out", str(folder), "--runs", str(folder / study.name)]
        for experiment in (study.experiment, *study.experiment.also):
            for part in experiment.parts or (None,):
                yield [sys.executable, str(benchmarks / experiment.script), *([part] if part else []), model, *folders]


def command(
    results: Annotated[
        list[str] | None,
        argument("Names as in --list. None: all results.", metavar="RESULT"),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List every result with its claim, and stop.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for numbers (JSON) and figures (PNG, SVG).")] = Path("reproduced"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats and steps: each within a minute.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of every random number.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Number of results to compute at a time.")] = min(
        4, os.cpu_count() or 1
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute again, even if an earlier run has results.")] = False,
    with_: Annotated[
        list[str] | None,
        option(
            "Draw and tabulate an estimator of your own beside the paper's: a function of log π/ref to the "
            "coefficient, or a Divergence. May be repeated.",
            "--with",
            metavar="FILE.py:NAME",
        ),
    ] = None,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Run the language models of the named results again, on this machine's GPU; baselines on its CPU.",
        ),
    ] = False,
) -> None:
    """Recompute the papers' tabular and analytic results, check each claim, and draw a figure.

    For results that are named, every sentence is printed with its measured value; the JSON has all numbers.

    Results about language models are judged and drawn from committed numbers of runs on a GPU. With --run the models
    are trained again.

    Exit status 1 if a claim is contradicted, as some are with every run: docs/results.md says which.

    If it is interrupted, all files are complete; run it again to compute the missing results. Numbers of an earlier run
    are kept if the settings and the code are the same.
    """
    import torch

    from ..papers import Settings
    from ..papers.study import MODULES, load_study, studies

    console = stdout()
    for name in results or []:
        if name not in MODULES:
            raise UnknownNameError("result", name, MODULES)
    chosen = [load_study(name) for name in dict.fromkeys(results or MODULES)]
    if with_:
        others = [study.name for study in chosen if study.compare is None]
        if results and others:
            takers = ", ".join(name for name, study in studies().items() if study.compare)
            raise SettingError(f"with --with, results in ({takers})", ", ".join(others), "name one of these")
        chosen = [study for study in chosen if study.compare]
    if list_:
        console.print(text_table([(study.name, study.claim) for study in chosen], ("result", "claim")))
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib, to draw", "no such package", "pip install 'klgrad[plot]'")
    torch.set_num_threads(1)  # the tensors are too small for threads to help; processes do help
    ensure_folder(out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C: workers end, files stay complete
    measured = measure(chosen if results else [], out) if run else None
    outcomes, stopped = _run(chosen, Settings(quick, seed, measured, tuple(with_ or ())), out, fresh, jobs)
    console.print(_summary({study.name: study.claim for study in chosen}, outcomes))
    for outcome in outcomes if results else []:  # every sentence with the measured value that decides it
        checks = [(check.sentence, check.measured, check.verdict) for check in outcome.checks]
        table = text_table(checks, ("sentence", "measured", "verdict"), fold=True)
        console.print("", f"{outcome.name}: {outcome.counts}", table, sep="\n")
    for name, compared in ((outcome.name, outcome.comparison) for outcome in outcomes if outcome.comparison):
        console.print("", f"{name}: {compared.caption}", _comparison(compared), sep="\n")
    whose = "measured on this machine" if run else "committed numbers of runs of language models"
    for outcome in outcomes:
        if outcome.measured:
            console.print(f"{outcome.name}: {whose} ({outcome.measured}){'' if run else '; --run repeats them'}")
    print_path(console, f"Numbers and figures are in {out}/")
    if stopped:
        console.print("Interrupted. Run the same command again to compute the missing results.", style="yellow")
        raise typer.Exit(INTERRUPTED)
    if any(outcome.is_contradicted for outcome in outcomes):
        raise typer.Exit(1)


def _run(chosen: list[Study], settings: Settings, out: Path, fresh: bool, jobs: int) -> tuple[list[Outcome], bool]:
    """Outcomes in the order of `chosen`, and whether the run was interrupted."""
    from ..papers import every_outcome

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: dict[str, Outcome] = {}
    stopped = False
    console = stderr()
    with bar(*columns, console=console) as progress, lines(console, lambda: f"{len(outcomes)} of {len(chosen)} done"):
        task = progress.add_task("Reproducing", total=len(chosen))
        try:
            for outcome in every_outcome(chosen, settings, out, fresh=fresh, jobs=jobs):
                outcomes[outcome.name] = outcome
                progress.update(task, description=outcome.name, advance=1)
        except KeyboardInterrupt:
            stopped = True
    return [outcomes[study.name] for study in chosen if study.name in outcomes], stopped


def _summary(claims: dict[str, str], outcomes: list[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        seconds = "kept" if outcome.seconds is None else f"{outcome.seconds:.1f}"
        verdict = Text(outcome.verdict, style="green" if outcome.holds else "yellow")
        rows.append((outcome.name, claims[outcome.name], verdict, "recorded" if outcome.measured else seconds))
    return text_table(rows, ("result", "claim", "verdict", "seconds"), numbers=3)


def _comparison(comparison: Comparison) -> Table:
    """The numbers of every arm; those of the user are bold."""
    name = lambda arm: Text(arm, style="bold" if ":" in arm else "")
    rows = [(name(arm), *(f"{x:.3g}" for x in values)) for arm, values in comparison.rows.items()]
    return text_table(rows, ("arm", *comparison.columns), numbers=1)
