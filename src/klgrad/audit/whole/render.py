"""The results of `audit_whole` for a terminal, as Markdown and as JSON."""

import json
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...support.atomic_files import finite
from .table import POLICY_GRADIENTS
from .whole_result import Side, WholeResult
from .words import drift_in_words, row_of, update_in_words, weighting_in_words

COLUMNS = ("loss", "update on samples of π", "drift on stale samples, one A > 0 for all", "update on stale samples")

CAPTION = (
    "Exact, in the limit of large batches. A is the advantage. With one advantage for all completions a right policy "
    "gradient is zero; what is left is drift, in percent of that of the same loss without a correction, averaged over "
    "the problems. `klgrad audit NAME --whole` shows everything about one loss."
)


def overview(results: Sequence[WholeResult]) -> RenderableType:
    """One table."""
    return table_of([row_of(r) for r in results])


def table_of(rows: Iterable[Sequence[str]]) -> RenderableType:
    """The table of these rows, with what its columns mean."""
    table = Table(box=None, padding=(0, 2, 1, 0), pad_edge=False)
    for title in COLUMNS:
        table.add_column(title, overflow="fold", ratio=2 if title == "loss" else 3)
    for row in rows:
        table.add_row(*row)
    return Group(table, Text(CAPTION, style="dim"))


def in_full(r: WholeResult) -> RenderableType:
    """Everything about one loss."""
    head = [Text(x, style="italic") for x in (r.summary, r.source and f"Source: {r.source}") if x]
    sides = (("On samples of π", r.on_policy), ("On samples of another policy", r.off_policy))
    parts = [part for title, side in sides for part in ("", Text(title, style="bold"), _facts(side))]
    return Panel(Group(*head, *parts), title=Text(r.name, style="bold"), title_align="left")


def _facts(side: Side) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_row("KL (A = 0)", "none" if side.kl == "nothing" else side.kl_in_words, side.kl)
    for title, drift in (("all A = 1", side.positive), ("all A = -1", side.negative)):
        facts.add_row(title, drift_in_words(drift, side.update.weighting), drift.verdict)
    facts.add_row("A differs", update_in_words(side), side.update.verdict)
    facts.add_row("advantages", weighting_in_words(side.update.weighting) or "as given", "")
    if side.update.verdict == "unknown":
        near = "; ".join(f"{POLICY_GRADIENTS[n].short}: {x:.2f}" for n, x in side.update.cosine.items())
        facts.add_row("cosines", near, "")
    return facts


def to_markdown(results: Sequence[WholeResult]) -> str:
    """One table, with the source of each loss that has one."""
    sourced = any(r.source for r in results)
    columns = (*COLUMNS, "source") if sourced else COLUMNS
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in results:
        name, *rest = row_of(r)
        lines.append("| " + " | ".join([f"`{name}`", *rest, *([r.source] if sourced else [])]) + " |")
    return "\n".join(lines) + "\n"


def to_json(results: Sequence[WholeResult]) -> str:
    """`{"results": [{"name", "source", "whole"}, ...]}`; numbers that are not finite are null."""
    return json.dumps(finite({"results": [r.to_dict() for r in results]}), indent=2) + "\n"
