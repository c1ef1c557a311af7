"""What to write instead: a framework's own lines where it is one, a `KLTerm` elsewhere."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..audit_result import AuditResult
from .parts import WORDS, code_block, spoken, verdict_line

STALE = {
    "reverse-kl-sequence": "KLTerm(weighting=ImportanceWeighting('prefix', bound=None))",
    "reverse-kl-token": "KLTerm(level='token', weighting=ImportanceWeighting('prefix', bound=None))",
    "forward-kl-token": (
        "KLTerm(divergence='forward', level='token', estimator='k3', "
        "weighting=ImportanceWeighting('prefix', bound=None))"
    ),
    "forward-kl-sequence": (
        "KLTerm(divergence='forward', estimator='k3', weighting=ImportanceWeighting('sequence', bound=None))"
    ),
}
"""What has the same target when the samples are another policy's."""

TERM = re.compile(r"KLTerm\((?:[^()]|\([^()]*\))*\)")


@dataclass(frozen=True)
class Fix:
    """What to write to descend a target, in a framework's own words.

    Attributes:
        target: the verdict that is wanted.
        lines: to copy: configuration, or code where no setting says it.
        on_policy, off_policy: what they descend.
        subject: the audited loss that they set; empty for code.
        place: where the code goes; empty for configuration.
        note: what else to know.
    """

    target: str
    lines: str
    on_policy: str
    off_policy: str
    subject: str = ""
    place: str = ""
    note: str = ""


Fixes = Mapping[str, Sequence[Fix]]
"""By framework."""


def framework_of(r: AuditResult) -> str:
    """The framework whose setting this is; empty for other losses."""
    return r.name.split(" ")[0] if r.kind == "framework" else ""


def what_to_write(fixes: Fixes) -> str:
    """A section per framework, with a panel per target."""
    found = []
    for framework, each in fixes.items():
        name, anchor = escape(framework), f"write-{escape(framework)}"
        panels = "".join(f'<article class="fix"><h3>{_heading(fix)}</h3>{_lines(fix)}</article>' for fix in each)
        title = f'<h2 id="{anchor}">What to write in {name}</h2>'
        found.append(f'<section aria-labelledby="{anchor}">{title}<div class="fixes">{panels}</div></section>')
    return "".join(found)


def _heading(fix: Fix) -> str:
    how = ", in code" if fix.place else "" if fix.on_policy == fix.target else ", nearest setting"
    return WORDS[fix.target][0] + how


def advice(r: AuditResult, fixes: Fixes) -> str:
    """The sentence, and below it what to copy."""
    text = TERM.sub(lambda m: f"<code>{m[0]}</code>", escape(r.advice, quote=False))
    framework = framework_of(r)
    write = _own_lines(r, framework, fixes[framework]) if fixes.get(framework) else _terms(r)
    return f'<section class="advice"><h4>Advice</h4><p>{text}</p>{write}</section>'


def _own_lines(r: AuditResult, framework: str, fixes: Sequence[Fix]) -> str:
    """The framework's lines for the reverse KL that this comes nearest to; or a word that it is them already."""
    more = f'<p class="hint"><a href="#write-{escape(framework)}">Lines for other targets</a></p>'
    for fix in fixes:
        if fix.subject == r.name and fix.on_policy == fix.target:
            return f'<p class="write">These are its lines, for the {spoken(fix.target)}</p>{_lines(fix)}{more}'
    level = "sequence" if "sequence" in _nearest(r) else "token"
    wanted = [f for f in fixes if f.target == f"reverse-kl-{level}" and f.subject != r.name] or list(fixes)
    right = [f for f in wanted if f.on_policy == f.target and not f.place]
    found = "".join(f'<p class="write">{_why(f)}</p>{_lines(f)}' for f in right[:1] or wanted)
    return found + more


def _nearest(r: AuditResult) -> str:
    """What is meant, most likely; what descends nothing is mostly a token's term that was differentiated."""
    near = r.verdict_fixed_lengths if r.length_sensitive else r.verdict
    return r.nearest if near == "unknown" else near


def _why(fix: Fix) -> str:
    if fix.place:
        return f"For the {spoken(fix.target)} on every batch, in code"
    return f"For the {spoken(fix.target)}, " + ("write" if fix.on_policy == fix.target else "the nearest setting")


def _lines(fix: Fix) -> str:
    place = f'<p class="hint">No setting says it; in {escape(fix.place)}:</p>' if fix.place else ""
    note = f'<p class="hint">{escape(fix.note)}</p>' if fix.note else ""
    descends = verdict_line(fix.on_policy, "on-policy") + verdict_line(fix.off_policy, "off-policy")
    return f'{place}{code_block(fix.lines)}<p class="descends">{descends}</p>{note}'


def _terms(r: AuditResult) -> str:
    lines = [("instead", term) for term in dict.fromkeys(TERM.findall(r.advice)) if "..." not in term]
    if r.verdict_off_policy == "unknown" and r.verdict in STALE and not any("weighting" in term for _, term in lines):
        lines.append(("the same, from stale samples", STALE[r.verdict]))
    code = "".join(f"<div><dt>{why}</dt><dd><code>{escape(term, quote=False)}</code></dd></div>" for why, term in lines)
    return f'<p class="write">Write</p><dl class="code">{code}</dl>' if code else ""
