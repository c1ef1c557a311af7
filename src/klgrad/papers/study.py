"""The parts of one reproduced result.

Each result is a module. Its docstring states the claim in our own words, names the figure and gives the source. `run`
computes numbers that JSON can hold, `check` judges them, and `draw` draws them. `check` and `draw` read the saved
numbers only, so that neither depends on anything that was not saved.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

Numbers = dict[str, Any]
"""Nested dictionaries and lists of numbers and strings."""

SIGNIFICANT = 4.0
"""A difference over repeats is significant beyond this many standard errors.

That is a chance of one in thirty thousand, with about sixty comparisons in all.
"""


MISSING = "are missing"
"""How the measured text of a sentence ends that is undecided because runs or measurements have not been made."""
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
    """

    quick: bool = False
    seed: int = 0
    measured: str | None = None

    def size(self, full: int, quick: int) -> int:
        """`quick` in a quick run, else `full`."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Experiment:
    """The training runs on a GPU whose numbers a study reads.

    Attributes:
        file: the CSV file in `recorded/`.
        script: the script in benchmarks/ that writes it.
        parts: the first argument of each call of the script, in order; empty for one call without.
        also: further experiments whose files it reads.
    """

    file: str
    script: str
    parts: tuple[str, ...] = ()
    also: tuple["Experiment", ...] = ()


@dataclass(frozen=True)
class Check:
    """One sentence of a claim, and the measured value that decides it.

    Attributes:
        claim: the sentence.
        measured: the value, in words.
        holds: whether the sentence holds.
        decided: False if the measurement cannot tell; then `holds` is False.
    """

    claim: str
    measured: str
    holds: bool
    decided: bool = True

    @property
    def verdict(self) -> str:
        """`holds`, `contradicted` if its opposite is shown, or `undecided` if neither is."""
        return "holds" if self.holds else "contradicted" if self.decided else "undecided"

    @property
    def ours(self) -> bool:
        """Whether the sentence is not from the paper, as it says itself."""
        return self.claim.startswith("(ours)")

    @property
    def waits(self) -> bool:
        """Whether it is undecided because runs or measurements have not been made, as it says itself."""
        return not self.decided and self.measured.endswith(MISSING)


def exceeds(claim: str, difference: float, error: float) -> Check:
    """Check that a difference over repeats is positive, by its z-score; undecided if it is not significant.

    Example:
        >>> exceeds("it grows", difference=1.0, error=0.1)
        Check(claim='it grows', measured='z = 10.0', holds=True, decided=True)
    """
    z = _z_score(difference, error)
    return Check(claim, f"z = {z:.1f}", z > SIGNIFICANT, decided=abs(z) > SIGNIFICANT)


def all_exceed(claim: str, differences: Iterable[tuple[float, float]]) -> Check:
    """Check that every one of several differences, each with its error, is positive, by the smallest z-score.

    Example:
        >>> all_exceed("both grow", [(1.0, 0.1), (1.0, 0.2)])
        Check(claim='both grow', measured='z = 5.0 or more', holds=True, decided=True)
    """
    z = min(_z_score(*pair) for pair in differences)
    return Check(claim, f"z = {z:.1f} or more", z > SIGNIFICANT, decided=abs(z) > SIGNIFICANT)


def _z_score(difference: float, error: float) -> float:
    return difference / error if error > 0 else float("inf") * difference


def no_gain(claim: str, gain: float, error: float) -> Check:
    """Check that something does not improve: the gain is within `MARGIN`, by two standard errors."""
    measured = f"gain {gain:.2g} ± {error:.2g} (log), margin {MARGIN:g}"
    return Check(claim, measured, gain + 2 * error < MARGIN, decided=abs(gain - MARGIN) > 2 * error)


def within(claim: str, value: float, expected: float, tolerance: float) -> Check:
    """Check that a number has the expected value, to a relative tolerance."""
    off = abs(value - expected) / abs(expected) if expected else abs(value)
    return Check(claim, f"{value:.6g} against {expected:.6g}", off <= tolerance)


def below(claim: str, value: float, limit: float) -> Check:
    """Check that a number does not exceed a limit."""
    return Check(claim, f"{value:.3g}, limit {limit:.3g}", value <= limit)


@dataclass(frozen=True)
class Study:
    """A module as described above, under its name on the command line."""

    name: str
    module: ModuleType

    @property
    def claim(self) -> str:
        """The first paragraph of the module's docstring, on one line."""
        return " ".join((self.module.__doc__ or "").strip().split("\n\n")[0].split())

    @property
    def source(self) -> str:
        """The paper: the first sentence of its package's docstring."""
        package = import_module(self.module.__name__.rpartition(".")[0]) if "." in self.module.__name__ else self.module
        return " ".join((package.__doc__ or "").split())

    @property
    def experiment(self) -> Experiment | None:
        """The training runs whose numbers it reads; None for a study that computes its numbers."""
        return getattr(self.module, "EXPERIMENT", None)

    @property
    def run(self) -> Callable[[Settings], Numbers]:
        """Computes the numbers."""
        return self.module.run

    @property
    def check(self) -> Callable[[Numbers], list[Check]]:
        """Judges the numbers."""
        return self.module.check

    @property
    def draw(self) -> "Callable[[Numbers, Figure], None]":
        """Draws the numbers."""
        return self.module.draw


def over_repeats(x: "Tensor") -> dict[str, Any]:
    """Mean and standard error over the last axis, in the dtype of `x`.

    Returns:
        Plain lists, or numbers for a vector, under "mean" and "error".
    """
    error = x.std(-1) / x.shape[-1] ** 0.5
    return {"mean": x.mean(-1).tolist(), "error": error.tolist()}


def exceeds_zero(claim: str, x: "Tensor") -> Check:
    """Check that the mean of a vector of repeats is positive, by its z-score."""
    found = over_repeats(x)
    return exceeds(claim, found["mean"], found["error"])
