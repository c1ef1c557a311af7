"""Audit results as JSON and as a Markdown table."""

import json
import re
from collections.abc import Sequence

from ...support.atomic_files import finite
from ...targets import TARGETS
from ..audit_result import AuditResult
from ..large_batches import limit_cases
from ..problems import cases
from ..words import in_words, notes

KIND_TITLES = {
    "cell": "Cells: losses as found in the wild",
    "term": "Terms: losses that declare what they mean",
    "function": "Functions",
    "framework": "Frameworks: their own code, by setting",
}
"""The heading of each kind of loss."""

COLUMNS = ("loss", "on-policy it descends", "off-policy", "scale", "variance", "near ref", "notes")


def to_json(results: Sequence[AuditResult]) -> str:
    """`{"results": [...], "problems": [...]}`; numbers that are not finite are null."""
    data = {
        "results": [r.to_dict() for r in results],
        "problems": [c.describe() for c in (*cases(False), *limit_cases(False))],
    }
    return json.dumps(finite(data), indent=2) + "\n"


def to_markdown(results: Sequence[AuditResult]) -> str:
    """One table."""
    return markdown_table([cells_of(r) for r in results])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of `cells_of` as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join([_code(name), *rest]) + " |" for name, *rest in rows]
    return "\n".join(lines) + "\n"


def _code(name: str) -> str:
    """A name as code in a cell of a table.

    A bar would end the cell, and Markdown readers do not agree on how to escape it between backticks.
    """
    name = " ".join(name.splitlines())
    if not re.search(r"[|`\\]", name):
        return f"`{name}`"
    return f"<code>{''.join(c if c.isalnum() or c == ' ' else f'&#{ord(c)};' for c in name)}</code>"


def cells_of(r: AuditResult) -> tuple[str, ...]:
    """The row of a table, in the order of `COLUMNS`."""
    scale = f"{r.scale:.3g}" if r.scale is not None and TARGETS[r.verdict].has_gradient else ""
    variances = ("" if x is None else f"{x:.3g}" for x in (r.variance, r.variance_near))
    return (r.name, in_words(r), in_words(r, on_policy=False), scale, *variances, "; ".join(notes(r)))
