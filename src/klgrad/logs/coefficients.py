"""The coefficients of a cell on the tokens of the data, compared with those of the sound terms."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import zoo as cells
from ..core.importance import ImportanceWeighting, Truncate
from ..core.rollout import Rollout
from ..core.term import KLTerm
from ..remedies import as_code
from ..zoo import Cell
from .log_errors import LogError

PREFIX_BOUND = Truncate(2.0)
"""The bound on prefix ratios. Without one, the product of hundreds of ratios is mostly noise; training uses one too."""

ALIVE, DEAD = 1e-2, 1e-3
"""A token is in a dead zone if the sound coefficient is larger than `ALIVE`, and the coefficient of the cell is smaller
than `DEAD` times the sound one."""


def sound_terms(off_policy: bool) -> dict[str, KLTerm]:
    """The reverse KL by level, with importance weights if the file has log-probs of the sampler."""
    if not off_policy:
        return {"token": KLTerm(level="token"), "sequence": KLTerm()}
    return {
        "token": KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None)),
        "sequence": KLTerm(weighting=ImportanceWeighting("prefix", bound=PREFIX_BOUND)),
    }


def cell_of(name: str) -> Cell:
    """Look up a cell, and check that its coefficients depend on one completion only."""
    cell = cells.get(name)
    if cell.couples_groups or cell.compares_completions:
        raise LogError(
            "a cell whose coefficients depend on one completion only",
            f"{name!r}, which needs the whole batch or group",
            f"choose another cell, such as k3-loss or k1-reward; `klgrad audit {name}` examines this one",
        )
    return cell


def coefficients(cell: Cell, rollout: Rollout) -> Tensor:
    """(B, T) coefficients of the token scores in the gradient of the cell, summed over the completion."""
    with torch.enable_grad():
        loss = cell(rollout)
        if not loss.requires_grad:
            return torch.zeros_like(rollout.log_ratio)
        (gradient,) = torch.autograd.grad(loss, rollout.logp, allow_unused=True)
    # The cell is a mean over completions: times their number, it gives the coefficients of each completion.
    return torch.zeros_like(rollout.log_ratio) if gradient is None else gradient * len(rollout.logp)


@dataclass(frozen=True)
class Comparison:
    """The coefficients c of a cell compared with the coefficients s of a term, over all tokens.

    Attributes:
        term: the code of the term.
        relative_difference: ‖c - s‖ / ‖s‖.
        correlation: of c with s; NaN if one of them is constant.
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
        """Add a batch."""
        live = rollout.mask
        c = coefficients(self.cell, rollout)[live].double()
        if not len(c):
            return
        largest = [c.abs().max()]
        for level, term in self.terms.items():
            s = term(rollout).coefficient[live].double()
            # The squared difference has its own sum: computed from the others, it would cancel where c is near s.
            self.moments[level] += torch.stack([c.sum(), s.sum(), c @ c, s @ s, c @ s, (c - s) @ (c - s)])
            largest.append(s.abs().max())
            if level == "token":
                self.dead += int(((s.abs() > ALIVE) & (c.abs() < DEAD * s.abs())).sum())
        self.largest = torch.maximum(self.largest, torch.stack(largest))
        self.tokens += len(c)

    @property
    def dead_share(self) -> float:
        """Share of tokens in a dead zone, compared with the sound term at token level."""
        return self.dead / max(self.tokens, 1)

    def comparisons(self, *, on_policy: bool = False) -> dict[str, Comparison]:
        """Comparisons by level. With `on_policy` the terms are shown without weights, since every ratio was 1."""
        found = {}
        terms = sound_terms(off_policy=False) if on_policy else self.terms
        for (level, moments), sound in zip(self.moments.items(), self.largest[1:].tolist(), strict=True):
            c, s, cc, ss, cs, off = moments.tolist()
            n = max(self.tokens, 1)
            spread = max(cc - c * c / n, 0.0) * max(ss - s * s / n, 0.0)
            # A spread of the size of rounding counts as zero: a constant has no correlation.
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
