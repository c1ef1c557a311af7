"""Audit results for a terminal."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...targets import WITH_GRADIENT, Verdict
from ..audit_result import AuditResult
from ..numbers import outside
from ..problems import in_words as summed_over
from ..subject import Subject
from ..words import STANDINGS, in_words, notes, standing
from .plain import KIND_TITLES, cells_of
from .roles import look_of

NO_WORDS: Mapping[str, str] = MappingProxyType({})

CAPTION = (
    f"Exact: {summed_over()}, and one batch that is the limit of large ones, in float64. Fresh samples are drawn from "
    "the policy itself, stale ones from another policy. `klgrad audit NAME` shows everything about one loss."
)

NUMBERS = 150
"""Columns from which an overview has room for the scale and the variances."""

NARROW = 100
"""Columns below which an overview has no column of its own for stale samples."""

FRAME = 6
"""Columns that the frame takes from the line of the title."""


def by_standing(results: Sequence[AuditResult], width: int) -> RenderableType:
    """Tables grouped by what the losses are: the reverse KL, that in large batches, something else, or nothing."""
    groups = {title: [r for r in results if standing(r) == name] for name, title in STANDINGS.items()}
    return _tables({title: some for title, some in groups.items() if some}, width, NO_WORDS)


def overview(
    results: Sequence[AuditResult],
    width: int,
    *,
    titles: Mapping[str, str] = NO_WORDS,
    tags: Mapping[str, str] = NO_WORDS,
) -> RenderableType:
    """A table per kind of loss and per framework.

    Args:
        results: the audits.
        width: columns of the terminal.
        titles: the heading of each framework.
        tags: words to show beside some losses, by name of the loss: `default`, for example.
    """
    heading = lambda r: titles.get(r.framework) or KIND_TITLES[r.kind]
    found = dict.fromkeys(map(heading, results))
    return _tables({title: [r for r in results if heading(r) == title] for title in found}, width, tags)


def _tables(groups: Mapping[str, Sequence[AuditResult]], width: int, tags: Mapping[str, str]) -> RenderableType:
    """One table per group. Long text continues on the next line; nothing is cut off."""
    found: list[RenderableType] = []
    for title, results in groups.items():
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("loss", overflow="fold", ratio=3)
        table.add_column("on fresh samples it descends", overflow="fold", ratio=5)
        if width >= NARROW:
            table.add_column("on stale samples", overflow="fold", ratio=5)
        if width >= NUMBERS:
            for name in ("scale", "variance", "near ref"):
                table.add_column(name, justify="right", no_wrap=True)
        if width >= NARROW:
            table.add_column("notes", overflow="fold", ratio=3)
        for r in results:
            table.add_row(*_row(r, width, tags.get(r.name, "")))
        found += [Text(title, style="bold"), table, ""]
    return Group(*found, Text(CAPTION, style="dim"))


def _row(r: AuditResult, width: int, tag: str) -> list[RenderableType]:
    name = Text(r.name)
    if tag:
        name.append(f" ({tag})", style="bold")
    fresh = Text(in_words(r), style=look_of(r.verdict).style)
    stale = Text(in_words(r, on_policy=False), style=look_of(r.verdict_off_policy).style)
    remarks = "; ".join(notes(r))
    if width >= NARROW:
        return [name, fresh, stale, *(cells_of(r)[3:6] if width >= NUMBERS else ()), remarks]
    fresh.append("\nstale: ", style="dim not bold default").append(stale)
    if remarks:
        fresh.append(f"\n{remarks}", style="dim not bold default")
    return [name, fresh]


def in_full(r: AuditResult, subject: Subject, width: int) -> RenderableType:
    """Everything about one loss."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("on-policy", _verdict(r.verdict))
    facts.add_row("", in_words(r))
    facts.add_row("off-policy", _verdict(r.verdict_off_policy))
    facts.add_row("", in_words(r, on_policy=False))
    if r.scale is not None:
        facts.add_row("scale", _scales(r))
    if r.variance is not None and r.variance_near is not None:
        facts.add_row("variance", f"{r.variance:.4g}, near ref {r.variance_near:.4g}")
    facts.add_row("depends on ref", _yes(r.depends_on_reference) if r.finite_in_float64 else "not known")
    at_equal = f", equal ones give {r.verdict_fixed_lengths}" if r.length_sensitive else ""
    facts.add_row("lengths change it", _yes(r.length_sensitive) + at_equal)
    facts.add_row("dead zone", f"log π/ref {outside(r.dead_below, r.dead_above)}" if r.dead_zone else "no")
    facts.add_row("finite in float32", _yes(r.finite))
    facts.add_row("notes", "; ".join(notes(r)) or "none")
    distances = Table(box=None, pad_edge=False)
    for column in ("target", "bias at one scale", "cosine", "bias off-policy", "cosine off-policy"):
        distances.add_column(column, justify="left" if column == "target" else "right")
    for name in WITH_GRADIENT:
        numbers = (each.get(name) for each in (r.bias, r.cosine, r.bias_off_policy, r.cosine_off_policy))
        distances.add_row(name, *("" if x is None else _number(x) for x in numbers))
    name = Text(r.name, style="bold")
    fits = name.cell_len <= width - FRAME
    parts = [] if fits else [name, ""]  # a title that is too long would be cut off
    parts += [Text(subject.summary, style="italic"), ""] if subject.summary else []
    body = Group(*parts, facts, "", distances, "", Text(str(r.advice)))
    return Panel(body, title=name if fits else None, title_align="left")


def _verdict(verdict: Verdict) -> Text:
    return Text(verdict, style=look_of(verdict).style)


def _scales(r: AuditResult) -> str:
    if r.scale_range is None:
        return f"{r.scale:.4g}"
    return ", ".join(f"{x:.4g} ({shape})" for shape, x in r.scale_by_shape.items())


def _number(x: float) -> str:
    return "0" if abs(x) < 5e-7 else f"{x:.4f}" if abs(x) >= 5e-5 else f"{x:.1g}"


def _yes(x: bool) -> str:
    return "yes" if x else "no"
