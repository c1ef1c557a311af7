"""The index of the page: what `templates/index.html` shows, one row per loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...targets import TARGETS, Target
from ..audit_result import AuditResult
from ..partly import partly
from ..problems import group_sizes
from ..words import in_sum, nearest, notes, small_batches
from .plain import KIND_TITLES

Settings = list[tuple[str, str]]
"""Key and value of each setting; the key is empty for a word without `=`."""


@dataclass(frozen=True)
class Side:
    """A verdict of a row; `detail` has the nearest target of an unknown one."""

    where: str
    target: Target
    detail: str


@dataclass(frozen=True)
class Row:
    """One loss."""

    result: AuditResult
    anchor: str
    tag: str
    settings: Settings
    sides: tuple[Side, Side]
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
        group.rows.append(Row(r, anchor, tags.get(r.name, ""), settings, _sides(r), _notes(r)))
    return list(found.values())


def split_name(name: str) -> tuple[str, Settings]:
    """The words before the first `key=value`, and the settings from there on.

    In a table of many settings the values are what differs, so they are set off from their keys.
    """
    words = name.split(" ")
    first = next((i for i, word in enumerate(words) if "=" in word), len(words))
    pairs = [word.partition("=") for word in words[first:]]
    return " ".join(words[:first]), [(key, value) if equals else ("", key) for key, equals, value in pairs]


def _sides(r: AuditResult) -> tuple[Side, Side]:
    return (
        Side("on-policy", TARGETS[r.verdict], _detail(r, on_policy=True)),
        Side("off-policy", TARGETS[r.verdict_off_policy], _detail(r, on_policy=False)),
    )


def _detail(r: AuditResult, *, on_policy: bool) -> str:
    verdict = r.verdict if on_policy else r.verdict_off_policy
    found = r.decomposition if on_policy else r.decomposition_off_policy
    if verdict == "sum-of-targets" and found is not None:
        return in_sum(found)
    if (r.holds if on_policy else r.holds_off_policy) == "large-batches":
        off = small_batches(r) if on_policy else ""
        return f"in large batches; {off}" if off else "in large batches"
    if (r.holds if on_policy else r.holds_off_policy) == "small-batches":
        return f"in batches of {group_sizes()} completions"
    if verdict != "unknown":
        return ""
    part = partly(r) if on_policy else None
    if part is not None:
        return part.words
    return nearest(r, on_policy=on_policy)


def _notes(r: AuditResult) -> str:
    """The notes, without those that the verdict column includes; a non-breaking space keeps an equation on one line."""
    shown_with_verdict = r.verdict == "unknown" != r.verdict_fixed_lengths
    return "; ".join(notes(r, lengths=not shown_with_verdict)).replace(" = ", "\u00a0=\u00a0")
