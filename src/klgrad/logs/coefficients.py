"""The coefficients that a KL loss gives to the tokens of a log, compared with those of the sound terms."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .. import zoo as cells
from ..core.importance import ImportanceWeighting, Truncate
from ..core.rollout import Rollout
from ..core.term import KLTerm, as_code
from ..errors import LogError
from ..targets import TARGETS, UNCORRECTED
from ..zoo import Cell

PREFIX_BOUND = Truncate(2.0)
"""The bound on prefix ratios. Without one, the product of hundreds of ratios is mostly noise; training uses one too."""

ALIVE, DEAD = 1e-2, 1e-3
"""A token is in a dead zone if the sound coefficient is larger than `ALIVE`, and the coefficient of the cell is smaller
than `DEAD` times the sound one."""

HARDLY = 0.05
"""Relative difference from the coefficients of the target below which a cell of that target needs no change."""

RARE = 1e-4
"""Smallest share of tokens in a dead zone that is mentioned."""

APART = 0.5
"""Relative difference from the sequence-level coefficients above which the report explains it."""


@dataclass(frozen=True)
class LevelComparison:
    """The coefficients c of a cell compared with the coefficients s of a term, over all tokens.

    `relative_difference` is ‖c - s‖ / ‖s‖; `correlation` is NaN if c or s is constant; `scale` is the multiple of s
    nearest to c.
    """

    term: str
    relative_difference: float
    correlation: float
    scale: float
    largest: float
    largest_sound: float


@dataclass(frozen=True)
class CoefficientComparison:
    """The coefficients of a cell on the tokens of a log.

    Attributes:
        cell: the KL loss in use.
        levels: its coefficients compared with the sound ones, token by token (`token`) and by completion (`sequence`).
        dead_share: share of tokens in a dead zone: the sound coefficient is not zero, but that of the cell is.
    """

    cell: Cell
    levels: dict[str, LevelComparison]
    dead_share: float

    @property
    def explanation(self) -> str:
        """Why a token-level loss is far from the sequence-level KL; empty if it is not."""
        token, sequence = (self.levels[level].relative_difference for level in ("token", "sequence"))
        if not sequence > max(APART, token):
            return ""
        return (
            "Whole completions: here the coefficient of a token also contains the KL of all later tokens. A "
            "token-level loss always differs much from this, so a large difference in this column is no error: compare "
            "such a loss token by token."
        )

    @property
    def advice(self) -> list[str]:
        """What to change in the loss, if anything."""
        off, target = self.levels["token"].relative_difference, self.cell.descends.on_policy
        is_dead = self.dead_share >= RARE
        if self.cell.instead is None or off != off:  # if π equals ref, there is nothing to compare
            return []
        if off < HARDLY and not is_dead and target == "reverse-kl-token":
            return []
        dead = f", and are zero on {self.dead_share:.2%} of the tokens" if is_dead else ""
        return [
            f"{self.cell.name} {TARGETS[target].does}: on these tokens its coefficients differ from those "
            f"of the token-level reverse KL by {off:.{0 if off >= HARDLY else 1}%}{dead}. {self.cell.instead}"
        ]

    @property
    def is_corrected(self) -> bool:
        """Whether the cell descends a divergence on samples of another policy too."""
        off_policy = self.cell.descends.off_policy
        return TARGETS[off_policy].has_gradient and off_policy not in UNCORRECTED

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.cell.name,
            "descends_on_policy": self.cell.descends.on_policy,
            "descends_off_policy": self.cell.descends.off_policy,
            "share_in_dead_zone": self.dead_share,
            "against": {level: asdict(x) for level, x in self.levels.items()},
        }


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
        (gradient,) = torch.autograd.grad(loss, rollout.logp, materialize_grads=True)
    # The cell is a mean over completions: times their number, it gives the coefficients of each completion.
    return gradient * len(rollout.logp)


class CoefficientSums:
    """Second moments of the coefficients of one cell and of the sound terms."""

    def __init__(self, cell: Cell, off_policy: bool) -> None:
        self.cell, self.terms = cell, sound_terms(off_policy)
        self.moments = {level: torch.zeros(6, dtype=torch.float64) for level in self.terms}
        self.largest = torch.zeros(3, dtype=torch.float64)
        self.tokens = self.dead = 0

    def add(self, rollout: Rollout) -> None:
        """Add a batch, whose `logp` requires a gradient."""
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

    def comparison(self, *, on_policy: bool) -> CoefficientComparison:
        """The result. With `on_policy` the terms are shown without weights, since every ratio was 1."""
        levels = {}
        terms = sound_terms(off_policy=False) if on_policy else self.terms
        for (level, moments), sound in zip(self.moments.items(), self.largest[1:].tolist(), strict=True):
            c, s, cc, ss, cs, off = moments.tolist()
            n = max(self.tokens, 1)
            spread = max(cc - c * c / n, 0.0) * max(ss - s * s / n, 0.0)
            # A spread of the size of rounding counts as zero: a constant has no correlation.
            varies = spread > 1e-20 * cc * ss
            levels[level] = LevelComparison(
                as_code(terms[level]),
                (off / ss) ** 0.5 if ss else float("nan"),
                (cs - c * s / n) / spread**0.5 if varies else float("nan"),
                cs / ss if ss else float("nan"),
                float(self.largest[0]),
                sound,
            )
        return CoefficientComparison(self.cell, levels, self.dead / max(self.tokens, 1))
