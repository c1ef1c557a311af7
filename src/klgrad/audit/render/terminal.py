"""Audit results for a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...targets import WITH_GRADIENT, Verdict
from ..audit_result import AuditResult
from ..problems import in_words
from ..subject import Subject
from .plain import KIND_TITLES, cells_of, notes
from .roles import look_of

CAPTION = (
    f"Exact: {in_words()}, in float64. The variance is that of the gradient of one completion at scale 1, over the "
    "standard problems and over those near ref; in such small groups a leave-one-out mean can increase it. "
    "`klgrad audit NAME` shows everything about one loss."
)


WIDE = 135
"""Columns that the whole overview needs; a narrower terminal shows names and verdicts only."""

FRAME = 6
"""Columns that the frame takes from the line of the title."""


def overview(
    results: Sequence[AuditResult],
    width: int,
    *,
    titles: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> RenderableType:
    """A table per kind of loss and per framework.

    Args:
        results: the audits.
        width: columns of the terminal.
        titles: the heading of each framework.
        tags: words to show beside some losses, by name of the loss: `default`, for example.
    """
    found: list[RenderableType] = []
    heading = lambda r: (titles or {}).get(r.framework) or KIND_TITLES[r.kind]
    names = {r.name: f"{r.name} ({tags[r.name]})" if tags and r.name in tags else r.name for r in results}
    for title in dict.fromkeys(map(heading, results)):
        table = Table("loss", "on-policy", "off-policy", box=None, padding=(0, 1), pad_edge=False)
        table.columns[0].overflow = "fold"
        longest = max(map(len, names.values()))
        table.columns[0].no_wrap = width >= WIDE and longest <= WIDE // 2  # a column that may not wrap is cut off
        table.columns[1].no_wrap = table.columns[2].no_wrap = True
        if width >= WIDE:
            table.add_column("scale", justify="right", no_wrap=True)
            table.add_column("variance", justify="right", no_wrap=True)
            table.add_column("near ref", justify="right", no_wrap=True)
            table.add_column("notes")
        for r in (r for r in results if heading(r) == title):
            more = cells_of(r)[3:] if width >= WIDE else ()
            table.add_row(names[r.name], _verdict(r.verdict), _verdict(r.verdict_off_policy), *more)
        found += [Text(title, style="bold"), table, ""]
    return Group(*found, Text(CAPTION, style="dim"))


def in_full(r: AuditResult, subject: Subject, width: int) -> RenderableType:
    """Everything about one loss."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("on-policy", _verdict(r.verdict))
    facts.add_row("off-policy", _verdict(r.verdict_off_policy))
    if r.scale is not None:
        facts.add_row("scale", _scales(r))
    facts.add_row("variance", f"{r.variance:.4g}, near ref {r.variance_near:.4g}")
    facts.add_row("depends on ref", _yes(r.depends_on_reference))
    at_equal = f", equal ones give {r.verdict_fixed_lengths}" if r.length_sensitive else ""
    facts.add_row("lengths change it", _yes(r.length_sensitive) + at_equal)
    facts.add_row("dead zone", f"from log π/ref = {r.dead_zone_from:g}" if r.dead_zone_from is not None else "no")
    facts.add_row("finite in float32", _yes(r.finite))
    facts.add_row("notes", "; ".join(notes(r)) or "none")
    distances = Table(box=None, pad_edge=False)
    for column in ("target", "bias", "cosine", "bias off-policy", "cosine off-policy"):
        distances.add_column(column, justify="left" if column == "target" else "right")
    for name in WITH_GRADIENT:
        numbers = (r.bias[name], r.cosine[name], r.bias_off_policy[name], r.cosine_off_policy[name])
        distances.add_row(name, *(_number(x) for x in numbers))
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
