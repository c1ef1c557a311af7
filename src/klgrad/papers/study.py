"""A study: a module that computes, checks and draws one result; all of them by name, and how they are run.

The docstring of the module states the claim in our own words, names the figure and gives the source. `run` computes
numbers that JSON can hold, `check` judges them, and `draw` draws them. `check` and `draw` read the saved numbers only,
so that neither depends on anything that was not saved. Small studies of one topic share a module: each is a class of it
with the same docstring and methods.
"""

import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from .. import __version__
from ..drawing import KINDS, look, write_figure
from ..support import finite, partials_of, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from torch import Tensor
else:  # names for the signatures of the studies: matplotlib is there where something is drawn
    Axes = Figure = Any

Numbers = dict[str, Any]
"""Nested dictionaries and lists of numbers and strings."""

SIGNIFICANT = 4.0
"""A difference over repeats is significant beyond this many standard errors.

That is a chance of one in thirty thousand, with about sixty comparisons in all.
"""
VERDICTS: tuple[str, ...] = ("holds", "contradicted", "undecided")
MARGIN = 0.25
"""The smallest gain, in the logarithm, that would count as an improvement."""


@dataclass(frozen=True)
class Settings:
    """How much to compute.

    Attributes:
        quick: fewer repeats and steps.
        seed: of every random number.
        measured: a folder with the CSV files of experiments on this machine; None for the committed files.
        arms: estimators of a user to draw beside those of the paper, as `my.py:estimator`.
    """

    quick: bool = False
    seed: int = 0
    measured: str | None = None
    arms: tuple[str, ...] = ()

    def size(self, full: int, quick: int) -> int:
        """`quick` in a quick run, else `full`."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Experiment:
    """The runs of language models, most of them on a GPU, whose numbers a study reads.

    Attributes:
        file: the CSV file in `recorded/`.
        script: the script in benchmarks/ that writes it.
        parts: the first argument of each call of the script, in order; empty for one call without.
        also: further experiments whose files it reads.
        on_cpu: whether the script needs no GPU.
    """

    file: str
    script: str
    parts: tuple[str, ...] = ()
    also: tuple["Experiment", ...] = ()
    on_cpu: bool = False


@dataclass(frozen=True)
class Check:
    """One sentence of a claim, and the measured value that decides it.

    Attributes:
        claim: the sentence.
        measured: the value, in words.
        holds: whether the sentence holds.
        decided: False if the measurement cannot tell; then `holds` is False.
        ours: whether the sentence is not from the paper.
        waits: whether it is undecided because runs or measurements have not been made.
        chance: how often chance alone would show as much, if that is known.
    """

    claim: str
    measured: str
    holds: bool
    decided: bool = True
    ours: bool = False
    waits: bool = False
    chance: float | None = None

    @property
    def verdict(self) -> str:
        """`holds`, `contradicted` if its opposite is shown, or `undecided` if neither is."""
        return "holds" if self.holds else "contradicted" if self.decided else "undecided"

    @property
    def sentence(self) -> str:
        """The claim as it is printed, which says whether it is ours."""
        return f"(ours) {self.claim}" if self.ours else self.claim


FALSE_DISCOVERIES = 0.05
"""The expected share of chance among the sentences that `survivors` keeps."""


def survivors(checks: Iterable[Check]) -> list[Check]:
    """The decided sentences that survive Benjamini and Hochberg's correction for all sentences with a `chance`."""
    known = sorted((check for check in checks if check.chance is not None), key=lambda check: check.chance or 0.0)
    allowed = [FALSE_DISCOVERIES * rank / len(known) for rank in range(1, len(known) + 1)]
    last = max((i for i, check in enumerate(known) if (check.chance or 0.0) <= allowed[i]), default=-1)
    return [check for check in known[: last + 1] if check.decided]


class Comparison(NamedTuple):
    """The numbers of all arms of a study, for a reader.

    Attributes:
        caption: what the numbers are.
        columns: the heading of each.
        rows: name of an arm to its numbers.
    """

    caption: str
    columns: list[str]
    rows: dict[str, list[float]]


def ours(*checks: Check) -> list[Check]:
    """Mark sentences that are not from a paper."""
    return [replace(check, ours=True) for check in checks]


