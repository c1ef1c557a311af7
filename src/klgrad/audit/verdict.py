"""Which target is this gradient a multiple of?"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..exact import TARGETS
from ..meaning import Verdict
from .gradient import Gradient
from .problems import Case

MATCH = 1e-5
"""Largest relative bias that counts as none. In float64 a match is good to 1e-12; a loss that casts to
float32 inside keeps about 1e-6; distinct targets are more than 1e-2 apart on the problems (tested)."""

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
        """The same over some of the cases."""
        return Comparison([m for m in self.measured if keep(m.case)])

    @cached_property
    def is_finite(self) -> bool:
        """Whether there is a gradient to compare: a 0/0 on one group makes the whole expectation NaN."""
        return all(bool(m.gradient.mean.isfinite().all()) for m in self.measured)

    @cached_property
    def is_nothing(self) -> bool:
        """Whether the expected gradient is zero on every case, against the size of one sample's."""
        return all(m.gradient.mean.norm() <= MATCH * m.gradient.typical for m in self.measured)

    def scales(self, target: str) -> dict[Shape, float]:
        """Least-squares scale per batch shape, every case weighing the same; negative if it climbs."""
        fits: dict[Shape, list[float]] = defaultdict(list)
        for m in self.measured:
            t = m.case.targets[target]
            fits[m.case.shape].append(float(m.gradient.mean @ t / t.square().sum()))
        return {shape: sum(fit) / len(fit) for shape, fit in fits.items()}

    @cached_property
    def bias(self) -> dict[str, float]:
        """Relative distance to each target at the best positive scale: 0 is a match, 1 is no likeness."""
        if self.is_nothing or not self.is_finite:
            return dict.fromkeys(TARGETS, 1.0)
        found = {}
        for name in TARGETS:
            scales = self.scales(name)
            off = size = 0.0
            for m in self.measured:
                t, g = m.case.targets[name], m.gradient.mean
                unit = float(t.square().sum())
                off += float((g - max(scales[m.case.shape], 0.0) * t).square().sum()) / unit
                size += float(g.square().sum()) / unit
            found[name] = (off / size) ** 0.5
        return found

    @cached_property
    def cosine(self) -> dict[str, float]:
        """Mean cosine with each target; 0 for a gradient that is nothing or not finite."""
        if self.is_nothing or not self.is_finite:
            return dict.fromkeys(TARGETS, 0.0)
        found = {}
        for name in TARGETS:
            pairs = [(m.gradient.mean, m.case.targets[name]) for m in self.measured]
            found[name] = sum(float(g @ t / (g.norm() * t.norm()).clamp(min=1e-300)) for g, t in pairs) / len(pairs)
        return found

    @cached_property
    def nearest(self) -> str:
        """The target with the least bias, or, of those that are climbed, the most climbed; plainest first."""
        off = {name: self.bias[name] - abs(self.cosine[name]) for name in TARGETS}
        return next(name for name in TARGETS if off[name] <= min(off.values()) + MATCH)

    @cached_property
    def verdict(self) -> Verdict:
        """The target that is matched, `nothing`, or `unknown`."""
        if self.is_nothing:
            return "nothing"
        matched = self.bias[self.nearest] <= MATCH
        return self.nearest.replace("_", "-") if matched else "unknown"  # type: ignore[return-value]
