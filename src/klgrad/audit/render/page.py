"""Results as one HTML page: cards, an index and fixes."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ...core.term import as_code
from ...targets import TARGETS, Role, Verdict
from ..advice import at_and_beyond, notes, outside, standing
from ..gradients import proof_cases
from ..parts import Anatomy
from ..probes import GRID, function_of
from ..procedure import AuditResult
from ..sentences import cells, report
from .terminal import KIND_TITLES, LOOKS, PARTS

# The Jinja environment of the HTML page: templates with autoescape, and filters for text that may break over lines.

SEAMS = re.compile(r"(?<=[_=.:])(?=\w)")
"""Where a name of a setting or a function may break over lines."""

CODE_SEAMS = re.compile(r"(?<=[=.])(?=\w)")
"""Where a word of configuration may break."""

PHONE = 36
"""Characters of code that fit a phone; only longer words are broken."""


@cache
def environment() -> Environment:
    """The environment, loaded once."""
    found = Environment(
        loader=PackageLoader("klgrad.audit.render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters.update(breakable=breakable, code_words=code_words, number=number, zip=zip)
    found.globals.update(LOOKS=LOOKS, TARGETS=TARGETS)
    return found


def number(x: float | None, digits: int = 3) -> str:
    """A number for a reader; a dash for what is not a finite number."""
    if x is None or not math.isfinite(x):
        return "–"
    return f"{x:.{digits}g}".replace("-", "−")


def breakable(text: str) -> Markup:
    """The escaped text, with optional line breaks inside long names."""
    return Markup("<wbr>").join(SEAMS.split(text))


def code_words(lines: str) -> Markup:
    """Escaped lines to copy; a narrow page breaks them between words, and long words at `=` and dots."""
    return Markup("").join(_code_word(word) for word in re.split(r"([ \n]+)", lines))


def _code_word(word: str) -> Markup:
    parts = CODE_SEAMS.split(word) if len(word) > PHONE else [word]
    return Markup("<wbr>").join(map(_unbroken, parts))


def _unbroken(part: str) -> Markup:
    """A browser would break `--flag` after its hyphens."""
    if "-" in part and len(part) <= PHONE:
        return Markup('<span class="whole">{}</span>').format(part)
    return escape(part)


# The geometry of the coefficient curve: what `templates/curve.svg` draws, in pixels.

WIDTH, HEIGHT = 400.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 38.0, 8.0, 8.0, 40.0
X_RANGE, Y_RANGE = (-30.0, 12.0), (-40.0, 20.0)
TICKS = (-30, -10, -3, -1, 0, 1, 3, 10)

Points = list[tuple[float, float | None]]
"""(log π/ref, coefficient) in order of the log-ratio; None where the coefficient is not finite."""

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


def chart_of(curve: Points, dead_below: float | None, dead_above: float | None) -> Chart:
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


def points_of(a: Anatomy) -> Points:
    """The coefficient of a token's score, or of an entry of the vocabulary, divided by the scale; empty for none."""
    curve = a.own if not a.own.is_zero else a.full
    if curve is None or curve.is_zero:
        weight = next(((w, name) for w, name in zip(a.exact, ("reverse-kl", "forward-kl"), strict=True) if w), None)
        return [] if weight is None else [(x, float(y)) for x, y in zip(*_of_divergence(weight[1]), strict=True)]
    scale = curve.scale if 0 < curve.scale < math.inf else 1.0
    pairs = zip(curve.points[0].tolist(), (curve.points[1] / scale).tolist(), strict=True)
    return [(x, y if math.isfinite(y) else None) for x, y in pairs]


def _of_divergence(name: str) -> tuple[list[float], list[float]]:
    return GRID.tolist(), function_of(name)(GRID).tolist()


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


def _path(curve: Points) -> str:
    """Strokes through the points within the frame; a curve that leaves it ends at the edge."""
    return "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in _simplified(run)) for run in _runs(curve))


def _runs(curve: Points) -> list[list[tuple[float, float]]]:
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


def _arrows(curve: Points) -> list[str]:
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


# The card of one loss: what `templates/card.html` shows.


@dataclass(frozen=True)
class Fact:
    """A measurement; a fault is shown in bold."""

    name: str
    text: str
    is_fault: bool = False


ROLES: dict[str, Role] = {"right": "reverse", "large": "reverse", "else": "forward", "nothing": "nothing"}
"""By standing, how a loss is drawn."""


def role_of(r: AuditResult) -> Role:
    """How a loss is drawn."""
    return ROLES[standing(r)] if r.anatomy.proved_fresh else "unknown"


@dataclass(frozen=True)
class Card:
    """Everything about one loss.

    Attributes:
        result: the audit of the loss.
        anchor: its id on the page.
        summary: one line about the loss, or empty.
        role: how it is drawn.
        parts: label and sentence of each part.
        own_lines: lines of its framework, each with a sentence that introduces it.
        terms: label and code of the terms to use, where there are no own lines.
        chart: the coefficient curve, or None where there is none.
        dead: its dead zones in words, or empty.
        has_gaps: whether the coefficient is not finite somewhere.
        facts: the other measurements.
    """

    result: AuditResult
    anchor: str
    summary: str
    role: Role
    parts: list[tuple[str, str]]
    own_lines: list[tuple[Fix, str]]
    terms: list[tuple[str, str]]
    chart: Chart | None
    dead: str
    has_gaps: bool
    facts: list[Fact]

    @property
    def label(self) -> str:
        """The curve in words, for screen readers."""
        return f"{self.result.name}: {f'no gradient {self.dead}' if self.dead else 'no dead zone'}"


