"""Figures of the HTML page of an audit: curves in a frame, and the shape of a loss, which they show."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...core.divergences import Divergence, optimum
from ..parts import Anatomy
from ..probes import GRID, function_of

# Plots: curves in a frame, as what `templates/plot.svg` draws, in pixels.

WIDTH, HEIGHT = 400.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 38.0, 8.0, 8.0, 40.0

Points = list[tuple[float, float | None]]
"""The points of a curve from left to right; None where it has no finite value."""

STRAIGHT = 0.15
"""A point is left out where it is less than this many pixels off the line through its neighbours."""


@dataclass(frozen=True)
class Frame:
    """Two axes.

    Attributes:
        x_ticks, y_ticks: the grid lines.
        x_range, y_range: from edge to edge.
        title: of the horizontal axis.
        stretch: a function of both axes; asinh keeps y = x straight and shows 1 beside 30.
    """

    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    title: str
    stretch: Callable[[float], float] = float

    def x(self, value: float) -> float:
        """Pixels from the left."""
        low, high = map(self.stretch, self.x_range)
        return LEFT + (self.stretch(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        low, high = map(self.stretch, self.y_range)
        return HEIGHT - BOTTOM - (self.stretch(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(self, curve: Points) -> str:
        """Strokes through the points; a curve that leaves the frame ends at its edge."""
        return "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in _simplified(run)) for run in self._runs(curve))

    def arrows(self, curve: Points) -> str:
        """A head where the curve leaves the frame, so that the end does not read as an end."""
        ends = [end for run in self._runs(curve) for end in (run[0], run[-1])]
        above = "".join(f"M{x:.1f} {y - 1:.1f}l-4.5 9h9z" for x, y in ends if y == TOP)
        return above + "".join(f"M{x:.1f} {y + 1:.1f}l-4.5 -9h9z" for x, y in ends if y == HEIGHT - BOTTOM)

    def _runs(self, curve: Points) -> list[list[tuple[float, float]]]:
        """Pixels of each unbroken stretch within the frame."""
        inside = lambda point: TOP <= point[1] <= HEIGHT - BOTTOM
        runs: list[list[tuple[float, float]]] = [[]]
        before = None
        for x, value in curve:
            here = None if value is None else (self.x(x), self.y(value))
            if here and before and inside(here) != inside(before):
                edge = TOP if min(here[1], before[1]) < TOP else HEIGHT - BOTTOM
                share = (edge - before[1]) / (here[1] - before[1])
                runs[-1].append((before[0] + share * (here[0] - before[0]), edge))
                if not inside(here):
                    runs.append([])
            if here is None:
                runs.append([])
            elif inside(here):
                runs[-1].append(here)
            before = here
        return [run for run in runs if len(run) > 1]


def _simplified(run: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out points on a straight line, so that a page of many curves stays small."""
    kept, last = [run[0]], 0
    for i in range(1, len(run) - 1):
        if _bends(run[last : i + 2]):
            kept.append(run[i])
            last = i
    return [*kept, run[-1]]


def _bends(points: list[tuple[float, float]]) -> bool:
    (x0, y0), (x1, y1) = points[0], points[-1]
    return any(abs(y - y0 - (y1 - y0) * (x - x0) / (x1 - x0)) > STRAIGHT for x, y in points[1:-1])