def exceeds(claim: str, *repeats: Numbers, sign: int = 1) -> Check:
    """Check that means over repeats are positive, or negative with `sign=-1`, by the smallest z-score.

    Example:
        >>> exceeds("it grows", {"mean": 1.0, "error": 0.1}).measured
        'z = 10.0'
        >>> exceeds("both grow", {"mean": 1.0, "error": 0.1}, {"mean": 1.0, "error": 0.2}).measured
        'z = 5.0 or more'
    """
    z = min(sign * (x["mean"] / x["error"] if x["error"] else math.inf * x["mean"]) for x in repeats)
    measured = f"z = {z:.1f}{' or more' * (len(repeats) > 1)}"
    return Check(claim, measured, z > SIGNIFICANT, decided=abs(z) > SIGNIFICANT)


def no_gain(claim: str, repeats: Numbers, *, sign: int = 1) -> Check:
    """Check that something does not improve: the gain is within `MARGIN`, by two standard errors."""
    gain, error = sign * repeats["mean"], repeats["error"]
    measured = f"gain {gain:.2g} ± {error:.2g} (log), margin {MARGIN:g}"
    return Check(claim, measured, gain + 2 * error < MARGIN, decided=abs(gain - MARGIN) > 2 * error)


def within(claim: str, value: float, expected: float, tolerance: float) -> Check:
    """Check that a number has the expected value, to a relative tolerance."""
    off = abs(value - expected) / abs(expected) if expected else abs(value)
    return Check(claim, f"{value:.6g} against {expected:.6g}", off <= tolerance)


def below(claim: str, value: float, limit: float) -> Check:
    """Check that a number does not exceed a limit."""
    return Check(claim, f"{value:.3g}, limit {limit:.3g}", value <= limit)


class Computation(Protocol):
    """A module or an object of a class as described above.

    It may also have an `EXPERIMENT`, the training runs that it reads; `compare`, which tabulates the numbers of all
    arms, if it takes arms of a user; and a `SOURCE`, if the docstring of its package does not name the paper.
    """

    __doc__: str | None

    def run(self, settings: Settings) -> Numbers: ...
    def check(self, numbers: Numbers) -> list[Check]: ...
    def draw(self, numbers: Numbers, figure: Figure) -> None: ...


@dataclass(frozen=True)
class Study:
    """What computes a result, under its name on the command line, with its source: the paper."""

    name: str
    computation: Computation
    source: str = ""

    @property
    def paragraphs(self) -> tuple[str, str]:
        """The claim, which is the first paragraph of the docstring, on one line; and the rest on another."""
        claim, _, rest = (self.computation.__doc__ or "").strip().partition("\n\n")
        return " ".join(claim.split()), " ".join(rest.split())

    @property
    def claim(self) -> str:
        """What the study judges."""
        return self.paragraphs[0]

    @property
    def experiment(self) -> Experiment | None:
        """The training runs whose numbers it reads; None for a study that computes its numbers."""
        return getattr(self.computation, "EXPERIMENT", None)

    @property
    def compare(self) -> Callable[[Numbers], Comparison] | None:
        """Tabulates the numbers of all arms; None for a study that takes no arms of a user."""
        return getattr(self.computation, "compare", None)


def over_repeats(x: "Tensor | Sequence[float]") -> Numbers:
    """Plain lists, or numbers for a vector, of the "mean" and standard "error" over the last axis."""
    x = torch.tensor(x, dtype=torch.float64) if isinstance(x, Sequence) else x
    return {"mean": x.mean(-1).tolist(), "error": (x.std(-1) / x.shape[-1] ** 0.5).tolist()}


def columns(rows: Iterable[Numbers], *names: str) -> list[list[float]]:
    """What rows have under each of some names, to plot."""
    rows = list(rows)
    return [[row[name] for row in rows] for name in names]


def error_bars(axis: Axes, at: Iterable[float], repeats: Iterable[Numbers], form: str = "o-", **look: Any) -> None:
    """Draw means with bars of one standard error at places of the x axis."""
    mean, error = columns(repeats, "mean", "error")
    axis.errorbar(list(at), mean, yerr=error, fmt=form, **look)


