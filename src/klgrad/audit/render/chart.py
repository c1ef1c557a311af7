"""The geometry of the coefficient curve: what `templates/curve.svg` draws, in pixels."""

import math
from dataclasses import dataclass

from ..curve import Curve

WIDTH, HEIGHT = 400.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 38.0, 8.0, 8.0, 40.0
X_RANGE, Y_RANGE = (-30.0, 12.0), (-40.0, 20.0)
TICKS = (-30, -10, -3, -1, 0, 1, 3, 10)

STRAIGHT = 0.15
"""A point is left out where it is less than this many pixels off the line through its neighbours."""


@dataclass(frozen=True)
class Zone:
    """A shaded dead zone."""

    x: str
    y: str
    width: str
    height: str
    hatch: str


@dataclass(frozen=True)
class Tick:
    """A grid line on each axis, with its label."""

    css: str
    grid: str
    x: str
    y: str
    anchor: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Coefficient against log π/ref. Both axes are asinh, which keeps y = x straight and shows 1 beside 30."""

    zones: list[Zone]
    line: str
    sound: str
    arrows: list[str]
    ticks: list[Tick]
    width: str = f"{WIDTH:g}"
    height: str = f"{HEIGHT:g}"
    left: str = f"{LEFT - 6:g}"
    below: str = f"{HEIGHT - BOTTOM + 15:g}"
    bottom: str = f"{HEIGHT - 6:g}"
    middle: str = f"{(LEFT + WIDTH - RIGHT) / 2:g}"


def chart_of(curve: Curve, dead_below: float | None, dead_above: float | None) -> Chart:
    """Everything that is drawn of one curve, with its dead zones shaded as far as they are in the frame."""
    low, high = X_RANGE
    zones = [(low, low if dead_below is None else dead_below), (high if dead_above is None else dead_above, high)]
    return Chart(
        zones=[_zone(*zone) for zone in zones if zone[0] < zone[1]],
        line=_path(curve),
        sound=_path([(x, x) for x, _ in curve]),
        arrows=_arrows(curve),
        ticks=[_tick(value) for value in TICKS],
    )


def _x(value: float) -> float:
    low, high = map(math.asinh, X_RANGE)
    return LEFT + (math.asinh(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(value: float) -> float:
    low, high = map(math.asinh, Y_RANGE)
    return HEIGHT - BOTTOM - (math.asinh(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _zone(low: float, high: float) -> Zone:
    x, end = _x(low), _x(high)
    # Strokes, not a pattern fill: a hatch shows in grey print and without colour vision.
    base, rise = HEIGHT - BOTTOM, HEIGHT - TOP - BOTTOM
    hatch = "".join(_stroke(start, x, end, base, rise) for start in range(int(x - rise), int(end), 9))
    return Zone(f"{x:.1f}", f"{TOP:g}", f"{end - x:.1f}", f"{rise:g}", hatch)


def _stroke(start: float, low: float, high: float, base: float, rise: float) -> str:
    """One line of the hatch, rising at 45 degrees from (start, base), cut to the zone."""
    left, right = max(start, low), min(start + rise, high)
    return f"M{left:.1f} {base - (left - start):.1f}L{right:.1f} {base - (right - start):.1f}" if right > left else ""


def _tick(value: int) -> Tick:
    x, y = _x(value), _y(value)
    return Tick(
        css="zero" if value == 0 else "grid",
        grid=f"M{x:.1f} {TOP:g}V{HEIGHT - BOTTOM:g}M{LEFT:g} {y:.1f}H{WIDTH - RIGHT:g}",
        x=f"{x:.1f}",
        y=f"{y + 3.5:.1f}",
        anchor="start" if value == TICKS[0] else "middle",  # the first label must not cover those of the other axis
        text=f"−{-value}" if value < 0 else f"{value}",
    )


def _path(curve: Curve) -> str:
    """Strokes through the points within the frame; a curve that leaves it ends at the edge."""
    return "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in _simplified(run)) for run in _runs(curve))


def _runs(curve: Curve) -> list[list[tuple[float, float]]]:
    """Pixels of each unbroken stretch within the frame."""
    top, bottom = _y(Y_RANGE[1]), _y(Y_RANGE[0])
    runs: list[list[tuple[float, float]]] = [[]]
    before = None
    for x, value in curve:
        here = None if value is None else (_x(x), _y(value))
        if here and before and _inside(here) != _inside(before):
            edge = top if min(here[1], before[1]) < top else bottom
            share = (edge - before[1]) / (here[1] - before[1])
            runs[-1].append((before[0] + share * (here[0] - before[0]), edge))
            if not _inside(here):
                runs.append([])
        if here is None:
            runs.append([])
        elif _inside(here):
            runs[-1].append(here)
        before = here
    return [run for run in runs if len(run) > 1]


def _inside(point: tuple[float, float]) -> bool:
    return _y(Y_RANGE[1]) <= point[1] <= _y(Y_RANGE[0])


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


def _arrows(curve: Curve) -> list[str]:
    """A head where the curve leaves the frame, so that the end does not read as an end."""
    top, bottom = _y(Y_RANGE[1]), _y(Y_RANGE[0])
    found = []
    for run in _runs(curve):
        for x, y in (run[0], run[-1]):
            if y == top:
                found.append(f"M{x:.1f} {y - 1:.1f}l-4.5 9h9z")
            elif y == bottom:
                found.append(f"M{x:.1f} {y + 1:.1f}l-4.5 -9h9z")
    return found
