"""Results as tables and text for a terminal, as Markdown and as JSON."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..support import finite
from .advice import STANDINGS, notes, rows, standing
from .batch import proof_cases
from .parts import Bound
from .procedure import AuditResult
from .sentences import cells, part_differences, summary
from .subject import Subject

# Audit results as JSON and as a Markdown table.

KIND_TITLES = {
    "cell": "Cells: losses as found in the wild",
    "term": "Terms: losses that declare what they mean",
    "function": "Functions",
    "framework": "Frameworks: their own code, by setting",
}
"""The heading of each kind of loss."""

PARTS = ("divergence", "looks ahead", "samples", "unit", "scale")
COLUMNS = ("loss", *PARTS, "notes")


def to_json(results: Sequence[AuditResult]) -> str:
    """`{"results": [...], "problems": [...]}`; numbers that are not finite are null."""
    data = {
        "results": [r.to_dict() for r in results],
        "problems": [c.describe() for c in proof_cases(False)],
    }
    return json.dumps(finite(data), indent=2) + "\n"


def to_markdown(results: Sequence[AuditResult]) -> str:
    """One table."""
    return markdown_table([cells_of(r) for r in results])


def markdown_table(rows: Iterable[Sequence[str]], columns: Sequence[str] = COLUMNS) -> str:
    """Rows as a Markdown table; the first cell of each is code."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join([code(name), *rest]) + " |" for name, *rest in rows]
    return "\n".join(lines) + "\n"


def code(name: str) -> str:
    """A name as code in a cell of a table.

    A bar would end the cell, and Markdown readers do not agree on how to escape it between backticks.
    """
    name = " ".join(name.splitlines())
    if not re.search(r"[|`\\]", name):
        return f"`{name}`"
    return f"<code>{''.join(c if c.isalnum() or c == ' ' else f'&#{ord(c)};' for c in name)}</code>"


def cells_of(r: AuditResult) -> tuple[str, ...]:
    """The row of a table, in the order of `COLUMNS`."""
    return (r.name, *cells(r.anatomy), "; ".join(notes(r)))


# Audit results for a terminal.

NO_WORDS: Mapping[str, str] = MappingProxyType({})

CAPTION = (
    "Read from the derivatives of the loss in float64, and compared with its gradient summed over every outcome of "
    "small problems. l is log π/ref of a token, β the coefficient of the KL. Samples: `fresh` has no ratio π/μ to the "
    "sampler. `klgrad audit NAME` shows everything about one loss."
)

NARROW = 110
"""Columns below which the parts of a loss are in one cell."""

FRAME = 6
"""Columns that the frame takes from the line of the title."""


def by_standing(results: Sequence[AuditResult], width: int) -> RenderableType:
    """Tables grouped by what the losses are: the reverse KL, that in large batches, something else, or nothing."""
    groups = {title: [r for r in results if standing(r) == name] for name, title in STANDINGS.items()}
    return _tables({title: some for title, some in groups.items() if some}, width, NO_WORDS, NO_WORDS)


def overview(
    results: Sequence[AuditResult],
    width: int,
    *,
    titles: Mapping[str, str] = NO_WORDS,
    tags: Mapping[str, str] = NO_WORDS,
    wanted: Mapping[str, str] = NO_WORDS,
) -> RenderableType:
    """A table per kind of loss and per framework.

    Args:
        results: of the audit.
        width: of the terminal.
        titles: the headings, by framework.
        tags: words beside some names.
        wanted: expected values of parts; a cell that differs is marked by `DIFFERS`.
    """
    heading = lambda r: titles.get(r.framework) or KIND_TITLES[r.kind]
    headings = dict.fromkeys(map(heading, results))
    return _tables({title: [r for r in results if heading(r) == title] for title in headings}, width, tags, wanted)


def _tables(
    groups: Mapping[str, Sequence[AuditResult]], width: int, tags: Mapping[str, str], wanted: Mapping[str, str]
) -> RenderableType:
    """One table per group. Long text continues on the next line; nothing is cut off."""
    tables: list[RenderableType] = []
    for title, results in groups.items():
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("loss", overflow="fold", ratio=4, min_width=24)
        for name in (*PARTS, "notes") if width >= NARROW else ("divergence, looks ahead, samples, unit, scale",):
            table.add_column(name, overflow="fold", ratio=4 if name == "divergence" else 3, no_wrap=name == "scale")
        for r in results:
            table.add_row(*_row(r, width, tags.get(r.name, ""), wanted))
        tables += [Text(title, style="bold"), table, ""]
    return Group(*tables, Text(CAPTION, style="dim"))


