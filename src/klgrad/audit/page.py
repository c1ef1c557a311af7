"""Results as one HTML page: an index, and a card with the report and the figures of each loss."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from ..core.divergences import Divergence, optimum
from . import policy_sentences as policies
from .advice import is_usual, rows
from .parts import Anatomy
from .policy import PolicyResult
from .probes import GRID, Curve
from .procedure import AuditResult
from .sentences import between
from .terminal import CAPTION, KIND_TITLES, SHOWN, legend, shown_of

SEAMS = re.compile(r"(?<=[_=.:])(?=\w)")
"""Where a name of a setting or a function may break over lines."""


@cache
def environment() -> Environment:
    """The templates, loaded once."""
    loader = PackageLoader("klgrad.audit")
    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    loaded = Environment(loader=loader, keep_trailing_newline=True, **options)
    breakable = lambda text: Markup("<wbr>").join(SEAMS.split(text))
    loaded.filters.update(breakable=breakable, number=lambda x: f"{x:.3g}".replace("-", "−"))
    loaded.globals.update(style=loader.get_source(loaded, "page.css")[0], WIDTH=WIDTH, HEIGHT=HEIGHT, BOX=BOX, zip=zip)
    loaded.globals.update(BETA=BETA)
    return loaded


# Figures: curves in a frame, as `templates/plot.svg` draws them, in pixels.

WIDTH, HEIGHT = 400.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 38.0, 8.0, 8.0, 40.0
BOX = (LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
"""The frame: its corner, width and height."""

Points = list[tuple[float, float]]
"""The points of a curve from left to right."""


@dataclass(frozen=True)
class Frame:
    """Two axes.

    Attributes:
        x_ticks, y_ticks: the grid lines.
        x_range, y_range: from edge to edge.
        title: of the horizontal axis.
        stretch_x, stretch_y: functions of the axes; asinh on both keeps y = x straight and shows 1 beside 30.
    """

    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    title: str
    stretch_x: Callable[[float], float] = float
    stretch_y: Callable[[float], float] = float

    def x(self, value: float) -> float:
        """Pixels from the left."""
        low, high = map(self.stretch_x, self.x_range)
        return round(LEFT + (self.stretch_x(value) - low) / (high - low) * BOX[2], 1)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        low, high = map(self.stretch_y, self.y_range)
        return round(TOP + (high - self.stretch_y(value)) / (high - low) * BOX[3], 1)

    def path(self, curve: Points) -> str:
        """Strokes through the points, broken where one is not finite."""
        texts, pen = [], "M"
        for x, y in curve:
            is_finite = math.isfinite(y)
            texts += [f"{pen}{self.x(x)} {self.y(y)}"] if is_finite else []
            pen = "L" if is_finite else "M"
        return "".join(texts)


TICKS = (-30.0, -10.0, -3.0, -1.0, 0.0, 1.0, 3.0, 10.0)
COEFFICIENT = Frame(TICKS, TICKS, (-30, 12), (-40, 20), "log π/ref of the token", math.asinh, math.asinh)
GENERATOR = Frame((0, 1, 2, 3, 4), (-1, 0, 1, 2, 3), (0, 4), (-1, 3), "u = π/ref of the token")
REACH = 2.5
"""The largest |log r| of the figure of a policy loss."""

RATIO_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10)
WEIGHT = Frame(RATIO_TICKS, (0, 1, 2, 3), (math.exp(-REACH), math.exp(REACH)), (-0.2, 3.2), "r = π/μ", math.log)


class Plot(NamedTuple):
    """One figure.

    Attributes:
        heading: what is drawn.
        frame: its axes.
        curves: the name, the CSS class and the points of each.
        dead: the stretches of the horizontal axis without a gradient.
        label: the same in words.
    """

    heading: str
    frame: Frame
    curves: Sequence[tuple[str, str, Points]]
    dead: Sequence[tuple[float, float]] = ()
    label: str = ""


def slope_of(curve: Curve) -> Callable[[Tensor], Tensor]:
    """A coefficient by log π/ref, per unit of its scale; between the points that were read if it has no name."""
    at, values = curve.points
    scale = curve.scale if 0 < curve.scale < math.inf else 1.0

    def between(x: Tensor) -> Tensor:
        right = torch.searchsorted(at, x.contiguous()).clamp(1, len(at) - 1)
        share = ((x - at[right - 1]) / (at[right] - at[right - 1])).clamp(0, 1)
        return values[right - 1].lerp(values[right], share) / scale

    return (lambda x: curve(x) / scale) if curve.shares else between


def coefficient_of(a: Anatomy) -> Points:
    """The coefficient by log π/ref, of sampled tokens or of entries of the vocabulary, per unit of the scale."""
    curve, at = a.curve, GRID
    if curve.shares:  # drawn at both sides of each edge, so that a clamp is the step that it is
        edges = [edge + side for edge in (curve.low, curve.high) if edge is not None for side in (-1e-9, 1e-9)]
        at = torch.cat([GRID, torch.tensor(edges, dtype=torch.float64)]).sort().values
    return [] if curve.is_zero else _points(at, slope_of(curve)(at))


def generator_of(slope: Callable[[Tensor], Tensor]) -> Points:
    """The generator f(u) by u = π/ref: the integral of the coefficient at log u from u = 1."""
    log_u = torch.linspace(-4.6, 1.4, 601, dtype=torch.float64)
    middle = (log_u[1:] + log_u[:-1]) / 2  # a slope may jump at 0
    f = torch.cat([torch.zeros(1), (slope(middle) * log_u.exp().diff()).cumsum(0)])
    return _points(log_u.exp()[::5], (f - f[460])[::5])


def _points(x: Tensor, y: Tensor) -> Points:
    return list(zip(x.tolist(), y.tolist(), strict=True))


REF, REWARD, BETA = (0.4, 0.3, 0.15, 0.1, 0.05), (0.0, 0.25, 0.5, 0.75, 1.0), 0.3
"""The example whose optimum is shown: five outcomes of one token, the likeliest with the least reward."""


def optimum_of(slope: Callable[[Tensor], Tensor]) -> list[float]:
    """The probabilities of the example's outcomes at the optimum of E[r] - β D_f."""
    ref, reward = torch.tensor(REF, dtype=torch.float64), torch.tensor(REWARD, dtype=torch.float64)
    return optimum(Divergence("", slope, slope, ""), ref.log(), reward, BETA).exp().tolist()


