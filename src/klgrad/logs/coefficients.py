"""The coefficients that a KL term gives to the tokens of a log, and sums by label."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import zoo as cells
from ..core.importance import ImportanceWeighting, Truncate
from ..core.rollout import Rollout
from ..core.term import KLTerm, as_code
from ..errors import LogError
from ..reports import KLSums, MismatchSums, Ratios, Report
from ..zoo import Cell
from .columns import PaddedBatch

# The KL of each part of a log: of each step of a run, for example.

MOST_LABELS = 10_000
"""Largest number of parts: each needs sums of its own."""

KEPT = 2**10
"""Ratios of each part from which their quantiles are computed; the memory of all parts together is bounded so."""


@dataclass(frozen=True, eq=False)
class Part:
    """The completions with one value in the column.

    Attributes:
        label: the value.
        rows: the number of completions.
        tokens: the number of live tokens.
        kl: the `kl_report`.
        mismatch: the `mismatch_report`; None without log-probs of the sampler.
    """

    label: object
    rows: int
    tokens: int
    kl: Report
    mismatch: Report | None

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        return {
            "value": self.label,
            "rows": self.rows,
            "tokens": self.tokens,
            "report": self.kl.metrics(),
            "intervals": self.kl.intervals(),
            "mismatch": None if self.mismatch is None else self.mismatch.metrics(),
        }


class LabelSums:
    """Sums over each part, in memory that grows with the number of parts and of their prompts.

    Args:
        name: the column's name.
        has_old_policy: whether the trainer's policy at the time of sampling has a column of its own.
    """

    def __init__(self, name: str, has_old_policy: bool) -> None:
        self._name, self._has_old_policy = name, has_old_policy
        self._sums: dict[int, _OfPart] = {}

    def add(self, batch: PaddedBatch) -> None:
        """Add a batch, row by row to the parts that its rows belong to."""
        assert batch.by is not None  # the column was chosen
        for number in batch.by.unique().tolist():
            if number not in self._sums:
                self._check_count()
                self._sums[number] = _OfPart(self._has_old_policy)
            self._sums[number].add(batch, torch.nonzero(batch.by == number)[:, 0])

    def parts(self, labels: list[object]) -> list[Part]:
        """The parts that have a live token, by increasing value if all values are numbers."""
        found = [sums.part(labels[number]) for number, sums in self._sums.items() if sums.kl.lengths.tokens]
        numeric = all(isinstance(part.label, int | float) for part in found)
        value: Any = lambda part: part.label
        return sorted(found, key=value) if numeric else found

    def _check_count(self) -> None:
        if len(self._sums) >= MOST_LABELS:
            raise LogError(
                f"at most {MOST_LABELS:,} different values in `{self._name}`",
                "more",
                "choose a column with fewer values, such as the step",
            )


class _OfPart:
    def __init__(self, has_old_policy: bool) -> None:
        self.kl = KLSums(Ratios(KEPT))
        self.mismatch = MismatchSums(ratios=Ratios(KEPT) if has_old_policy else self.kl.ratios)
        self._has_old_policy = has_old_policy
        self._groups: dict[int, int] = {}

    def add(self, batch: PaddedBatch, index: Tensor) -> None:
        group = None if batch.group is None else self._numbered(batch.group[index])
        self.kl.add(_rows(batch.rollout, index), group)
        if batch.trainer is not None:
            trainer = _rows(batch.trainer, index)
            self.mismatch.add(trainer, group)
            if self._has_old_policy:  # a `MismatchSums` that was given ratios leaves them to its caller
                self.mismatch.ratios.add(trainer)

    def part(self, label: object) -> Part:
        mismatch = self.mismatch.report() if self.mismatch.lengths.rows else None
        return Part(label, self.kl.lengths.rows, self.kl.lengths.tokens, self.kl.report(), mismatch)

    def _numbered(self, group: Tensor) -> Tensor:
        """Numbers from 0 within the part: sums are stored for all numbers up to the largest."""
        return torch.tensor([self._groups.setdefault(x, len(self._groups)) for x in group.tolist()])


def _rows(rollout: Rollout, index: Tensor) -> Rollout:
    names = ("logp", "ref_logp", "mask", "behavior_logp")
    found: dict[str, Any] = {name: getattr(rollout, name) for name in names}
    rows: dict[str, Any] = {name: None if x is None else x.detach()[index] for name, x in found.items()}
    return Rollout(**rows)


# The coefficients of a cell on the tokens of the data, compared with those of the sound terms.

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
