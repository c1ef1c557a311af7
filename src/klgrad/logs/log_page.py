"""The report on a log as one HTML page with figures; it needs no network, no scripts and no fonts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from .examination import LENGTH, QUANTITIES, LogPart, LogReport, Quantity, estimate_rows, part_heads, part_rows


def to_html(report: LogReport) -> str:
    """Render one page; the same report gives the same page. All values are escaped: they come from the file."""
    environment = Environment(
        loader=PackageLoader("klgrad.logs"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("logs.html").render(
        report=report,
        estimates=[*estimate_rows(report.kl), *([] if report.mismatch is None else estimate_rows(report.mismatch))],
        by=report.columns.get("by"),
        figures=figures_of(report.parts),
        heads=part_heads(report),
        parts=part_rows(report),
    )


# The geometry of the figures of a log's page: quantities by the values of a column, in pixels.

WIDTH, HEIGHT = 640.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 10.0, 30.0


class Point(NamedTuple):
    """A value at x, with the ends of its 95% interval; equal to the value where there is none."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class AxisLabel:
    at: str
    text: str


@dataclass(frozen=True)
class Figure:
    """One quantity by the values of a column: SVG paths of the values and of their intervals, and ticks of the axes."""

    title: str
    line: str
    bars: str
    dots: list[tuple[str, str]]
    across: list[AxisLabel]
    up: list[AxisLabel]
    width: str = f"{WIDTH:g}"
    height: str = f"{HEIGHT:g}"
    left: str = f"{LEFT:g}"
    right: str = f"{WIDTH - RIGHT:g}"
    base: str = f"{HEIGHT - BOTTOM:g}"
    bottom: str = f"{HEIGHT - 8:g}"


def figures_of(parts: list[LogPart]) -> list[Figure]:
    """The figures of all quantities that the parts have; none if there are fewer than two parts, or no numbers."""
    if len(parts) < 2 or not all(isinstance(part.label, int | float) for part in parts):
        return []
    curves = [(quantity.title, _points(parts, quantity)) for quantity in (*QUANTITIES, LENGTH)]
    return [_figure(title, points) for title, points in curves if points]


def _points(parts: list[LogPart], quantity: Quantity) -> list[Point]:
    points, name = [], quantity.name
    for part in parts:
        report = part.kl if quantity.report == "kl" else part.mismatch
        if report is None:
            continue
        x = float(part.label)  # pyright: ignore[reportArgumentType]  # `figures_of` has looked
        if name in report.estimates:
            estimate = report.estimates[name]
            y, (low, high) = float(estimate.mean), estimate.interval()
            points.append(Point(x, y, *((low, high) if math.isfinite(low) else (y, y))))
        elif name in report.scalars:
            y = float(report.scalars[name])
            points.append(Point(x, y, y, y))
    return [point for point in points if math.isfinite(point.y)]


def _figure(title: str, points: list[Point]) -> Figure:
    xs = [point.x for point in points]
    # The mean and 0 are always in the frame; an interval much wider than all means is cut at the frame.
    top = max(0.0, *(point.y for point in points))
    bottom = min(0.0, *(point.y for point in points))
    reach = (top - bottom) or 1.0
    top = min(max(top, *(point.high for point in points)), top + reach)
    bottom = max(min(bottom, *(point.low for point in points)), bottom - reach)
    across, up = _scale(min(xs), max(xs), LEFT + 8, WIDTH - RIGHT - 8), _scale(bottom, top, HEIGHT - BOTTOM, TOP)
    cut = lambda y: up(min(max(y, bottom), top))
    pixels = [(f"{across(p.x):.1f}", f"{up(p.y):.1f}") for p in points]
    return Figure(
        title,
        line="M" + "L".join(f"{x} {y}" for x, y in pixels),
        bars="".join(f"M{across(p.x):.1f} {cut(p.low):.1f}V{cut(p.high):.1f}" for p in points if p.high > p.low),
        dots=pixels,
        across=[AxisLabel(f"{across(x):.1f}", f"{x:g}") for x in sorted({min(xs), xs[len(xs) // 2], max(xs)})],
        up=[AxisLabel(f"{up(y):.1f}", f"{y:.3g}".replace("-", "−")) for y in _round_values(bottom, top)],
    )


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _round_values(low: float, high: float) -> list[float]:
    """Three to six multiples of 1, 2 or 5 times a power of ten."""
    rough = ((high - low) or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
