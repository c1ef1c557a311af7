"""Match the measured gradients of a whole policy loss with the targets."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

from ..targets import TO_REFERENCE, TargetName, Verdict, signed
from .gradients import Measurement, Shape, unit_of

# Find the target whose gradient is a multiple of a given gradient.

MATCH = 1e-5
"""Largest relative bias of a match. In float64 a match has about 1e-12, and in a loss that casts to float32 about 1e-6;
distinct targets differ by more than 1e-2 on the problems (tested)."""

ROUNDING = 1e-12
"""A mean below this share of the gradient of one sample is zero up to rounding."""

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

    def matches(self, m: Measurement, target: str, *, climbs: bool = False) -> bool:
        """Whether the gradient on one case is that of a target, at the scale of its shape."""
        return self.distance(m, target, climbs=climbs) <= MATCH

    @cached_property
    def cosine(self) -> dict[str, float]:
        """Mean cosine with each target; 0 for a gradient that is nothing or not finite."""
        if self.is_nothing or not self.is_finite:
            return dict.fromkeys(self.targets, 0.0)
        return {name: sum(_cosine(m, name) for m in self.measured) / len(self.measured) for name in self.targets}

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
    def verdict(self) -> Verdict:
        """The target that is matched on every case, `nothing`, or `unknown`."""
        if self.is_nothing:
            return "nothing"
        if self.match is None:
            return "unknown"
        return signed(cast(TargetName, self.match.target), climbs=self.match.climbs)


def _vanishes(m: Measurement, share: float) -> bool:
    unit = unit_of(m.gradient.mean)
    return float((m.gradient.mean / unit).norm()) * unit <= share * m.gradient.typical


def _cosine(m: Measurement, target: str) -> float:
    g, t = m.gradient.mean, m.case.targets[target]
    g = g / unit_of(g)
    return float(g @ t / (g.norm() * t.norm())) if bool(g.any()) else 0.0
