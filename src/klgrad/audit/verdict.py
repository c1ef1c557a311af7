"""Find the target whose gradient is a multiple of a given gradient."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

from ..targets import TARGETS, TO_REFERENCE, TargetName, Verdict, signed
from .decomposition import Decomposition, decompose, with_drift
from .gradient import unit_of
from .measurement import Measurement, Shape
from .problems import Case

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
