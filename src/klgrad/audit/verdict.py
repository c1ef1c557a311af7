"""Find the target whose gradient is a multiple of a given gradient."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..targets import WITH_GRADIENT, Verdict
from .gradient import Gradient, unit_of
from .problems import Case

MATCH = 1e-5
"""Largest relative bias of a match. In float64 a match has about 1e-12, and in a loss that casts to float32 about 1e-6;
distinct targets differ by more than 1e-2 on the problems (tested)."""

ROUNDING = 1e-12
"""A mean below this share of the gradient of one sample is zero up to rounding."""

LARGEST = 1e290
"""A larger gradient counts as not finite, since dividing it by a small number would overflow."""

Shape = tuple[int, int, bool]


class Measurement(NamedTuple):
    """The exact gradient of a loss on one case."""

    case: Case
    gradient: Gradient


@dataclass(frozen=True, eq=False)
class Comparison:
    """Gradients on several cases, compared with every target up to one positive scale per batch shape."""

    measured: list[Measurement]

    def only(self, keep: Callable[[Case], bool]) -> "Comparison":
        """The comparison over some of the cases."""
        return Comparison([m for m in self.measured if keep(m.case)])

    @cached_property
    def is_finite(self) -> bool:
        """Whether the gradient is finite on all cases; 0/0 on one group makes an expectation NaN."""
        return all(m.gradient.typical < LARGEST for m in self.measured)

    @cached_property
    def is_nothing(self) -> bool:
        """Whether the expected gradient is zero on every case, relative to the size of that of one sample."""
        return self.is_finite and all(_vanishes(m, MATCH) for m in self.measured)

    @cached_property
    def scales(self) -> dict[Verdict, dict[Shape, float]]:
        """By target, the least-squares scale per batch shape, with equal weight for every case; negative if it climbs.

        It is fitted over the standard cases of a shape, if there are any; wider cases must then have the same scale.
        """
        return {name: self._scales(name) for name in WITH_GRADIENT}

    def _scales(self, target: Verdict) -> dict[Shape, float]:
        standard = {m.case.shape for m in self.measured if not m.case.wider}
        fits: dict[Shape, list[float]] = defaultdict(list)
        for m in self.measured:
            if not m.case.wider or m.case.shape not in standard:
                t, unit = m.case.targets[target], unit_of(m.gradient.mean)
                fits[m.case.shape].append(float(m.gradient.mean / unit @ t / t.square().sum()) * unit)
        return {shape: sum(x / len(fit) for x in fit) for shape, fit in fits.items()}

    @cached_property
    def bias(self) -> dict[Verdict, float]:
        """Relative distance to each target at the best positive scale: 0 is a match, 1 is no likeness."""
        if self.is_nothing or not self.is_finite:
            return dict.fromkeys(WITH_GRADIENT, 1.0)
        unit = max(unit_of(m.gradient.mean) for m in self.measured if m.gradient.mean.any())
        found: dict[Verdict, float] = {}
        for name in WITH_GRADIENT:
            off = size = 0.0
            for m in self.measured:
                t, g = m.case.targets[name], m.gradient.mean / unit
                scale = max(self.scales[name][m.case.shape] / unit, 0.0)
                weight = float(t.square().sum())
                off += float((g - scale * t).square().sum()) / weight
                size += float(g.square().sum()) / weight
            found[name] = (off / size) ** 0.5  # the largest gradient is about 1 in this unit, so `size` is not 0
        return found

    def distance(self, m: Measurement, target: Verdict) -> float:
        """The relative distance on one case, at the scale of its shape; 1 where its gradient is zero or not finite."""
        if not self.is_finite or _vanishes(m, ROUNDING):
            return 1.0
        unit = unit_of(m.gradient.mean)
        g, scale = m.gradient.mean / unit, max(self.scales[target][m.case.shape] / unit, 0.0)
        off = float((g - scale * m.case.targets[target]).norm() / g.norm())
        return off if off < 1 else 1.0

    @cached_property
    def worst(self) -> dict[Verdict, float]:
        """The largest distance of any case to each target."""
        return {name: max(self.distance(m, name) for m in self.measured) for name in WITH_GRADIENT}

    def matches(self, m: Measurement, verdict: Verdict) -> bool:
        """Whether one case has this verdict, at the scale of its shape."""
        if verdict == "nothing":
            return _vanishes(m, MATCH)
        return verdict != "unknown" and self.distance(m, verdict) <= MATCH

    @cached_property
    def cosine(self) -> dict[Verdict, float]:
        """Mean cosine with each target; 0 for a gradient that is nothing or not finite."""
        if self.is_nothing or not self.is_finite:
            return dict.fromkeys(WITH_GRADIENT, 0.0)
        return {name: sum(_cosine(m, name) for m in self.measured) / len(self.measured) for name in WITH_GRADIENT}

    @cached_property
    def nearest(self) -> Verdict:
        """The target with the least bias, or, if the loss climbs, the one it climbs most directly; simplest first."""
        off = {name: self.bias[name] - abs(self.cosine[name]) for name in WITH_GRADIENT}
        return next(name for name in WITH_GRADIENT if off[name] <= min(off.values()) + MATCH)

    @cached_property
    def verdict(self) -> Verdict:
        """The target that is matched on every case, `nothing`, or `unknown`."""
        if self.is_nothing:
            return "nothing"
        return self.nearest if all(self.matches(m, self.nearest) for m in self.measured) else "unknown"


def _vanishes(m: Measurement, share: float) -> bool:
    unit = unit_of(m.gradient.mean)
    return float((m.gradient.mean / unit).norm()) * unit <= share * m.gradient.typical


def _cosine(m: Measurement, target: Verdict) -> float:
    g, t = m.gradient.mean, m.case.targets[target]
    g = g / unit_of(g)
    return float(g @ t / (g.norm() * t.norm())) if bool(g.any()) else 0.0
