"""The coefficient of a cell on each token of the data, compared with those of the sound terms."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import zoo as cells
from ..core.importance import ImportanceWeighting, Truncate
from ..core.rollout import Rollout
from ..core.term import KLTerm
from ..errors import RolloutError
from ..remedies import as_code
from ..zoo import Cell
from .log_errors import LogError

PREFIX_BOUND = Truncate(2.0)
"""Unbounded, the product of hundreds of ratios is noise; a bounded one is what one would train with."""

ALIVE, DEAD = 1e-2, 1e-3
"""A token is in a dead zone where the sound coefficient is beyond the first, and the cell's within the second of it."""


def sound_terms(off_policy: bool) -> dict[str, KLTerm]:
    """The reverse KL by level, weighted by what sampled the tokens where the file says it."""
    if not off_policy:
        return {"token": KLTerm(level="token"), "sequence": KLTerm()}
    return {
        "token": KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None)),
        "sequence": KLTerm(weighting=ImportanceWeighting("prefix", bound=PREFIX_BOUND)),
    }


def cell_of(name: str) -> Cell:
    """A cell whose coefficients need no more than the completion itself."""
    cell = cells.get(name)
    one = torch.full((2, 1), -1.0)
    alone = not cell.couples_groups
    try:
        cell(Rollout(one, one, one != 0, behavior_logp=one))
    except RolloutError:  # it asked for a group
        alone = False
    if not alone:
        raise LogError(
            "a cell whose coefficients depend on one completion alone",
            f"{name!r}, which needs the whole batch or group",
            f"choose another, such as k3-loss or k1-reward; see `klgrad audit {name}` for this one",
        )
    return cell


def coefficients(cell: Cell, rollout: Rollout) -> Tensor:
    """(B, T) what the cell's gradient puts on each token's score, at the scale of a sum over the completion."""
    with torch.enable_grad():
        loss = cell(rollout)
        if not loss.requires_grad:
            return torch.zeros_like(rollout.log_ratio)
        (gradient,) = torch.autograd.grad(loss, rollout.logp, allow_unused=True)
    # The cell is a mean over completions; times their number it is each completion's own.
    return torch.zeros_like(rollout.log_ratio) if gradient is None else gradient * len(rollout.logp)


@dataclass(frozen=True)
class Comparison:
    """A cell's coefficients c against a term's s over all tokens.

    Attributes:
        term: the code of the term.
        relative_difference: ‖c - s‖ / ‖s‖.
        correlation: of c with s; NaN where one is constant.
        scale: the multiple of s nearest to c.
        largest, largest_sound: max |c|, max |s|.
    """

    term: str
    relative_difference: float
    correlation: float
    scale: float
    largest: float
    largest_sound: float


class CoefficientSums:
    """Second moments of the coefficients of one cell and of the sound terms."""

    def __init__(self, cell: Cell, off_policy: bool) -> None:
        self.cell, self.terms = cell, sound_terms(off_policy)
        self.moments = {level: torch.zeros(6, dtype=torch.float64) for level in self.terms}
        self.largest = torch.zeros(3, dtype=torch.float64)
        self.tokens = self.dead = 0

    def add(self, rollout: Rollout) -> None:
        """One batch."""
        live = rollout.mask
        c = coefficients(self.cell, rollout)[live].double()
        if not len(c):
            return
        largest = [c.abs().max()]
        for level, term in self.terms.items():
            s = term(rollout).coefficient[live].double()
            # The square of the difference has its own sum: from the others it would cancel where c is s.
            self.moments[level] += torch.stack([c.sum(), s.sum(), c @ c, s @ s, c @ s, (c - s) @ (c - s)])
            largest.append(s.abs().max())
            if level == "token":
                self.dead += int(((s.abs() > ALIVE) & (c.abs() < DEAD * s.abs())).sum())
        self.largest = torch.maximum(self.largest, torch.stack(largest))
        self.tokens += len(c)

    @property
    def dead_share(self) -> float:
        """Share of tokens on which the cell puts nothing where the sound term at token level puts something."""
        return self.dead / max(self.tokens, 1)

    def comparisons(self, *, on_policy: bool = False) -> dict[str, Comparison]:
        """By level; `on_policy` if every ratio was 1, so that the terms can be written without a sampler."""
        found = {}
        terms = sound_terms(off_policy=False) if on_policy else self.terms
        for (level, moments), sound in zip(self.moments.items(), self.largest[1:].tolist(), strict=True):
            c, s, cc, ss, cs, off = moments.tolist()
            n = max(self.tokens, 1)
            spread = max(cc - c * c / n, 0.0) * max(ss - s * s / n, 0.0)
            # A spread that is rounding is none: a constant has no correlation.
            varies = spread > 1e-20 * cc * ss
            found[level] = Comparison(
                as_code(terms[level]),
                (off / ss) ** 0.5 if ss else float("nan"),
                (cs - c * s / n) / spread**0.5 if varies else float("nan"),
                cs / ss if ss else float("nan"),
                float(self.largest[0]),
                sound,
            )
        return found
