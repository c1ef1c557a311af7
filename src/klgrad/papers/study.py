"""What one reproduced result consists of.

Each result is a module: its docstring names the figure, states the claim in our own words and gives the
source; `run` computes numbers that JSON can hold, `check` judges them, `draw` draws them. Judging and drawing
see the saved numbers only, so that neither can depend on anything that was not kept.
"""

from collections.abc import Callable
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
"""Standard errors beyond which a difference over repeats counts: one chance in thirty thousand, with about
sixty comparisons made in all."""


MARGIN = 0.25
"""A gain in the logarithm that would count as one: a quarter."""


@dataclass(frozen=True)
class Settings:
    """How much to compute: `quick` shrinks repeats and steps, `seed` moves every random number."""

    quick: bool = False
    seed: int = 0

    def size(self, full: int, quick: int) -> int:
        """The one that applies."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Check:
    """One sentence of a claim, judged: `measured` says by what."""

    claim: str
    measured: str
    holds: bool


def exceeds(claim: str, difference: float, error: float) -> Check:
    """A statistical claim that a difference over repeats is positive, judged by its z-score."""
    z = difference / error if error > 0 else float("inf") * difference
    return Check(claim, f"z = {z:.1f}", z > SIGNIFICANT)


def no_gain(claim: str, gain: float, error: float) -> Check:
    """A statistical claim that something does not improve: two standard errors above the gain stay within a margin."""
    return Check(claim, f"gain {gain:.2g} ± {error:.2g} (log), margin {MARGIN:g}", gain + 2 * error < MARGIN)


def within(claim: str, value: float, expected: float, tolerance: float) -> Check:
    """A claim that a number has a value, to a relative tolerance."""
    off = abs(value - expected) / abs(expected) if expected else abs(value)
    return Check(claim, f"{value:.6g} against {expected:.6g}", off <= tolerance)


def below(claim: str, value: float, limit: float) -> Check:
    """A claim that a number stays under a limit."""
    return Check(claim, f"{value:.3g}, limit {limit:.3g}", value <= limit)


@dataclass(frozen=True)
class Study:
    """A module of the shape above, under the name that the command knows."""

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
    def run(self) -> Callable[[Settings], Numbers]:
        """Compute."""
        return self.module.run

    @property
    def check(self) -> Callable[[Numbers], list[Check]]:
        """Judge."""
        return self.module.check

    @property
    def draw(self) -> "Callable[[Numbers, Figure], None]":
        """Draw."""
        return self.module.draw


def over_repeats(x: "Tensor") -> dict[str, Any]:
    """Mean and standard error over the last axis, as plain lists (or numbers)."""
    error = x.std(-1) / x.shape[-1] ** 0.5
    return {"mean": x.mean(-1).tolist(), "error": error.tolist()}