def at_point(repeats: Numbers, point: int) -> Numbers:
    """The mean and error at one of the points that `over_repeats` has."""
    return {name: values[point] for name, values in repeats.items()}


MODULES = {
    "tang-munos/fig1": "tang_munos.estimates:Fig1",
    "tang-munos/fig2": "tang_munos.estimates:Fig2",
    "tang-munos/fig3": "tang_munos.fig3_minimise",
    "tang-munos/fig4": "tang_munos.optima:Fig4",
    "tang-munos/fig5": "tang_munos.optima:Fig5",
    "tang-munos/fig6": "tang_munos.optima:Fig6",
    "tang-munos/lambda": "tang_munos.estimates:KLambda",
    "tang-munos/fig7": "tang_munos.fig7_frontier",
    "tang-munos/fig8": "tang_munos.fig8_language_model",
    "tang-munos/fig8-tabular": "tang_munos.fig8_sequences",
    "tang-munos/long-runs": "tang_munos.long_runs",
    "rethinking/fig1": "rethinking.placements:Coefficients",
    "rethinking/theorem-5.1": "rethinking.placements:Theorem",
    "rethinking/k3-bias": "rethinking.k3:Bias",
    "rethinking/k3-variance": "rethinking.k3:Variance",
    "rethinking/gaussian": "rethinking.k3:Gaussian",
    "rethinking/off-policy": "rethinking.placements:OffPolicy",
    "rethinking/language-model": "rethinking.language_model",
    "comedy/synthetic": "comedy.chains:Synthetic",
    "comedy/off-policy": "comedy.chains:Stale",
    "comedy/on-policy": "comedy.on_policy",
    "comedy/asynchronous": "comedy.asynchronous",
    "frpo/kl-in-reward": "frpo",
    "asyncopd/stale-distillation": "asyncopd.stale_distillation",
    "baselines": "own.baselines",
    "klgrad/discount": "own.discount",
    "klgrad/reuse": "own.reuse",
    "klgrad/k1-on-stale-samples": "own.stale_k1",
    "klgrad/division": "own.division",
    "klgrad/degenerate-distillation": "own.degenerate_distillation",
    "schulman/table": "schulman",
}
"""Results by name: the module, and the class in it where it has several."""


def load_study(name: str) -> Study:
    """The study of a name in `MODULES`; no other module is imported."""
    path, _, part = MODULES[name].partition(":")
    module: Any = import_module(f".{path}", __package__)
    source = getattr(module, "SOURCE", None) or import_module(module.__name__.rpartition(".")[0]).__doc__ or ""
    return Study(name, getattr(module, part)() if part else module, " ".join(source.split()))


def studies() -> dict[str, Study]:
    """All studies, in the order in which they are listed."""
    return {name: load_study(name) for name in MODULES}


# Compute, judge and draw results. Files are complete or absent.


@dataclass(frozen=True)
class Outcome:
    """The outcome of one result.

    Attributes:
        name: of the result.
        checks: one for each sentence of the claim.
        seconds: the time of the computation; None if the numbers of an earlier run were kept.
        measured: when and by which commit the training runs behind the numbers were made; empty without such runs.
        comparison: the numbers of all arms, if there are arms of a user.
    """

    name: str
    checks: list[Check]
    seconds: float | None = None
    measured: str = ""
    comparison: Comparison | None = None

    @property
    def decisive(self) -> list[Check]:
        """The paper's sentences; all sentences if none is from a paper."""
        return [check for check in self.checks if not check.ours] or self.checks

    @property
    def holds(self) -> bool:
        """Whether every decisive sentence holds."""
        return all(check.holds for check in self.decisive)

    @property
    def counts(self) -> str:
        """How many decisive sentences hold, are contradicted and are undecided."""
        tally = Counter(check.verdict for check in self.decisive)
        words = ", ".join(f"{verdict} {tally[verdict]}" for verdict in VERDICTS if tally[verdict])
        return f"{words}, of {len(self.decisive)}"

    @property
    def is_contradicted(self) -> bool:
        """Whether the opposite of a decisive sentence is shown."""
        return any(check.verdict == "contradicted" for check in self.decisive)

    @property
    def verdict(self) -> str:
        """`holds`, or the decisive sentences that are contradicted and those that are undecided."""
        of = lambda verdict: "; ".join(f"{c.sentence} ({c.measured})" for c in self.decisive if c.verdict == verdict)
        return ". ".join(f"{verdict}: {of(verdict)}" for verdict in VERDICTS[1:] if of(verdict)) or "holds"


