"""The KL of each part of a log: of each step of a run, for example."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.rollout import Rollout
from ..reports.accumulators import Ratios
from ..reports.divergence import KLSums, MismatchSums, Report
from .chunk import Block
from .log_errors import LogError

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

    def add(self, block: Block) -> None:
        """Add a block, row by row to the parts that its rows belong to."""
        assert block.by is not None  # the column was chosen
        for number in block.by.unique().tolist():
            if number not in self._sums:
                self._check_count()
                self._sums[number] = _OfPart(self._has_old_policy)
            self._sums[number].add(block, torch.nonzero(block.by == number)[:, 0])

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

    def add(self, block: Block, index: Tensor) -> None:
        group = None if block.group is None else self._numbered(block.group[index])
        self.kl.add(_rows(block.rollout, index), group)
        if block.trainer is not None:
            trainer = _rows(block.trainer, index)
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