LOG_RATIOS = (-30.0, -10.0, -3.0, -1.0, 0.0, 1.0, 3.0, 10.0)
COEFFICIENT = Frame(LOG_RATIOS, LOG_RATIOS, (-30, 12), (-40, 20), "log π/ref of the token", math.asinh)
GENERATOR = Frame((0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 4), (0, 3), "u = π/ref of the token")


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        frame: its axes.
        curves: the classes of their lines, and their points.
        dead: the stretches of the horizontal axis that are shaded.
        label: the figure in words, for screen readers.
    """

    frame: Frame
    curves: list[tuple[str, Points]]
    label: str
    dead: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    @property
    def grid(self) -> list[tuple[str, str, dict[str, str]]]:
        """Path, label and attributes of the label of each grid line."""
        frame, across, down = self.frame, f"M{LEFT:g} ", f" {TOP:g}V{HEIGHT - BOTTOM:g}"
        foot = f"{HEIGHT - BOTTOM + 15:g}"
        columns = [
            (f"M{frame.x(x):.1f}{down}", signed(x), {"x": f"{frame.x(x):.1f}", "y": foot}) for x in frame.x_ticks
        ]
        for _, _, at in columns:  # the first label must not cover those of the other axis
            at["text-anchor"] = "start" if at is columns[0][2] else "middle"
        rows = [
            (
                f"{across}{frame.y(y):.1f}H{WIDTH - RIGHT:g}",
                signed(y),
                {"x": f"{LEFT - 6:g}", "y": f"{frame.y(y) + 3.5:.1f}", "text-anchor": "end"},
            )
            for y in frame.y_ticks
        ]
        return columns + rows

    @property
    def zones(self) -> list[tuple[str, str]]:
        """Outline and hatch of each dead zone. Strokes show in grey print and without colour vision."""
        base, rise = HEIGHT - BOTTOM, HEIGHT - TOP - BOTTOM
        found = []
        for low, high in self.dead:
            x, end = self.frame.x(low), self.frame.x(high)
            hatch = "".join(_stroke(start, x, end, base, rise) for start in range(int(x - rise), int(end), 9))
            found.append((f"M{x:.1f} {TOP:g}H{end:.1f}V{base:g}H{x:.1f}z", hatch))
        return found


def signed(value: float) -> str:
    """A number of an axis, with a proper minus."""
    return f"{value:g}".replace("-", "−")


def _stroke(start: float, low: float, high: float, base: float, rise: float) -> str:
    """One line of the hatch, rising at 45 degrees from (start, base), cut to the zone."""
    left, right = max(start, low), min(start + rise, high)
    return f"M{left:.1f} {base - (left - start):.1f}L{right:.1f} {base - (right - start):.1f}" if right > left else ""


# The shape of a loss: its coefficient, the f(u) whose slope that is, and the optimum that it has.

REF, REWARD, BETA = (0.4, 0.3, 0.15, 0.1, 0.05), (0.0, 0.25, 0.5, 0.75, 1.0), 0.3
"""The example whose optimum is shown: five outcomes, the likeliest with the least reward."""


@dataclass(frozen=True)
class Shape:
    """What one token's score is multiplied by.

    Attributes:
        points: the coefficient by log π/ref.
        slope: the same as a function; between the points if it is none of the known functions.
        scale: its derivative at 0, or 1 where that is no positive number.
        convex: whether it never falls.
    """

    points: Points
    slope: Callable[[Tensor], Tensor]
    scale: float = 1.0
    convex: bool = True

    @property
    def coefficient(self) -> Points:
        """The coefficient by log π/ref, divided by the scale."""
        return [(x, None if y is None else y / self.scale) for x, y in self.points]

    @property
    def generator(self) -> Points:
        """F(u) by u = π/ref, divided by the scale: the integral of the coefficient at log u from u = 1."""
        log_u = torch.linspace(math.log(0.01), math.log(4), 1001, dtype=torch.float64)
        log_u = torch.cat([log_u[log_u < 0], torch.zeros(1, dtype=torch.float64), log_u[log_u > 0]])
        integral = torch.cumulative_trapezoid(self.slope(log_u) / self.scale * log_u.exp(), log_u)
        f = torch.cat([torch.zeros(1, dtype=torch.float64), integral])
        return _points(log_u.exp(), f - f[log_u == 0])

    @property
    def optimum(self) -> list[float] | None:
        """The optimum of the example's E[r] - β D_f, D_f not divided by the scale; None if f is not convex."""
        if not self.convex:
            return None
        ref, reward = torch.tensor(REF, dtype=torch.float64), torch.tensor(REWARD, dtype=torch.float64)
        return optimum(Divergence("", self.slope, self.slope, ""), ref.log(), reward, BETA).exp().tolist()


def shape_of(a: Anatomy) -> Shape | None:
    """The shape of a loss, by its sampled tokens or the entries of the vocabulary; None without any."""
    curve = a.own if not a.own.is_zero else a.full
    if curve is None or curve.is_zero:
        weights = zip(a.exact, ("reverse-kl", "forward-kl"), strict=True)
        known = next(((w, function_of(name)) for w, name in weights if w), None)
        if known is None:
            return None
        weight, function = known
        return Shape(_points(GRID, weight * function(GRID)), lambda x: weight * function(x), abs(weight), weight > 0)
    at, values = curve.points

    def between(x: Tensor) -> Tensor:
        right = torch.searchsorted(at, x.contiguous()).clamp(1, len(at) - 1)
        share = ((x - at[right - 1]) / (at[right] - at[right - 1])).clamp(0, 1)
        return values[right - 1] + share * (values[right] - values[right - 1])

    scale = curve.scale if 0 < curve.scale < math.inf else 1.0
    if not curve.shares:
        return Shape(_points(at, values), between, scale, curve.convex)
    # A known function at both sides of each edge, so that a clamp is drawn as the step that it is.
    edges = [edge + side for edge in (curve.low, curve.high) if edge is not None for side in (-1e-9, 1e-9)]
    at = torch.cat([GRID, torch.tensor(edges, dtype=torch.float64)]).sort().values
    return Shape(_points(at, curve(at)), curve, scale, curve.convex)


def _points(x: Tensor, y: Tensor) -> Points:
    return [(a, b if math.isfinite(b) else None) for a, b in zip(x.tolist(), y.tolist(), strict=True)]


REVERSE = Shape(_points(GRID, GRID), lambda x: x)
"""The reverse KL, which every figure shows beside a loss."""


@dataclass(frozen=True)
class Bars:
    """The probabilities of the example's outcomes, as a reward orders them.

    Attributes:
        reward: of the outcome.
        shares: ref, the optimum with the reverse KL, and that with the loss.
    """

    reward: float
    shares: tuple[float, float, float]


def bars_of(a: Anatomy, shape: Shape | None) -> list[Bars]:
    """The optimum of a loss beside that of the reverse KL; empty where it has none by itself."""
    divided = a.baseline.spread != "none" or a.anchor != "ref" or not a.proved_fresh
    ends = None if shape is None or divided else shape.optimum
    right = REVERSE.optimum
    assert right is not None
    return [] if ends is None else [Bars(*x[:1], x[1:]) for x in zip(REWARD, REF, right, ends, strict=True)]
