"""Audit results as one HTML page: `templates/page.html`, with the style sheet in it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files

from ...targets import TARGETS, Verdict
from ..audit_result import AuditResult
from ..curve import Curve
from ..problems import in_words
from .card import card_of
from .environment import environment
from .fixes import Fixes
from .index import groups_of


def to_html(
    results: Sequence[AuditResult],
    curves: Sequence[Curve],
    *,
    summaries: Sequence[str] = (),
    fixes: Fixes | None = None,
    tags: Mapping[str, str] | None = None,
    not_audited: Mapping[str, str] | None = None,
) -> str:
    """Render one page; the same results give the same page.

    Args:
        results: of the audit.
        curves: one `coefficient_curve` per result; an empty one is shown as "No curve".
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
        card_of(r, curve, anchor, summary, fixes.get(r.framework, ()))
        for r, curve, anchor, summary in zip(results, curves, anchors, about, strict=True)
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
            summed_over=in_words(),
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
    flawed = sum(r.dead_zone or not r.finite or r.float32_wrong_from is not None for r in results)
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
    """How many losses have each role, on-policy and off-policy."""
    sides: dict[str, list[Verdict]] = {
        "On-policy": [r.verdict for r in results],
        "Off-policy": [r.verdict_off_policy for r in results],
    }
    rows = {where: Counter(TARGETS[verdict].role for verdict in verdicts) for where, verdicts in sides.items()}
    has_squared = any(v.startswith("squared") for verdicts in sides.values() for v in verdicts)
    return {"rows": rows, "total": len(results), "has_squared": has_squared}
