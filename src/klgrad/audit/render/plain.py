"""Audit results as JSON and as a Markdown table."""

import json
import re
from collections.abc import Sequence

from ...support.atomic_files import finite
from ...targets import Verdict
from ..audit_result import AuditResult
from ..numbers import listed, percent
from ..problems import cases

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
    data = {"results": [r.to_dict() for r in results], "problems": [c.describe() for c in cases(on_policy=False)]}
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
    verdict = _verdict(r.verdict, r.nearest, r.bias)
    off = _verdict(r.verdict_off_policy, r.nearest_off_policy, r.bias_off_policy)
    scale = "" if r.scale is None or r.verdict == "unknown" else f"{r.scale:.3g}"
    return (r.name, verdict, off, scale, f"{r.variance:.3g}", f"{r.variance_near:.3g}", "; ".join(notes(r)))


def _verdict(verdict: Verdict, nearest: Verdict, bias: dict[Verdict, float]) -> str:
    return f"unknown ({percent(bias[nearest])} from {nearest})" if verdict == "unknown" else verdict


def notes(r: AuditResult, *, lengths: bool = True) -> list[str]:
    """Findings beside the verdict, in a few words each.

    Args:
        r: the audit of the loss.
        lengths: whether to include what varying lengths change.
    """
    found = []
    if not r.deterministic:
        found.append("not deterministic")
    if not r.depends_on_reference:
        found.append("ignores ref" if r.has_gradient else "no gradient")
    if r.length_sensitive and lengths:
        known = r.verdict_fixed_lengths != "unknown"
        found.append(f"length-sensitive (equal lengths: {r.verdict_fixed_lengths})" if known else "length-sensitive")
    if r.off_with:
        found.append(f"off with {listed(r.off_with)}")
    elif r.verdict == "unknown" != r.verdict_near:
        found.append(f"near ref: {r.verdict_near}")
    wrong, dead = r.float32_wrong_from, r.dead_zone_from
    if wrong is not None and (dead is None or abs(wrong) < abs(dead)):
        found.append(f"float32 fails from l = {wrong:g}")
    if dead is not None:
        found.append(f"dead from l = {dead:g}")
    if not r.finite:
        found.append("overflows")
    if r.touches_padding:
        found.append("touches padding")
    return found