DIFFERS = "≠ "
"""Before a cell that is not as expected: it is seen without colour too."""

EXPECTED = ("divergence", "horizon", "samples", "unit", "scale")
"""The names in `--expect` of the columns in `PARTS`."""


def _row(r: AuditResult, width: int, tag: str, wanted: Mapping[str, str]) -> list[RenderableType]:
    name = Text(r.name)
    if tag:
        name.append(f" ({tag})", style="bold")
    differing = [expected.partition("=")[0] for expected, _ in part_differences(r.anatomy, dict(wanted))]
    marked = [DIFFERS * (part in differing) + text for part, text in zip(EXPECTED, cells(r.anatomy), strict=True)]
    style = lambda text, usual: "bold red" if text.startswith(DIFFERS) else usual
    first, *others = (Text(text, style=style(text, style_of(r) if i == 0 else "")) for i, text in enumerate(marked))
    remarks = "; ".join(notes(r))
    if width >= NARROW:
        return [name, first, *others, remarks]
    for label, text in zip(("ahead", "samples", "unit", "scale", "notes"), (*marked[1:], remarks), strict=True):
        if text:
            first.append(f"\n{label}: {text}", style=style(text, "dim not bold default"))
    return [name, first]


STYLES = {"right": "green", "large": "green", "else": "magenta", "nothing": "bold red"}


def style_of(r: AuditResult) -> str:
    """The rich style of what a loss descends."""
    return STYLES[standing(r)] if r.anatomy.proved_fresh else "bold yellow"


def in_full(r: AuditResult, subject: Subject, width: int) -> RenderableType:
    """Everything about one loss."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    worse = f"; on stale samples it {_stale_effect(r)}" if standing(r) == "nothing" and r.anatomy.constant else ""
    facts.add_row("in short", Text(f"{r.advice.finding}{worse}", style=style_of(r)))
    for label, sentence in rows(r):
        facts.add_row(label, sentence)
    if standing(r) in ("right", "large") and r.anatomy.baseline.spread == "none":
        name = "..." if r.kind == "framework" else r.name
        facts.add_row("in CI", f"klgrad audit {name} --expect {r.verdict}")
    if r.kind != "cell" and r.kind != "term":
        facts.add_row("called", Text(r.call, style="dim"))
    for remedy in r.advice.remedies:
        facts.add_row("advice", str(remedy))
    name = Text(r.name, style="bold")
    fits = name.cell_len <= width - FRAME
    parts = [] if fits else [name, ""]  # a title that is too long would be cut off
    parts += [Text(subject.summary, style="italic"), ""] if subject.summary else []
    body = Group(*parts, facts, "", Text(legend(r), style="dim"))
    return Panel(body, title=name if fits else None, title_align="left")


def _stale_effect(r: AuditResult) -> str:
    return summary(r.anatomy, on_policy=False)


SAMPLES = "Fresh samples are drawn from π, stale ones from the sampler μ, an older policy."
SYMBOLS = {
    "k1": "k1 = l",
    "k2": "k2 = l²/2",
    "k3": "k3 = exp(-l) - 1 + l",
    "r_t": "r_t = π/μ of token t",
    "w_t": "w_t = π/μ of the tokens up to t",
    "w_T": "w_T = π/μ of the completion",
    "D_t": "D_t = the divergence at token t",
    "KLTerm": "KLTerm is of this library (from klgrad import KLTerm)",
}
"""What a symbol of a report means, where it is used."""


def legend(r: AuditResult) -> str:
    """What the symbols in the report of one loss mean."""
    told = dict(rows(r))
    text = " ".join([*told.values(), *map(str, r.advice.remedies)])
    used = ["l = log π/ref of a token", *(meaning for symbol, meaning in SYMBOLS.items() if symbol in text)]
    used += [f"bound(x) = {_of_bound(r.anatomy.samples.bound)}"] if "bound(" in text else []
    gradient = "The gradient is the mean of Σ_t c_t ∇log π(token t), with the coefficient c_t. "
    return f"{'' if told.get('coefficient', 'none').startswith('none') else gradient}{', '.join(used)}. {SAMPLES}"


def _of_bound(bound: Bound | None) -> str:
    if bound is not None and bound.kind == "truncate" and bound.high is not None:
        return f"min(x, {bound.high:g})"
    return "x within its bound"