def card_of(r: AuditResult, anchor: str, summary: str, fixes: Sequence[Fix]) -> Card:
    """Build the card of a loss.

    Args:
        r: the audit of the loss.
        anchor: its id on the page.
        summary: one line about it, or empty.
        fixes: what to write in its framework; empty for other losses.
    """
    dead, curve = outside(r.dead_below, r.dead_above, number), points_of(r.anatomy)
    return Card(
        result=r,
        anchor=anchor,
        summary=summary,
        role=role_of(r),
        parts=report(r.anatomy),
        own_lines=own_lines(r, fixes) if fixes else [],
        terms=[(x.do or "instead", as_code(term)) for x in r.advice.remedies for term in x.terms],
        chart=chart_of(curve, r.dead_below, r.dead_above) if curve else None,
        dead=dead,
        has_gaps=any(y is None for _, y in curve),
        facts=_facts(r),
    )


def _facts(r: AuditResult) -> list[Fact]:
    wrong = r.float32_wrong_from
    precision = "keeps its digits" if wrong is None else f"wrong {at_and_beyond(wrong, number)}"
    leaks = r.anatomy.leaks
    return [
        Fact("Variance", f"{number(r.variance)}, near ref {number(r.variance_near)}"),
        Fact("float32", precision, wrong is not None),
        Fact("Finite", "always" if r.finite else "overflows, or 0/0", not r.finite),
        Fact("Padding", "gets gradient" if leaks else "gets none", leaks),
        Fact("Names", f"{r.verdict} on fresh samples, {r.verdict_off_policy} on stale ones"),
        Fact("Called", r.call),
    ]


# The index of the page: what `templates/index.html` shows, one row per loss.

Settings = list[tuple[str, str]]
"""Key and value of each setting; the key is empty for a word without `=`."""


@dataclass(frozen=True)
class Row:
    """One loss."""

    result: AuditResult
    anchor: str
    tag: str
    settings: Settings
    role: Role
    cells: tuple[str, ...]
    notes: str


@dataclass(frozen=True)
class Group:
    """The rows of one kind of loss, or of one part of a framework, whose title is code."""

    title: str
    is_code: bool
    rows: list[Row]


def groups_of(results: Sequence[AuditResult], anchors: Sequence[str], tags: Mapping[str, str]) -> list[Group]:
    """Group the results; `tags` are words to show beside some names."""
    found: dict[str, Group] = {}
    for r, anchor in zip(results, anchors, strict=True):
        base, settings = split_name(r.name) if r.framework else (r.name, [])
        title = KIND_TITLES[r.kind] if not r.framework else base if settings else r.framework
        group = found.setdefault(title, Group(title, bool(r.framework), []))
        group.rows.append(Row(r, anchor, tags.get(r.name, ""), settings, role_of(r), cells(r.anatomy), _notes(r)))
    return list(found.values())


def split_name(name: str) -> tuple[str, Settings]:
    """The words before the first `key=value`, and the settings from there on.

    In a table of many settings the values are what differs, so they are set off from their keys.
    """
    words = name.split(" ")
    first = next((i for i, word in enumerate(words) if "=" in word), len(words))
    pairs = [word.partition("=") for word in words[first:]]
    return " ".join(words[:first]), [(key, value) if equals else ("", key) for key, equals, value in pairs]


def _notes(r: AuditResult) -> str:
    """The notes; a non-breaking space keeps an equation on one line."""
    return "; ".join(notes(r)).replace(" = ", "\u00a0=\u00a0")


# Audit results as one HTML page: `templates/page.html`, with the style sheet in it.


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
    about = list(summaries) or [""] * len(results)
    fixes = fixes or {}
    anchors = [f"loss-{i}-{_slug(r.name)}" for i, r in enumerate(results, 1)]
    cards = [
        card_of(r, anchor, summary, fixes.get(r.framework, ()))
        for r, anchor, summary in zip(results, anchors, about, strict=True)
    ]
    many = len(results) > 1
    return (
        environment()
        .get_template("page.html")
        .render(
            style=files("klgrad.audit.render").joinpath("page.css").read_text(encoding="utf-8"),
            title=_title(results),
            lead=_lead(results),
            tally=_tally(results) if many else None,
            fixes=fixes,
            groups=groups_of(results, anchors, tags or {}) if many else [],
            cards=cards,
            not_audited=not_audited or {},
            columns=PARTS,
            problems=len(proof_cases(True)),
        )
    )


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]


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
    on = sum(_is_reverse(r.verdict) for r in results)
    both = sum(_is_reverse(r.verdict) and _is_reverse(r.verdict_off_policy) for r in results)
    flawed = sum(
        r.dead_below is not None or r.dead_above is not None or not r.finite or r.float32_wrong_from is not None
        for r in results
    )
    what = "settings" if all(r.framework for r in results) else "losses"
    text = f"Of {len(results)} {what}, {on or 'none'} {'descend' if on > 1 else 'descends'} the reverse KL on-policy"
    if on:
        text += f", and {both or 'none'} of them {'do' if both > 1 else 'does'} so off-policy"
    if flawed:
        text += f"; {flawed} {'has' if flawed == 1 else 'have'} a dead zone or trouble in float32"
    return f"{text}."


def _is_reverse(verdict: Verdict) -> bool:
    return TARGETS[verdict].role == "reverse"


def _tally(results: Sequence[AuditResult]) -> dict[str, object]:
    """How many losses are drawn in each way."""
    return {"roles": Counter(map(role_of, results)), "total": len(results)}
