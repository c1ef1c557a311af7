"""Results as one HTML page: figures, cards, an index and fixes."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from torch import Tensor

from ..core.divergences import Divergence, optimum
from ..core.term import as_code
from ..targets import TARGETS, Role, Verdict
from .advice import at_and_beyond, notes, rows, standing
from .batch import proof_cases
from .parts import Anatomy
from .probes import GRID, function_of
from .procedure import AuditResult
from .sentences import cells, outside
from .terminal import KIND_TITLES, PARTS

# Templates with autoescape, and filters for text that may break over lines.

ICONS: dict[Role, tuple[str, str]] = {
    "reverse": ("M8 .5a7.5 7.5 0 1 0 0 15a7.5 7.5 0 1 0 0-15z", "M4.4 8.3l2.5 2.5 4.7-5.4"),  # a tick in a circle
    "forward": ("M8 .3L15.7 8 8 15.7.3 8z", "M4.8 8h6M8.4 5.4L11 8l-2.6 2.6"),  # an arrow in a diamond
    "sampler": ("M8 .5a7.5 7.5 0 1 0 0 15a7.5 7.5 0 1 0 0-15z", "M8 4v4.4l3 1.8"),  # a clock: an older policy
    "climbs": ("M8 .6L15 6v9.4H1V6z", "M8 12.4V6M5.2 8.6L8 5.8l2.8 2.8"),  # an arrow up in a house
    "nothing": ("M3 1h10a2 2 0 0 1 2 2v10a2 2 0 0 1-2 2H3a2 2 0 0 1-2-2V3a2 2 0 0 1 2-2z", "M5 5l6 6M11 5l-6 6"),
    "sum": ("M4.2 1.2h7.6L15.6 8l-3.8 6.8H4.2L.4 8z", "M8 4.6v6.8M4.6 8h6.8"),  # a plus sign in a hexagon
    "unknown": ("M8 .8L15.8 15H.2z", "M8 5.6v4.6M8 12v1.2"),  # an exclamation mark in a triangle
}
"""How a target is drawn, by role: SVG paths in a box of 16 x 16, whose shapes differ, so that they can be read without
colour. The colour is the CSS variable of the same name in `page.css`."""

SEAMS = re.compile(r"(?<=[_=.:])(?=\w)")
"""Where a name of a setting or a function may break over lines."""

CODE_SEAMS = re.compile(r"(?<=[=.])(?=\w)")
"""Where a word of configuration may break."""

PHONE = 36
"""Characters of code that fit a phone; only longer words are broken."""


@cache
def environment() -> Environment:
    """The templates, loaded once."""
    loader = PackageLoader("klgrad.audit")
    loaded = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    loaded.filters.update(breakable=breakable, code_words=code_words, zip=zip)
    loaded.globals.update(ICONS=ICONS, TARGETS=TARGETS, style=loader.get_source(loaded, "page.css")[0])
    return loaded


def number(x: float | None) -> str:
    """A number for a reader; a dash for what is not a finite number."""
    return "–" if x is None or not math.isfinite(x) else f"{x:.3g}".replace("-", "−")


def breakable(text: str) -> Markup:
    """The escaped text, with optional line breaks inside long names."""
    return Markup("<wbr>").join(SEAMS.split(text))


def code_words(lines: str) -> Markup:
    """Escaped lines to copy; a narrow page breaks them between words, and long words at `=` and dots."""

    def unbroken(part: str) -> Markup:  # a browser would break `--flag` after its hyphens
        is_flag = "-" in part and len(part) <= PHONE
        return Markup('<span class="whole">{}</span>').format(part) if is_flag else escape(part)

    words = [CODE_SEAMS.split(word) if len(word) > PHONE else [word] for word in re.split(r"([ \n]+)", lines)]
    return Markup("").join(Markup("<wbr>").join(map(unbroken, parts)) for parts in words)


# What to write in a framework, and which of its lines the card of a loss shows.


@dataclass(frozen=True)
class Fix:
    """What to write to descend a target, in a framework's own settings or in code.

    Attributes:
        target: the verdict that is wanted.
        lines: configuration to copy, or code where no setting has this target.
        on_policy, off_policy: what the lines descend.
        subject: the name of the audited loss that they configure; empty for code.
        place: where the code goes; empty for configuration.
        note: further information.
    """

    target: Verdict
    lines: str
    on_policy: Verdict
    off_policy: Verdict
    subject: str = ""
    place: str = ""
    note: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the lines have the wanted target on every problem."""
        return self.on_policy == self.target

    @property
    def heading(self) -> str:
        """The title of its panel."""
        how = ", in code" if self.place else "" if self.is_exact else ", nearest setting"
        return TARGETS[self.target].title + how

    @property
    def reason(self) -> str:
        """Introduces its lines in the card of another loss."""
        wanted = f"For the {TARGETS[self.target].title_in_sentence}"
        if self.place:
            return f"{wanted} on every batch, in code"
        return f"{wanted}, " + ("write" if self.is_exact else "the nearest setting")


