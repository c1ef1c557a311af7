"""How a loss weights the advantages: its baseline, the weight of each length, and a division by the deviation."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..batch import Batch
from ..verdict import MATCH

Baseline = Literal["none", "group", "batch"]

DIVIDED = 1e-2
"""Largest relative difference of the weights of a loss that divides by the deviation of the group. The small number
that losses add to the deviation changes them by less than this, because the advantages are far apart
(`WholeCase.different`)."""


@dataclass(frozen=True)
class Weighting:
    """The factor on the score of a token, relative to its completion's advantage.

    Attributes:
        baseline: what is subtracted from the advantage: nothing, the mean of the group, or the mean of the batch.
        by_length: the weight of completions by their number of tokens; the first is 1.
        divided_by_deviation: whether each group is divided by its standard deviation.
    """

    baseline: Baseline
    by_length: dict[int, float]
    divided_by_deviation: bool

    @property
    def length_biased(self) -> bool:
        """Whether the weight depends on the length."""
        return any(abs(weight - 1) > DIVIDED for weight in self.by_length.values())


def find_weighting(batch: Batch, weight: Tensor) -> Weighting | None:
    """Describe the (B, T) weights that a loss gives to the tokens of a batch; None if they are none of these.

    Args:
        batch: with the advantages.
        weight: 0 where masked.

    Returns:
        The simplest description.
    """
    per_row = weight.sum(-1) / batch.mask.sum(-1)
    even = torch.where(batch.mask, weight - per_row[:, None], 0)
    if not bool(weight.isfinite().all()) or float(even.norm()) > MATCH * float(weight.norm()):
        return None
    for divided in (False, True):
        for baseline in ("none", "group", "batch"):
            expected = _expected(batch, baseline, divided)
            by_length = _by_length(batch, per_row, expected)
            fitted = torch.zeros_like(per_row)
            for length, factor in by_length.items():
                fitted += torch.where(batch.mask.sum(-1) == length, factor * expected, 0)
            off = float((per_row - fitted).norm()) / float(per_row.norm().clamp(min=torch.finfo(per_row.dtype).tiny))
            if off <= (DIVIDED if divided else MATCH) and min(by_length.values()) > 0:
                first = next(iter(by_length.values()))
                return Weighting(baseline, {n: x / first for n, x in by_length.items()}, divided)
    return None


def _expected(batch: Batch, baseline: Baseline, divided: bool) -> Tensor:
    """(B,) the advantages minus the baseline, divided by the deviation of the group if asked."""
    by_group = batch.rewards.view(-1, batch.group_size)
    mean = {
        "none": torch.zeros_like(by_group),
        "group": by_group.mean(-1, keepdim=True),
        "batch": by_group.mean().expand_as(by_group),
    }[baseline]
    apart = by_group - mean
    if divided:
        deviation = by_group.std(-1, keepdim=True)
        apart = torch.where(deviation > MATCH, apart / deviation, 0)
    return apart.flatten()


def _by_length(batch: Batch, per_row: Tensor, expected: Tensor) -> dict[int, float]:
    """The least-squares factor of each length."""
    lengths = batch.mask.sum(-1)
    found = {}
    for length in range(1, batch.mask.shape[1] + 1):
        here = lengths == length
        if not bool(here.any()):
            continue
        size = float(expected[here].square().sum())
        found[length] = float(per_row[here] @ expected[here]) / size if size else 0.0
    return found
