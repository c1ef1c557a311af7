"""Audit results as one page that needs nothing but itself: no network, no scripts, no fonts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from ..audit_result import AuditResult
from ..curve import Curve
from ..problems import in_words
from .card import card
from .index import index
from .parts import KINDS, bar, kind_of, mark
from .remedy import Fixes, framework_of, what_to_write

SHAPES = {
    "reverse": '<circle cx="8" cy="8" r="7.5"/><path class="ink" d="M4.4 8.3l2.5 2.5 4.7-5.4"/>',
    "forward": '<path d="M8 .3L15.7 8 8 15.7.3 8z"/><path class="ink" d="M4.8 8h6M8.4 5.4L11 8l-2.6 2.6"/>',
    "nothing": '<rect x="1" y="1" width="14" height="14" rx="2"/><path class="ink" d="M5 5l6 6M11 5l-6 6"/>',
    "unknown": '<path d="M8 .8L15.8 15H.2z"/><path class="ink" d="M8 5.6v4.6M8 12v1.2"/>',
}
"""A tick in a circle, an arrow in a diamond, a cross in a square, a triangle with a mark: told apart without colour."""

READING = f"""
<section class="reading" aria-labelledby="reading"><h2 id="reading">How to read this</h2>
<dl>
<div><dt>On-policy, off-policy</dt><dd>The gradient expected with samples of π itself, and with samples of another
policy. It is a sum over {in_words()}, in float64: there is no
noise in it.</dd></div>
<div><dt>Coefficient</dt><dd>Every sampled KL term puts a number on the score of each sampled token. The curve is that
number in float32 for one token of a group of three, the others held fixed, against the token’s log π/ref; both axes
are compressed away from 0. The thin line is log π/ref itself, which as a coefficient
descends the reverse KL; a constant shift from it is what the token’s neighbours add. Below 0 are tokens that ref likes
better than π does: where the curve is dead there, nothing pulls them back.</dd></div>
<div><dt>Distance</dt><dd>To the gradient of each target at the best positive scale, relative to the gradient’s own
size. On-policy some targets coincide.</dd></div>
<div><dt>Variance</dt><dd>Exact, of one completion’s gradient, at scale 1 where there is a target; averaged over the
standard problems, and over those near ref.</dd></div>
<div><dt>Dead zone</dt><dd>Advice names the first of the audit’s probes that is dead; the curve is measured more
closely.</dd></div>
</dl></section>"""


def to_html(
    results: Sequence[AuditResult],
    curves: Sequence[Curve],
    *,
    summaries: Sequence[str] = (),
    fixes: Fixes | None = None,
    tags: Mapping[str, str] | None = None,
) -> str:
    """One page, the same for the same results.

    Args:
        results: of the audit.
        curves: of `coefficient_curve`, one per result; an empty one is told as none.
        summaries: one line about each loss, if there are any.
        fixes: what to write, by framework.
        tags: a word for some of the losses, by name: `default`, say.
    """
    about = list(summaries) or [""] * len(results)
    fixes = fixes or {}
    anchors = [f"loss-{i}-{_slug(r.name)}" for i, r in enumerate(results, 1)]
    cards = "".join(card(*each, fixes) for each in zip(results, curves, anchors, about, strict=True))
    title, many = _title(results), len(results) > 1
    style = files(__package__ or "klgrad.audit").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{_marks()}
<header class="page"><p class="kicker">klgrad audit</p><h1>{title}</h1>
{_lead(results)}</header>
<main>
{_tally(results) if many else ""}
{what_to_write(fixes)}
{index(results, anchors, tags or {}) if many else ""}
<section class="cards" aria-labelledby="losses"><h2 id="losses">{"Each loss" if many else "The loss"}</h2>{cards}
</section>
{READING}
</main>
</body>
</html>
"""


def _marks() -> str:
    symbols = "".join(f'<symbol id="mark-{k}" viewBox="0 0 16 16">{shape}</symbol>' for k, shape in SHAPES.items())
    return f'<svg class="defs" aria-hidden="true" width="0" height="0">{symbols}</svg>'


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]


def _title(results: Sequence[AuditResult]) -> str:
    if len(results) == 1:
        return f"What {escape(results[0].name)} descends"
    frameworks = {framework_of(r) for r in results}
    if "" not in frameworks:
        return f"What {len(results)} settings of {escape(' and '.join(sorted(frameworks)))} descend"
    return f"What {len(results)} KL losses descend"


def _lead(results: Sequence[AuditResult]) -> str:
    """The headline: how many are what they are taken for."""
    total = len(results)
    on = sum(kind_of(r.verdict) == "reverse" for r in results)
    both = sum(kind_of(r.verdict) == kind_of(r.verdict_off_policy) == "reverse" for r in results)
    flawed = sum(r.dead_zone or not r.finite or r.float32_wrong_from is not None for r in results)
    if total == 1:
        return f'<p class="lead">{escape(results[0].advice)}</p>'
    still = "and none still does" if not both else f"and {both} {'does' if both == 1 else 'do'} so"
    what = "losses" if any(not framework_of(r) for r in results) else "settings"
    text = f"Of {total} {what}, {on or 'none'} {'descend' if on > 1 else 'descends'} the reverse KL from fresh samples"
    text += f", {still} from stale ones" if on else ""
    if flawed:
        text += f"; {flawed} {'has' if flawed == 1 else 'have'} a dead zone or trouble in float32"
    return f'<p class="lead">{text}.</p>'


def _tally(results: Sequence[AuditResult]) -> str:
    head = "".join(f'<th scope="col">{mark(kind)} {words}</th>' for kind, words in KINDS.items())
    sides = {"On-policy": [r.verdict for r in results], "Off-policy": [r.verdict_off_policy for r in results]}
    rows = []
    for where, verdicts in sides.items():
        counts = Counter(map(kind_of, verdicts))
        cells = "".join(f'<td class="{k}">{counts[k]}{bar(counts[k] / len(results))}</td>' for k in KINDS)
        rows.append(f'<tr><th scope="row">{where}</th>{cells}</tr>')
    squared = "squared-sequence" in sides["On-policy"] + sides["Off-policy"]
    hint = '<p class="hint">Reverse counts the squared log-ratio, which has the same optimum.</p>' if squared else ""
    return (
        '<section aria-labelledby="tally"><h2 id="tally">Verdicts</h2><table class="tally"><thead><tr>'
        f"<td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{hint}</section>"
    )
