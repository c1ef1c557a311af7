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
from ..batch import proof_cases
from ..procedure import AuditResult
from ..sentences import cells, report
from .plot import BETA, COEFFICIENT, GENERATOR, REVERSE, Bars, Plot, Shape, bars_of, shape_of
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
        plots: heading and figure of the coefficient and of f(u), or empty.
        bars: where the policy ends in the example, or empty.
        convex: whether its f is convex.
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
    plots: list[tuple[str, Plot]]
    bars: list[Bars]
    convex: bool
    dead: str
    has_gaps: bool
    facts: list[Fact]


def card_of(r: AuditResult, anchor: str, summary: str, fixes: Sequence[Fix]) -> Card:
    """Build the card of a loss.

    Args:
        r: the audit of the loss.
        anchor: its id on the page.
        summary: one line about it, or empty.
        fixes: what to write in its framework; empty for other losses.
    """
    dead, shape = outside(r.dead_below, r.dead_above, number), shape_of(r.anatomy)
    return Card(
        result=r,
        anchor=anchor,
        summary=summary,
        role=role_of(r),
        parts=report(r.anatomy),
        own_lines=own_lines(r, fixes) if fixes else [],
        terms=[(x.do or "instead", as_code(term)) for x in r.advice.remedies for term in x.terms],
        plots=plots_of(r, shape) if shape else [],
        bars=bars_of(r.anatomy, shape),
        convex=shape is not None and shape.convex,
        dead=dead,
        has_gaps=shape is not None and any(y is None for _, y in shape.points),
        facts=_facts(r),
    )


def plots_of(r: AuditResult, shape: Shape) -> list[tuple[str, Plot]]:
    """The coefficient of a loss, with its dead zones as far as they are in the frame, and its f(u)."""
    low, high = COEFFICIENT.x_range
    zones = [(low, r.dead_below or low), (r.dead_above or high, high)]
    dead = outside(r.dead_below, r.dead_above, number)
    label = f"{r.name}: {f'no gradient {dead}' if dead else 'no dead zone'}"
    coefficient = [("line", shape.coefficient), ("sound", REVERSE.coefficient)]
    f = [("line", shape.generator), ("sound", REVERSE.generator)]
    return [
        (
            "Coefficient of a token",
            Plot(COEFFICIENT, coefficient, label, [zone for zone in zones if zone[0] < zone[1]]),
        ),
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
    lines = [f"line line-{i}" for i in range(1, COMPARED + 1)]
    draw = lambda frame, curves: Plot(frame, list(zip(lines, curves, strict=False)), label)
    return list(shapes), [
        ("Coefficient of a token", draw(COEFFICIENT, [shape.coefficient for shape in shapes.values()])),
        ("f(u)", draw(GENERATOR, [shape.generator for shape in shapes.values()])),
    ]


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
    compared, figures = comparison_of(results)
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
            compared=compared,
            figures=figures,
            beta=BETA,
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
