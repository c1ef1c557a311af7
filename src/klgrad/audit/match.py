"""Match measured gradients with the targets: one target, or a sum of several."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..targets import TARGETS, TO_REFERENCE, TargetName, Verdict, signed
from .gradients import Measurement, Shape, unit_of
from .problems import Case

# A gradient as the sum of two targets.

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


# Find the target whose gradient is a multiple of a given gradient.

MATCH = 1e-5
"""Largest relative bias of a match. In float64 a match has about 1e-12, and in a loss that casts to float32 about 1e-6;
distinct targets differ by more than 1e-2 on the problems (tested)."""

ROUNDING = 1e-12
"""A mean below this share of the gradient of one sample is zero up to rounding."""

ALIKE = 2.0
"""Sizes of gradients that differ by at most this factor are alike. Those of k2, near ref and far from it, differ by
a factor of 13 to 22 on the limit's problems; divided by the spread of the batch by 1.25 at most."""

LARGEST = 1e290
"""A larger gradient counts as not finite, since dividing it by a small number would overflow."""


class Match(NamedTuple):
    """The target whose gradient a loss has, or has with the sign reversed."""

    target: str
    climbs: bool


@dataclass(frozen=True, eq=False)
class Comparison:
    """Gradients on several cases, compared with targets up to one scale per batch shape.

    Attributes:
        measured: the gradients.
        targets: the names of the targets to compare with, simplest first. On-policy they are those that compare π
            with ref; the others have no gradient.
    """

    measured: list[Measurement]
    targets: tuple[str, ...] = TO_REFERENCE

    def only(self, keep: Callable[[Case], bool]) -> "Comparison":
        """The comparison over some of the cases."""
        return Comparison([m for m in self.measured if keep(m.case)], self.targets)

    @cached_property
    def is_finite(self) -> bool:
        """Whether the gradient is finite on all cases; 0/0 on one group makes an expectation NaN."""
        return all(m.gradient.typical < LARGEST for m in self.measured)

    @cached_property
    def is_nothing(self) -> bool:
        """Whether the expected gradient is zero on every case, relative to the size of that of one sample."""
        return self.is_finite and all(_vanishes(m, MATCH) for m in self.measured)

    @cached_property
    def scales(self) -> dict[str, dict[Shape, float]]:
        """By target, the least-squares scale per batch shape, with equal weight for every case; negative if it climbs.

        It is fitted over the standard cases of a shape, if there are any; wider cases must then have the same scale.
        """
        return {name: self._scales(name) for name in self.targets}

    @cached_property
    def fitted(self) -> list[Measurement]:
        """The cases that determine the scale of their shape."""
        standard = {m.case.shape for m in self.measured if not m.case.wider}
        return [m for m in self.measured if not m.case.wider or m.case.shape not in standard]

    def _scales(self, target: str) -> dict[Shape, float]:
        fits: dict[Shape, list[float]] = defaultdict(list)
        for m in self.fitted:
            t, unit = m.case.targets[target], unit_of(m.gradient.mean)
            fits[m.case.shape].append(float(m.gradient.mean / unit @ t / t.square().sum()) * unit)
        return {shape: sum(x / len(fit) for x in fit) for shape, fit in fits.items()}

    @cached_property
    def bias(self) -> dict[str, float]:
        """Relative distance to each target at the best positive scale: 0 is a match, 1 is no likeness."""
        if self.is_nothing or not self.is_finite:
            return dict.fromkeys(self.targets, 1.0)
        unit = max(unit_of(m.gradient.mean) for m in self.measured if m.gradient.mean.any())
        found: dict[str, float] = {}
        for name in self.targets:
            off = size = 0.0
            for m in self.measured:
                t, g = m.case.targets[name], m.gradient.mean / unit
                scale = max(self.scales[name][m.case.shape] / unit, 0.0)
                weight = float(t.square().sum())
                off += float((g - scale * t).square().sum()) / weight
                size += float(g.square().sum()) / weight
            found[name] = (off / size) ** 0.5  # the largest gradient is about 1 in this unit, so `size` is not 0
        return found

    def distance(self, m: Measurement, target: str, *, climbs: bool = False) -> float:
        """The relative distance on one case, at the scale of its shape; 1 where its gradient is zero or not finite.

        Args:
            m: the gradient on the case.
            target: the target to compare with.
            climbs: compare with the target's gradient with the sign reversed.
        """
        if not self.is_finite or _vanishes(m, ROUNDING):
            return 1.0
        unit, sign = unit_of(m.gradient.mean), -1.0 if climbs else 1.0
        g, scale = m.gradient.mean / unit, max(sign * self.scales[target][m.case.shape] / unit, 0.0)
        off = float((g - sign * scale * m.case.targets[target]).norm() / g.norm())
        return off if off < 1 else 1.0

    @cached_property
    def worst(self) -> dict[str, float]:
        """The largest distance of any case to each target."""
        return {name: max(self.distance(m, name) for m in self.measured) for name in self.targets}

    def matches(self, m: Measurement, target: str, *, climbs: bool = False) -> bool:
        """Whether the gradient on one case is that of a target, at the scale of its shape."""
        return self.distance(m, target, climbs=climbs) <= MATCH

    def has_verdict(self, m: Measurement, verdict: Verdict) -> bool:
        """Whether the gradient on one case has this verdict, at the scale of its shape."""
        if verdict == "nothing":
            return _vanishes(m, MATCH)
        climbed = TARGETS[verdict].climbed
        return verdict != "unknown" and self.matches(m, climbed or verdict, climbs=climbed is not None)

    @cached_property
    def cosine(self) -> dict[str, float]:
        """Mean cosine with each target; 0 for a gradient that is nothing or not finite."""
        if self.is_nothing or not self.is_finite:
            return dict.fromkeys(self.targets, 0.0)
        return {name: sum(_cosine(m, name) for m in self.measured) / len(self.measured) for name in self.targets}

    @cached_property
    def nearest(self) -> str:
        """The target with the least bias, or, if the loss climbs, the one it climbs most directly; simplest first."""
        if self.match is not None:
            return self.match.target
        off = {name: self.bias[name] - abs(self.cosine[name]) for name in self.targets}
        return next(name for name in self.targets if off[name] <= min(off.values()) + MATCH)

    @cached_property
    def match(self) -> Match | None:
        """The first target that is matched on every case; one that is descended comes before one that is climbed."""
        if self.is_nothing:
            return None
        for climbs in (False, True):
            for name in self.targets:
                if all(self.matches(m, name, climbs=climbs) for m in self.measured):
                    return Match(name, climbs)
        return None

    @cached_property
    def match_at_own_scales(self) -> Match | None:
        """As `match`, with a scale of its own for every case.

        A loss that divides by a statistic of the batch, such as the standard deviation of all advantages, changes the
        length of the gradient and not its direction.
        """
        if self.is_nothing or not self.is_finite or not self._is_divided_by_a_spread:
            return None
        for climbs in (False, True):
            for name in self.targets:
                if all(_off_direction(m, name, climbs=climbs) <= MATCH for m in self.measured):
                    return Match(name, climbs)
        return None

    @cached_property
    def _is_divided_by_a_spread(self) -> bool:
        """Whether single rows have gradients of about the same size near ref and far from it.

        A loss whose strength grows with the KL may have the direction of a target too, but not its meaning.
        """
        sizes: dict[Shape, list[float]] = defaultdict(list)
        for m in self.fitted:
            if not m.case.wider:
                sizes[m.case.shape].append(m.gradient.typical)
        return all(max(some) <= ALIKE * min(some) for some in sizes.values())

    @cached_property
    def verdict(self) -> Verdict:
        """The target that is matched on every case, `nothing`, or `unknown`."""
        if self.is_nothing:
            return "nothing"
        if self.match is None:
            return "unknown"
        return signed(cast(TargetName, self.match.target), climbs=self.match.climbs)

    @cached_property
    def decomposition(self) -> Decomposition | None:
        """The nearest sum of two targets, for a gradient that is no single target; None for one that is.

        Few cases have so few parameters that two targets span all gradients, so this is meant for many cases.
        """
        if self.is_nothing or not self.is_finite or self.match is not None:
            return None
        pair = decompose(self.measured, self.fitted, self.targets)
        if pair is not None and pair.remainder <= MATCH:
            return pair
        drifting = with_drift(self.measured, self.fitted, self.targets)
        return drifting if drifting is not None and drifting.remainder <= MATCH else pair


def _vanishes(m: Measurement, share: float) -> bool:
    unit = unit_of(m.gradient.mean)
    return float((m.gradient.mean / unit).norm()) * unit <= share * m.gradient.typical


def _off_direction(m: Measurement, target: str, *, climbs: bool) -> float:
    """The relative distance to a multiple of a target with the right sign, at the best scale for this case alone."""
    g, t = m.gradient.mean, m.case.targets[target]
    if _vanishes(m, ROUNDING):
        return 1.0
    g = g / unit_of(g)
    along = float(g @ t / t.square().sum()) * (-1.0 if climbs else 1.0)
    return float((g - (-along if climbs else along) * t).norm() / g.norm()) if along > 0 else 1.0


def _cosine(m: Measurement, target: str) -> float:
    g, t = m.gradient.mean, m.case.targets[target]
    g = g / unit_of(g)
    return float(g @ t / (g.norm() * t.norm())) if bool(g.any()) else 0.0
