"""A gradient as the sum of two targets."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..targets import TargetName, Verdict, signed
from .gradient import unit_of
from .measurement import Measurement, Shape

System = tuple[Tensor, Tensor]
"""(parameters, targets) the gradients of the targets, and (parameters,) that of a loss."""

DRIFT: TargetName = "forward-kl-sampler-sequence"
"""Its gradient is minus the mean score of the sampler's completions."""

COLLINEAR = 1e-9
"""Two targets with a cosine this near to 1 are the same on these cases; different ones are at least 1e-7 from it. On
problems of one token those of tokens and of completions coincide, so that no sum of such a pair is found."""

SAME_MIXTURE = 1e-3
"""Directions (a, b) of the two scales that differ by less than this, in length 1, are one mixture. An exact sum has one
direction up to rounding; a fit that needs other shares in every batch shape explains nothing."""

SMALLEST_SHARE = 1e-2
"""Both targets of a sum have at least this share of the gradient in every batch shape. Otherwise one target is enough
up to a small remainder, such as that of a clamp that is rarely active, and the sum would hide it."""

SAME_REMAINDER = 1e-9
"""Remainders that differ by less are equal; rounding makes them differ by about 1e-12."""


@dataclass(frozen=True)
class Part:
    """A target in a sum.

    Attributes:
        verdict: the target, or `climbs` and the target where its share is negative.
        scale: the multiple of the target's gradient, in the first batch shape; None if it depends on the problem, also
            in sign.
    """

    verdict: Verdict
    scale: float | None


@dataclass(frozen=True)
class Decomposition:
    """The sum of two targets that is nearest to a gradient.

    Attributes:
        parts: the two targets, the simpler one first.
        remainder: relative distance of the gradient to their sum, the largest on any case.
    """

    parts: tuple[Part, Part]
    remainder: float

    @property
    def names(self) -> tuple[Verdict, Verdict]:
        """The verdicts of the parts."""
        return self.parts[0].verdict, self.parts[1].verdict

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        parts = [{"verdict": part.verdict, "scale": part.scale} for part in self.parts]
        return {"parts": parts, "remainder": self.remainder}


def decompose(
    measured: Sequence[Measurement], fitted: Sequence[Measurement], targets: Sequence[str]
) -> Decomposition | None:
    """Fit every pair of targets, with one scale per target and batch shape, and return the nearest pair.

    Args:
        measured: the gradients on all cases; none is zero.
        fitted: the cases that determine the scales.
        targets: the names of the targets to choose from.

    Returns:
        The pair with the smallest remainder, or None if no pair is mixed alike in every batch shape.
    """
    unit = max(unit_of(m.gradient.mean) for m in measured)
    pairs = torch.combinations(torch.arange(len(targets)), 2)
    systems: dict[Shape, list[System]] = defaultdict(list)
    for m in fitted:
        systems[m.case.shape].append(_system(m, targets, unit))
    scales = {shape: _solve(some, pairs) for shape, some in systems.items()}
    off = [_distance(_system(m, targets, unit), pairs, scales[m.case.shape]) for m in measured]
    mixtures = torch.stack([scale / scale.norm(dim=-1, keepdim=True) for scale in scales.values()])
    alike = (mixtures - mixtures[0]).norm(dim=-1).amax(0) <= SAME_MIXTURE
    shares = [torch.stack([_shares(s, pairs, scales[shape]) for s in some]).amax(0) for shape, some in systems.items()]
    both = torch.stack(shares).amin(0).amin(-1) >= SMALLEST_SHARE
    remainder = torch.where(alike & both, torch.stack(off).amax(0), torch.inf).nan_to_num(torch.inf, posinf=torch.inf)
    best = int((remainder <= remainder.min() + SAME_REMAINDER).nonzero()[0])  # of equal ones the simplest
    if not torch.isfinite(remainder[best]):
        return None
    first = next(iter(scales.values()))[best] * unit
    one, other = (_part(targets[int(i)], float(x)) for i, x in zip(pairs[best], first, strict=True))
    return Decomposition((one, other), float(remainder[best]))