def reproduce(study: Study, settings: Settings, out: Path, *, fresh: bool = False) -> Outcome:
    """Compute, judge and draw one result, into a folder for numbers and figures.

    Numbers that an earlier run of the same code and settings has left there are kept, unless they should be `fresh`. A
    file of training runs is read at once, and may have changed; so may the file of a user's arm.
    """
    data, arms = out / f"{study.name}.json", list(settings.arms)
    requested = {"klgrad": __version__, "torch": torch.__version__, "code": _code(), **asdict(settings), "arms": arms}
    numbers, seconds = None if fresh or study.experiment or arms else _kept(data, requested), None
    if numbers is None:
        start = time.perf_counter()
        # Judge and draw what JSON stores, so that kept numbers give the same result.
        numbers = json.loads(json.dumps(finite(study.computation.run(settings))))
        seconds = time.perf_counter() - start
    made = numbers["made"] if study.experiment else {}
    measured = f"{', '.join(made['date'])}, commit {', '.join(made['commit'])}" if made else ""
    comparison = study.compare(numbers) if study.compare and settings.arms else None
    outcome = Outcome(study.name, study.computation.check(numbers), seconds, measured, comparison)
    saved = {
        "result": study.name,
        "source": study.source,
        "claim": study.claim,
        "settings": requested,
        "verdict": outcome.verdict,
        "checks": [asdict(check) for check in outcome.checks],
        "numbers": numbers,
    }
    write_whole(data, json.dumps(saved, indent=1) + "\n")
    _draw(study, numbers, out / f"{study.name}.png")
    return outcome


def _kept(data: Path, requested: Numbers) -> Numbers | None:
    """Numbers of an earlier run with the same settings; None if there are none."""
    try:
        saved = json.loads(data.read_text(encoding="utf-8"))
        return saved["numbers"] if saved["settings"] == requested else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


@cache
def _code() -> str:
    """A digest of the package's sources: numbers of other code are computed again."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _draw(study: Study, numbers: Numbers, path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(look(10)):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        study.computation.draw(numbers, figure)
        write_figure(figure, path)


# Compute several results at a time, each in its own process.


def every_outcome(
    studies: Sequence[Study], settings: Settings, out: Path, *, fresh: bool = False, jobs: int = 1
) -> Iterator[Outcome]:
    """Compute results with `jobs` processes; outcomes come as they finish.

    On an interrupt the processes end at once, and leave no partial file.
    """
    jobs = min(jobs, len(studies))
    if jobs == 1:
        for study in studies:
            yield reproduce(study, settings, out, fresh=fresh)
        return
    # Spawn, because a fork copies locks that other threads hold, such as that of a progress bar.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_begin_worker, initargs=(torch.get_num_threads(),)) as pool:
        # The workers, which start at `submit`, inherit that Ctrl-C is ignored: this process decides whether to stop.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        tasks = [pool.submit(_reproduce_named, study.name, settings, out, fresh) for study in studies]
        signal.signal(signal.SIGINT, handler)
        try:
            for task in as_completed(tasks):
                yield task.result()
        except BaseException:
            workers = dict(pool._processes)
            for worker in workers.values():
                worker.terminate()
            pool.shutdown(cancel_futures=True)
            for study, kind in product(studies, ("json", *KINDS)):
                for partial in partials_of(out / f"{study.name}.{kind}", workers):
                    partial.unlink(missing_ok=True)
            raise


def _begin_worker(threads: int) -> None:
    """In a worker: use the parent's number of threads, and end with it, since one that was killed cannot say so."""
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _reproduce_named(name: str, settings: Settings, out: Path, fresh: bool) -> Outcome:
    return reproduce(load_study(name), settings, out, fresh=fresh)