Fixes = Mapping[str, Sequence[Fix]]
"""By name of the framework."""


def own_lines(r: AuditResult, fixes: Sequence[Fix]) -> list[tuple[Fix, str]]:
    """The framework's lines for the reverse KL at the level of this loss, each with the sentence that introduces it."""
    for fix in fixes:
        if fix.subject == r.name and fix.is_exact:
            return [(fix, f"These are its lines, for the {TARGETS[fix.target].title_in_sentence}")]
    reverse: Verdict = "reverse-kl-sequence" if r.anatomy.horizon.kind == "all" else "reverse-kl-token"
    wanted = [f for f in fixes if f.target == reverse and f.subject != r.name] or list(fixes)
    exact = [f for f in wanted if f.is_exact and not f.place]
    return [(fix, fix.reason) for fix in exact[:1] or wanted]


# Figures: curves in a frame, as `templates/plot.svg` draws them, in pixels.

WIDTH, HEIGHT = 400.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 38.0, 8.0, 8.0, 40.0

Points = list[tuple[float, float | None]]
"""The points of a curve from left to right; None where it has no finite value."""


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
        return LEFT + (self.stretch_x(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        low, high = map(self.stretch_y, self.y_range)
        return HEIGHT - BOTTOM - (self.stretch_y(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(self, curve: Points) -> str:
        """Strokes through the points; a curve that leaves the frame ends at its edge."""
        return "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in self._runs(curve))

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


LOG_RATIOS = (-30.0, -10.0, -3.0, -1.0, 0.0, 1.0, 3.0, 10.0)
COEFFICIENT = Frame(LOG_RATIOS, LOG_RATIOS, (-30, 12), (-40, 20), "log π/ref of the token", math.asinh, math.asinh)
GENERATOR = Frame((0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 4), (0, 3), "u = π/ref of the token")


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        frame: its axes.
        curves: the classes of their lines, and their points.
        label: the figure in words, for screen readers.
        dead: the stretches of the horizontal axis that are shaded.
    """

    frame: Frame
    curves: Sequence[tuple[str, Points]]
    label: str
    dead: Sequence[tuple[float, float]] = ()

    @property
    def grid(self) -> list[tuple[str, str, dict[str, str]]]:
        """Path, label and attributes of the label of each grid line."""
        frame, foot = self.frame, HEIGHT - BOTTOM
        lines = []
        for value in frame.x_ticks:
            x = f"{frame.x(value):.1f}"
            # The first label must not cover those of the other axis.
            start = "start" if value == frame.x_range[0] else "middle"
            at = {"x": x, "y": f"{foot + 15:g}", "text-anchor": start}
            lines.append((f"M{x} {TOP:g}V{foot:g}", number(value), at))
        for value in frame.y_ticks:
            y = frame.y(value)
            at = {"x": f"{LEFT - 6:g}", "y": f"{y + 3.5:.1f}", "text-anchor": "end"}
            lines.append((f"M{LEFT:g} {y:.1f}H{WIDTH - RIGHT:g}", number(value), at))
        return lines

    @property
    def zones(self) -> list[tuple[str, str]]:
        """Outline and hatch of each dead zone. Strokes show in grey print and without colour vision."""
        base, rise = HEIGHT - BOTTOM, HEIGHT - TOP - BOTTOM
        zones = []
        for low, high in self.dead:
            x, end = self.frame.x(low), self.frame.x(high)
            strokes = ((s, max(s, x), min(s + rise, end)) for s in range(int(x - rise), int(end), 9))  # at 45 degrees
            hatch = [f"M{a:.1f} {base - a + s:.1f}L{b:.1f} {base - b + s:.1f}" for s, a, b in strokes if b > a]
            zones.append((f"M{x:.1f} {TOP:g}H{end:.1f}V{base:g}H{x:.1f}z", "".join(hatch)))
        return zones


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
        below = torch.linspace(math.log(0.01), 0, 801, dtype=torch.float64)
        log_u = torch.cat([below, torch.linspace(0, math.log(4), 301, dtype=torch.float64)[1:]])
        u, between = log_u.exp(), (log_u[1:] + log_u[:-1]) / 2  # a slope may jump at 0
        f = torch.cat([torch.zeros(1), (self.slope(between) / self.scale * u.diff()).cumsum(0)])
        return _points(u[::10], (f - f[800])[::10])

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


class Bars(NamedTuple):
    """The probability of one of the example's outcomes: in ref, with the reverse KL, and with the loss."""

    reward: float
    shares: tuple[float, float, float]


def bars_of(a: Anatomy, shape: Shape | None) -> list[Bars]:
    """The optimum of a loss beside that of the reverse KL; empty where it has none by itself."""
    divided = a.baseline.spread != "none" or a.anchor != "ref" or not a.proved_fresh
    ends = None if shape is None or divided else shape.optimum
    right = REVERSE.optimum
    assert right is not None
    return [] if ends is None else [Bars(x[0], x[1:]) for x in zip(REWARD, REF, right, ends, strict=True)]


def plots_of(r: AuditResult, shape: Shape) -> list[tuple[str, Plot]]:
    """The coefficient of a loss, with its dead zones as far as they are in the frame, and its f(u)."""
    low, high = COEFFICIENT.x_range
    zones = [(low, r.dead_below or low), (r.dead_above or high, high)]
    dead = outside(r.dead_below, r.dead_above, number)
    label = f"{r.name}: {f'no gradient {dead}' if dead else 'no dead zone'}"
    coefficient = [("line", shape.coefficient), ("sound", REVERSE.coefficient)]
    f = [("line", shape.generator), ("sound", REVERSE.generator)]
    shaded = [zone for zone in zones if zone[0] < zone[1]]
    return [
        ("Coefficient of a token", Plot(COEFFICIENT, coefficient, label, shaded)),
        ("f(u), which it descends", Plot(GENERATOR, f, f"{r.name}: f of u = π/ref")),
    ]


COMPARED = 6
"""At most as many losses are drawn in one figure."""


def comparison_of(results: Sequence[AuditResult]) -> tuple[list[str], list[tuple[str, Plot]]]:
    """The names of two to six losses with a curve, and their coefficients and f(u), each in one figure."""
    shapes = {r.name: shape for r in results if (shape := shape_of(r.anatomy))} if len(results) <= COMPARED else {}
    if len(shapes) < 2:
        return [], []
    label = f"of {', '.join(shapes)}"
    draw = lambda frame, curves: Plot(frame, [(f"line line-{i}", curve) for i, curve in enumerate(curves, 1)], label)
    return list(shapes), [
        ("Coefficient of a token", draw(COEFFICIENT, [shape.coefficient for shape in shapes.values()])),
        ("f(u)", draw(GENERATOR, [shape.generator for shape in shapes.values()])),
    ]


# The card of one loss, which `templates/card.html` shows, and the index, which has a row for each.

ROLES: dict[str, Role] = {"right": "reverse", "large": "reverse", "else": "forward", "nothing": "nothing"}
"""By standing, how a loss is drawn."""


def role_of(r: AuditResult) -> Role:
    """How a loss is drawn."""
    return ROLES[standing(r)] if r.anatomy.proved_fresh else "unknown"


def card_of(r: AuditResult, anchor: str, summary: str, fixes: Sequence[Fix]) -> dict[str, object]:
    """What the card of a loss shows: `anchor` is its id on the page, `fixes` are those of its framework."""
    shape = shape_of(r.anatomy)
    return {
        "result": r,
        "anchor": anchor,
        "summary": summary,
        "role": role_of(r),
        "parts": rows(r),
        "own_lines": own_lines(r, fixes) if fixes else [],
        "terms": [(x.do or "instead", as_code(term)) for x in r.advice.remedies for term in x.terms],
        "plots": plots_of(r, shape) if shape else [],
        "bars": bars_of(r.anatomy, shape),
        "convex": shape is not None and shape.convex,
        "dead": outside(r.dead_below, r.dead_above, number),
        "has_gaps": shape is not None and any(y is None for _, y in shape.points),
        "facts": _facts(r),
    }


class Fact(NamedTuple):
    """A measurement; a fault is shown in bold."""

    name: str
    text: str
    is_fault: bool = False


def _facts(r: AuditResult) -> list[Fact]:
    wrong = r.float32_wrong_from
    precision = "keeps its digits" if wrong is None else f"wrong {at_and_beyond(wrong, number)}"
    leaks = r.anatomy.leaks
    return [
        *([Fact("Variance", f"{number(r.variance)}, near ref {number(r.variance_near)}")] if r.variance else []),
        Fact("float32", precision, wrong is not None),
        Fact("Finite", "always" if r.finite else "overflows, or 0/0", not r.finite),
        Fact("Padding", "gets gradient" if leaks else "gets none", leaks),
        Fact("Names", f"{r.verdict} on fresh samples, {r.verdict_off_policy} on stale ones"),
        Fact("Called", r.call),
    ]


Settings = list[tuple[str, str]]
"""Key and value of each setting; the key is empty for a word without `=`."""


class Row(NamedTuple):
    """One loss in the index."""

    result: AuditResult
    anchor: str
    tag: str
    settings: Settings
    role: Role
    cells: tuple[str, ...]
    notes: str


class Group(NamedTuple):
    """The rows of one kind of loss, or of one part of a framework, whose title is code."""

    title: str
    is_code: bool
    rows: list[Row]


def groups_of(results: Sequence[AuditResult], anchors: Sequence[str], tags: Mapping[str, str]) -> list[Group]:
    """Group the results; `tags` are words to show beside some names."""
    groups: dict[str, Group] = {}
    for r, anchor in zip(results, anchors, strict=True):
        base, settings = split_name(r.name) if r.framework else (r.name, [])
        title = KIND_TITLES[r.kind] if not r.framework else base if settings else r.framework
        group = groups.setdefault(title, Group(title, bool(r.framework), []))
        text = "; ".join(notes(r)).replace(" = ", "\u00a0=\u00a0")  # an equation stays on one line
        group.rows.append(Row(r, anchor, tags.get(r.name, ""), settings, role_of(r), cells(r.anatomy), text))
    return list(groups.values())


def split_name(name: str) -> tuple[str, Settings]:
    """The words before the first `key=value`, and the settings from there on.

    In a table of many settings the values are what differs, so they are set off from their keys.
    """
    words = name.split(" ")
    first = next((i for i, word in enumerate(words) if "=" in word), len(words))
    pairs = [word.partition("=") for word in words[first:]]
    return " ".join(words[:first]), [(key, value) if equals else ("", key) for key, equals, value in pairs]


# The whole page.


def to_html(
    results: Sequence[AuditResult],
    *,
    summaries: Sequence[str] = (),
    fixes: Fixes | None = None,
    tags: Mapping[str, str] | None = None,
    not_audited: Mapping[str, str] | None = None,
) -> str:
    """Render one page; the same results give the same page.

    Args:
        results: of the audit.
        summaries: one line about each loss, if there are any.
        fixes: what to write, by framework.
        tags: words to show beside some losses, by name of the loss: `default`, for example.
        not_audited: losses that could not be audited, and why.

    Returns:
        The page, which needs no network, no scripts and no fonts.
    """
    slug = lambda name: re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    anchors = [f"loss-{i}-{slug(r.name)}" for i, r in enumerate(results, 1)]
    about, fixes = summaries or [""] * len(results), fixes or {}
    compared, figures = comparison_of(results)
    many = len(results) > 1
    page = environment().get_template("page.html")
    return page.render(
        title=_title(results),
        lead=_lead(results),
        tally=Counter(map(role_of, results)) if many else None,
        fixes=fixes,
        groups=groups_of(results, anchors, tags or {}) if many else [],
        compared=compared,
        figures=figures,
        beta=BETA,
        cards=[
            card_of(r, anchor, summary, fixes.get(r.framework, ()))
            for r, anchor, summary in zip(results, anchors, about, strict=True)
        ],
        not_audited=not_audited or {},
        columns=PARTS,
        problems=len(proof_cases(True)),
    )


def _title(results: Sequence[AuditResult]) -> str:
    if len(results) == 1:
        return f"What {results[0].name} descends"
    frameworks = {r.framework for r in results}
    if "" not in frameworks:
        return f"What {len(results)} settings of {' and '.join(sorted(frameworks))} descend"
    return f"What {len(results)} KL losses descend"


def _lead(results: Sequence[AuditResult]) -> str:
    """The headline: how many losses descend the reverse KL."""
    if len(results) == 1:
        return str(results[0].advice)
    # A mean of l² under the sampler has its optimum at ref, and is no KL.
    is_reverse = lambda verdict: TARGETS[verdict].role == "reverse" and not verdict.startswith("squared")
    on = sum(is_reverse(r.verdict) for r in results)
    both = sum(is_reverse(r.verdict) and is_reverse(r.verdict_off_policy) for r in results)
    edges = [(r.dead_below, r.dead_above, r.float32_wrong_from, None if r.finite else 0.0) for r in results]
    flawed = sum(any(edge is not None for edge in each) for each in edges)
    what = "settings" if all(r.framework for r in results) else "losses"
    text = f"Of {len(results)} {what}, {on or 'none'} {'descend' if on > 1 else 'descends'} the reverse KL on-policy"
    if on:
        text += f", and {both or 'none'} of them {'do' if both > 1 else 'does'} so off-policy"
    if flawed:
        text += f"; {flawed} {'has' if flawed == 1 else 'have'} a dead zone or trouble in float32"
    return f"{text}."