def why_no_optimum(a: Anatomy) -> str:
    """Why a loss has no optimum by its f alone; empty if it has one."""
    reasons = {
        "the parts are not proved": not a.proved_fresh,
        "the pull is divided by a spread": a.baseline.spread != "none",
        "a token is not compared with itself in ref": a.anchor != "ref" or a.late != 0,
        "rewards are those of the policy at temperature 1": a.temperature != 1,
        "f is not convex": not a.curve.convex,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def plots_of(r: AuditResult) -> list[Plot]:
    """The coefficient of a loss with its dead zones, and its f(u), beside those of the reverse KL."""
    points = coefficient_of(r.anatomy)
    if not points:
        return []
    low, high = COEFFICIENT.x_range
    dead = [zone for zone in ((low, r.dead_below or low), (r.dead_above or high, high)) if zone[0] < zone[1]]
    is_dead = r.dead_below is not None or r.dead_above is not None
    label = f"a gradient only where {between(r.dead_below, r.dead_above, 'log π/ref')}" if is_dead else ""
    beside = lambda usual, own: [("the reverse KL", "sound", usual), ("this loss", "line", own)]
    f = beside(generator_of(lambda x: x), generator_of(slope_of(r.anatomy.curve)))
    return [
        Plot(TITLES[0], COEFFICIENT, beside(_points(GRID, GRID), points), dead, label),
        Plot(TITLES[1], GENERATOR, f),
    ]


TITLES = ("Coefficient of a token, divided by the scale", "f(u), whose slope that is")
"""The headings of the figures of a KL loss."""


def plot_of_policy(r: PolicyResult) -> Plot | None:
    """The weight of a score against the ratio, where the advantage is positive and negative."""
    if r.policy.parts.ratio == "other" or not r.policy.scale:
        return None
    log_ratios, (up, down) = r.policy.curve(401, REACH)
    at = log_ratios.exp()
    curves = [("A > 0", "line", _points(at, up)), ("A < 0", "line negative", _points(at, down))]
    return Plot("Weight of a token's score", WEIGHT, curves)


COMPARED = 6
"""At most as many losses are drawn in one figure."""


def comparison_of(results: Sequence[AuditResult]) -> list[Plot]:
    """The coefficients of two to six losses in one figure, and their f(u) in another."""
    drawn = [r for r in results if not r.anatomy.curve.is_zero]
    if not 2 <= len(drawn) <= len(results) <= COMPARED:
        return []
    named = lambda points_of: [(r.name, f"line line-{i}", points_of(r.anatomy)) for i, r in enumerate(drawn, 1)]
    f_of = lambda a: generator_of(slope_of(a.curve))
    return [Plot(TITLES[0], COEFFICIENT, named(coefficient_of)), Plot(TITLES[1], GENERATOR, named(f_of))]


# The cards and the whole page.

STATUS = {"yes": "yes", "in part": "part", "no": "no", "not known": "unknown"}
"""By the answer to whether it is the usual KL, the mark and the colour of a loss: names in the templates."""


class Card(NamedTuple):
    """One loss on the page, and its row in the index.

    Attributes:
        status: its mark and colour.
        group: the heading of its row.
        tag: a word beside its name.
        cells: of its row, the name first.
        about: lines about it.
        rows: its report.
        plots: its figures.
        bars: where the policy ends in the example: a reward, and its probability in ref, with the reverse KL and here.
        no_bars: why there are none.
        legend: what the symbols mean.
    """

    status: str
    group: str
    tag: str
    cells: tuple[str, ...]
    about: list[str]
    rows: list[tuple[str, str]]
    plots: list[Plot]
    bars: list[tuple[float, ...]]
    no_bars: str
    legend: str


def card_of(r: AuditResult, summary: str = "", tag: str = "") -> Card:
    """The card of a KL loss."""
    group, plots = r.framework or KIND_TITLES[r.kind], plots_of(r)
    why = why_no_optimum(r.anatomy) if plots else ""
    known = [REWARD, REF, optimum_of(lambda x: x), optimum_of(slope_of(r.anatomy.curve))] if plots and not why else []
    bars = list(zip(*known, strict=True))
    return Card(STATUS[is_usual(r)], group, tag, shown_of(r), [summary], rows(r), plots, bars, why, legend(r))


def card_of_policy(r: PolicyResult) -> Card:
    """The card of a whole policy loss."""
    plot = plot_of_policy(r)
    return Card(
        "yes" if r.policy.proved else "unknown",
        "Policy losses",
        "",
        policies.cells_of(r),
        policies.about(r),
        policies.report(r),
        [plot] if plot else [],
        [],
        "",
        "",
    )


def to_html(
    results: Sequence[AuditResult],
    *,
    summaries: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    not_audited: Mapping[str, str] | None = None,
) -> str:
    """Render one page; the same results give the same page.

    Args:
        results: of the audit.
        summaries: one line about each loss, if there are any.
        tags: words to show beside some losses, by name of the loss: `default`, for example.
        not_audited: losses that could not be audited, and why.

    Returns:
        The page, which needs no network, no scripts and no fonts.
    """
    about = summaries or [""] * len(results)
    cards = [card_of(r, line, (tags or {}).get(r.name, "")) for r, line in zip(results, about, strict=True)]
    return _rendered(cards, SHOWN, "KL losses", CAPTION, not_audited, comparison_of(results))


def policies_to_html(results: Sequence[PolicyResult], not_audited: Mapping[str, str] | None = None) -> str:
    """Render one page of whole policy losses; see `to_html`."""
    cards = [card_of_policy(r) for r in results]
    return _rendered(cards, policies.COLUMNS, "policy losses", policies.CAPTION, not_audited, [])


def _rendered(
    cards: list[Card],
    columns: Sequence[str],
    kind: str,
    caption: str,
    not_audited: Mapping[str, str] | None,
    comparison: list[Plot],
) -> str:
    slug = lambda name: re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    anchored = [(f"loss-{i}-{slug(card.cells[0])}", card) for i, card in enumerate(cards, 1)]
    groups = {
        group: [pair for pair in anchored if pair[1].group == group] for group in dict.fromkeys(c.group for c in cards)
    }
    return (
        environment()
        .get_template("page.html")
        .render(
            title=cards[0].cells[0] if len(cards) == 1 else f"{len(cards)} {kind}",
            caption=caption,
            columns=columns,
            groups=groups if len(cards) > 1 else {},
            tally=Counter(card.status for card in cards) if len(cards) > 1 and kind == "KL losses" else {},
            comparison=comparison,
            cards=list(chain.from_iterable(groups.values())),
            not_audited=not_audited or {},
        )
    )