def with_drift(
    measured: Sequence[Measurement], fitted: Sequence[Measurement], targets: Sequence[str]
) -> Decomposition | None:
    """Fit every target together with a drift to or from the sampler, whose share may differ between the problems.

    A baseline makes such a drift on stale samples: its mean times the mean score of the sampler's completions.

    Args:
        measured: the gradients on all cases.
        fitted: the cases that determine the scales.
        targets: the names of the targets to choose from; without `DRIFT` among them there is no such sum.

    Returns:
        The target with the smallest remainder, if its scale is positive.
    """
    if DRIFT not in targets:
        return None
    others = [name for name in targets if name != DRIFT]
    unit = max(unit_of(m.gradient.mean) for m in measured)
    systems: dict[Shape, list[System]] = defaultdict(list)
    for m in fitted:
        systems[m.case.shape].append(_across(_system(m, targets, unit), targets.index(DRIFT)))
    scales = {shape: torch.stack([_projection(s) for s in some]).mean(0) for shape, some in systems.items()}
    off = [
        (gradient[:, None] - columns * scales[m.case.shape]).norm(dim=0)
        for m in measured
        for columns, gradient in [_across(_system(m, targets, unit), targets.index(DRIFT))]
    ]
    positive = torch.stack([scale > 0 for scale in scales.values()]).all(0)
    remainder = torch.where(positive, torch.stack(off).amax(0), torch.inf).nan_to_num(torch.inf, posinf=torch.inf)
    best = int((remainder <= remainder.min() + SAME_REMAINDER).nonzero()[0])
    if not torch.isfinite(remainder[best]):
        return None
    scale = float(next(iter(scales.values()))[best]) * unit
    return Decomposition((Part(cast(TargetName, others[best]), scale), Part(DRIFT, None)), float(remainder[best]))


def _across(system: System, drift: int) -> System:
    """The parts of the gradients that are orthogonal to the drift; its own column is left out."""
    columns, gradient = system
    along = columns[:, drift] / columns[:, drift].norm()
    kept = [i for i in range(columns.shape[1]) if i != drift]
    return columns[:, kept] - along[:, None] * (along @ columns[:, kept]), gradient - along * (along @ gradient)


def _projection(system: System) -> Tensor:
    """The least-squares scale of each column alone."""
    columns, gradient = system
    return gradient @ columns / columns.square().sum(0)


def _part(target: str, scale: float) -> Part:
    return Part(signed(cast(TargetName, target), climbs=scale < 0), abs(scale))


def _system(m: Measurement, targets: Sequence[str], unit: float) -> System:
    """The gradients of the targets as columns, and that of the loss, divided so that cases have equal weight."""
    gradient = m.gradient.mean / unit
    columns = torch.stack([m.case.targets[name] for name in targets], -1)
    return columns / gradient.norm(), gradient / gradient.norm()


def _solve(systems: Sequence[System], pairs: Tensor) -> Tensor:
    """(pairs, 2) the least-squares scales; NaN for targets that coincide, and for a target that is zero."""
    gram = torch.stack([columns.T @ columns for columns, _ in systems]).sum(0)
    right = torch.stack([columns.T @ gradient for columns, gradient in systems]).sum(0)
    size = gram.diagonal().sqrt()
    cosine = (gram / size / size[:, None])[pairs[:, 0], pairs[:, 1]]
    one, other = (right / size)[pairs].unbind(-1)
    rest = torch.where(cosine.abs() < 1 - COLLINEAR, 1 - cosine.square(), torch.nan)
    return torch.stack([one - cosine * other, other - cosine * one], -1) / rest[:, None] / size[pairs]


def _shares(system: System, pairs: Tensor, scales: Tensor) -> Tensor:
    """(pairs, 2) the size of each part, relative to the gradient."""
    return system[0].norm(dim=0)[pairs] * scales.abs()


def _distance(system: System, pairs: Tensor, scales: Tensor) -> Tensor:
    columns, gradient = system
    return (gradient - torch.einsum("npd,np->nd", columns.T[pairs], scales)).norm(dim=-1)
