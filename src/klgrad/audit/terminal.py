"""Results as tables and text for a terminal, as Markdown and as JSON."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..support import finite
from .advice import findings, is_usual, rows
from .procedure import AuditResult
from .sentences import cells, part_differences
from .subject import Subject

# What every report is written with: a table of cells, and lines of a label and a sentence.

NARROW = 110
"""Columns of a terminal below which the cells of a row are below each other."""


WHOLE = 40
"""Characters of a setting or a name that is not broken over lines."""


@dataclass(frozen=True)
class CellTable:
    """A table in which long text continues on the next line: nothing is cut off.

    Attributes:
        columns: the headings.
        rows: the cells.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, as wide as the terminal."""
        is_wide = options.max_width >= NARROW
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        first, *others = self.columns
        longest = max((len(word) for name, *_ in self.rows for word in str(name).split()), default=0)
        table.add_column(first, overflow="fold", ratio=4, min_width=min(max(longest, 24), WHOLE))
        for i, name in enumerate(others if is_wide else [", ".join(others)]):
            table.add_column(name, overflow="fold", ratio=3 if i else 4, no_wrap=name == "scale")
        for name, *texts in self.rows:
            lines = [Text.assemble(f"{label}: ", text) for label, text in zip(others, texts, strict=True) if text]
            table.add_row(name, *texts if is_wide else [Text("\n").join(lines)])
        yield table


def panel(name: str, about: Sequence[str], lines: Iterable[tuple[str, str]], legend: str, style: str) -> Panel:
    """Everything about one loss; the first line has a style."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    for i, (label, sentence) in enumerate(lines):
        facts.add_row(label, Text(sentence, style="" if i else style))
    head = [Text(name, style="bold"), *(Text(text, style="italic") for text in about if text)]
    return Panel(Group(*head, "", facts, "", Text(legend, style="dim")))


def markdown_table(rows: Iterable[Sequence[str]], columns: Sequence[str]) -> str:
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


class HasData(Protocol):
    """A result."""

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        ...


def to_json(results: Sequence[HasData]) -> str:
    """`{"results": [...]}`; numbers that are not finite are null."""
    return json.dumps(finite({"results": [r.to_dict() for r in results]}), indent=2) + "\n"


# The audits of KL losses.

KIND_TITLES = {
    "cell": "Losses as found in the wild",
    "term": "Terms of this library, KLTerm",
    "function": "Functions",
    "framework": "Frameworks: their own code, by setting",
}
"""The heading of each kind of loss."""

PARTS = ("divergence", "looks ahead", "samples", "unit", "scale")
COLUMNS = ("loss", *PARTS, "notes")
CAPTION = (
    "l is log π/ref of a token. Looks ahead: which of the later tokens a token answers for; `all` makes it the KL of "
    "whole completions. Samples: by which ratio π/μ to the sampler μ the loss is weighted. Scale: its pull near ref, "
    "relative to β KL(π‖ref). `klgrad audit NAME` shows everything about one loss."
)


def cells_of(r: AuditResult) -> tuple[str, ...]:
    """The row of a table, in the order of `COLUMNS`."""
    return (r.name, *cells(r.anatomy), "; ".join(findings(r)))


SHOWN = ("loss", "KL(π‖ref)?", *PARTS, "notes")
"""The columns of what is audited now, and not recorded."""


def shown_of(r: AuditResult) -> tuple[str, ...]:
    """The row of a table, in the order of `SHOWN`."""
    name, *others = cells_of(r)
    return (name, is_usual(r), *others)


def to_markdown(results: Sequence[AuditResult]) -> str:
    """One table."""
    return markdown_table([shown_of(r) for r in results], SHOWN)


def overview(
    results: Sequence[AuditResult],
    *,
    titles: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    wanted: Mapping[str, str] | None = None,
) -> RenderableType:
    """A table per kind of loss and per framework.

    Args:
        results: of the audit.
        titles: the headings, by framework.
        tags: words beside some names.
        wanted: expected values of parts; a cell that differs is marked by `DIFFERS`.
    """
    groups: dict[str, list[list[str | Text]]] = {}
    for r in results:
        heading = (titles or {}).get(r.framework) or KIND_TITLES[r.kind]
        groups.setdefault(heading, []).append(_row(r, (tags or {}).get(r.name, ""), wanted or {}))
    tables = [[Text(title, style="bold"), CellTable(SHOWN, some), ""] for title, some in groups.items()]
    return Group(*(part for table in tables for part in table), Text(CAPTION, style="dim"))


DIFFERS = "≠ "
"""Before a cell that is not as expected: it is seen without colour too."""

EXPECTED = ("divergence", "horizon", "samples", "unit", "scale")
"""The names in `--expect` of the columns in `PARTS`."""


def _row(r: AuditResult, tag: str, wanted: Mapping[str, str]) -> list[str | Text]:
    name, answer, *texts, notes = shown_of(r)
    differing = [expected.partition("=")[0] for expected, _ in part_differences(r.anatomy, dict(wanted))]
    shown = [
        Text(DIFFERS + text, style="bold red") if part in differing else text
        for part, text in zip(EXPECTED, texts, strict=True)
    ]
    return [
        Text.assemble(name, (f" ({tag})", "bold") if tag else ""),
        Text(answer, style=STYLES[answer]),
        *shown,
        notes,
    ]


STYLES = {"yes": "green", "in part": "green", "no": "magenta", "not known": "bold yellow"}
"""The rich style of each answer."""


def in_full(r: AuditResult, subject: Subject) -> RenderableType:
    """Everything about one loss."""
    return panel(r.name, [subject.summary], rows(r), legend(r), STYLES[is_usual(r)])


SYMBOLS = {
    "k1": "k1 = l",
    "k2": "k2 = l²/2",
    "k3": "k3 = exp(-l) - 1 + l",
    "r_t": "r_t = π/μ of token t",
    "w_t": "w_t = π/μ of the tokens up to t",
    "w_T": "w_T = π/μ of the completion",
    "1/T": "T = the length of the completion",
    "D_t": "D_t = the divergence at token t",
    "bound(": "bound(x) = x within its bound, and beyond it what the row of samples says",
    "k2-loss": "k2-loss is k2 differentiated",
    "KLTerm": "KLTerm is of this library: KLTerm()(Rollout(logp, ref_logp, mask)).loss, all of them in klgrad",
}
"""What a symbol of a report means, where it is used."""


def legend(r: AuditResult) -> str:
    """What the symbols in the report of one loss mean."""
    told = dict(rows(r))
    text = " ".join(sentence for _, sentence in rows(r))
    frozen = "l = log μ/ref of a token, which is log π/ref on fresh samples"
    used = [frozen if r.anatomy.samples.frozen else "l = log π/ref of a token"]
    used += [meaning for symbol, meaning in SYMBOLS.items() if symbol in text]
    gradient = "The gradient is the mean of Σ_t c_t ∇log π(token t), with the coefficient c_t. "
    samples = "Fresh samples are drawn from π, stale ones from the sampler μ, an older policy."
    return f"{'' if told.get('coefficient', 'none').startswith('none') else gradient}{', '.join(used)}. {samples}"
