"""The card of one loss, and the words that a verdict is told in."""

import math
import re
from html import escape

from ..exact import TARGETS
from .chart import curve_svg
from .curve import Curve, dead_zones
from .result import AuditResult
from .verdict import MATCH

WORDS = {
    "reverse-kl-sequence": ("Reverse KL, whole completions", "The gradient of KL(π‖ref) between completions."),
    "reverse-kl-token": (
        "Reverse KL, token by token",
        "The gradient of KL(π‖ref) of each next token; what a token does to later ones is left out.",
    ),
    "reverse-kl-token-sampler": (
        "Reverse KL, token by token, on the sampler’s prefixes",
        "The gradient of KL(π‖ref) of each next token, at the prefixes that the sampler visits.",
    ),
    "forward-kl-token": (
        "Forward KL, token by token",
        "The gradient of KL(ref‖π) of each next token: another optimum than the reverse KL’s.",
    ),
    "forward-kl-sequence": (
        "Forward KL, whole completions",
        "The gradient of KL(ref‖π) between completions: another optimum than the reverse KL’s.",
    ),
    "squared-sequence": (
        "Squared log-ratio of the completion",
        "The gradient of its mean over the sampler’s completions, which has the reverse KL’s optimum.",
    ),
    "nothing": ("Nothing", "Zero in expectation: it regularises nothing."),
    "unknown": ("No known divergence", ""),
}
"""A verdict's title, and a sentence."""

SHORT = {
    "reverse-kl-sequence": "reverse, sequence",
    "reverse-kl-token": "reverse, token",
    "reverse-kl-token-sampler": "reverse, token (sampler)",
    "forward-kl-token": "forward, token",
    "forward-kl-sequence": "forward, sequence",
    "squared-sequence": "squared, sequence",
}
"""A target in a table's cell."""

KINDS = {"reverse": "reverse KL", "forward": "forward KL", "nothing": "nothing", "unknown": "unknown"}
"""The four colours, each with its shape, and what they stand for."""

STALE = {
    "reverse-kl-sequence": "KLTerm(sampler=OffPolicy('prefix', bound=None))",
    "reverse-kl-token": "KLTerm(level='token', sampler=OffPolicy('prefix', bound=None))",
    "forward-kl-token": (
        "KLTerm(divergence='forward', level='token', estimator='k3', sampler=OffPolicy('prefix', bound=None))"
    ),
    "forward-kl-sequence": "KLTerm(divergence='forward', estimator='k3', sampler=OffPolicy('sequence', bound=None))",
}
"""What has the same target when the samples are another policy's."""

TERM = re.compile(r"KLTerm\((?:[^()]|\([^()]*\))*\)")


def kind_of(verdict: str) -> str:
    """Which of `KINDS`; the squared log-ratio shares the reverse KL's optimum, and its colour."""
    if verdict in ("nothing", "unknown"):
        return verdict
    return "forward" if verdict.startswith("forward") else "reverse"


def mark(kind: str) -> str:
    """The kind's shape; the words beside it say what it means."""
    return f'<svg class="mark {kind}" aria-hidden="true" viewBox="0 0 16 16"><use href="#mark-{kind}"/></svg>'


def number(x: float | None, digits: int = 3) -> str:
    """For a reader; a dash for what is not a finite number."""
    if x is None or not math.isfinite(x):
        return '<span title="not a finite number">–</span>'
    return f"{x:.{digits}g}".replace("-", "−")


def card(r: AuditResult, curve: Curve, anchor: str, summary: str = "") -> str:
    """Everything about one loss."""
    about = f'<p class="about">{escape(summary)}</p>' if summary else ""
    return f"""
<article class="card" id="{anchor}" aria-labelledby="{anchor}-name">
<header><h3 id="{anchor}-name">{escape(r.name)}</h3>{about}</header>
<div class="verdicts">
{_verdict("On-policy", r.verdict, r.bias, r.cosine, r.nearest, r)}
{_verdict("Off-policy", r.verdict_off_policy, r.bias_off_policy, r.cosine_off_policy, r.nearest_off_policy, r)}
</div>
{_advice(r)}
<div class="columns">
<section class="{kind_of(r.verdict)}"><h4>Coefficient on a sampled token</h4>{_curve(r, curve)}</section>
<section><h4>Distance to each target</h4>{_distances(r)}</section>
</div>
<section class="numbers"><h4>Numbers</h4><dl class="facts">{"".join(_facts(r, curve))}</dl></section>
</article>"""


def _verdict(
    where: str, verdict: str, bias: dict[str, float], cosine: dict[str, float], nearest: str, r: AuditResult
) -> str:
    kind = kind_of(verdict)
    title, sentence = WORDS[verdict]
    if verdict == "unknown":
        title, sentence = _unknown(bias[nearest], cosine[nearest], nearest.replace("_", "-"), r)
    elif verdict == "nothing" and r.variance == 0:
        sentence = "No gradient reaches the log-probs."
    return (
        f'<section class="verdict {kind}">{mark(kind)}<div><h4>{where}</h4>'
        f'<p class="title">{escape(title)}</p><p>{escape(sentence)}</p></div></section>'
    )


def _unknown(bias: float, cosine: float, nearest: str, r: AuditResult) -> tuple[str, str]:
    name = WORDS[nearest][0]
    name = name[0].lower() + name[1:]
    if not r.deterministic:
        return "No verdict", "The same batch gives different gradients."
    if not math.isfinite(r.variance):
        return "No verdict", "The gradient is not a finite number on some group."
    if cosine < -0.999:
        return f"Climbs the {name}", "The sign is wrong."
    return WORDS["unknown"][0], f"Nearest: {name}, {percent(bias)} off."


def percent(share: float) -> str:
    """A share, with a digit more where it is small."""
    if not math.isfinite(share):
        return "–"
    return f"{share:.1%}" if share < 0.01 else f"{share:.0%}"


def _advice(r: AuditResult) -> str:
    text = TERM.sub(lambda m: f"<code>{m[0]}</code>", escape(r.advice, quote=False))
    lines = [("instead", term) for term in dict.fromkeys(TERM.findall(r.advice)) if "..." not in term]
    if r.verdict_off_policy == "unknown" and r.verdict in STALE and not any("sampler" in term for _, term in lines):
        lines.append(("the same, from stale samples", STALE[r.verdict]))
    code = "".join(f"<div><dt>{why}</dt><dd><code>{escape(term, quote=False)}</code></dd></div>" for why, term in lines)
    write = f'<p class="write">Write</p><dl class="code">{code}</dl>' if code else ""
    return f'<section class="advice"><h4>Advice</h4><p>{text}</p>{write}</section>'


def _curve(r: AuditResult, curve: Curve) -> str:
    if not curve:
        return (
            '<p class="none">No curve: it differentiates the KL over the whole vocabulary, so that part of its '
            "gradient is on tokens that were not sampled.</p>"
        )
    zones = " and ".join(spoken_zone(*zone) for zone in dead_zones(curve))
    keys = [
        _key('<path class="line" d="M1 5H21"/>', "this loss"),
        _key('<path class="sound" d="M1 5H21"/>', "sound: log π/ref itself"),
    ]
    if zones:
        swatch = '<rect class="dead" width="22" height="10"/><path class="hatch" d="M1 10L11 0M11 10L21 0"/>'
        keys.append(_key(swatch, f"no gradient {zones}"))
    if any(y is None for _, y in curve):
        keys.append("<li>gaps: not a finite number</li>")
    svg = curve_svg(r.name, curve, f"{r.name}: {f'no gradient {zones}' if zones else 'no dead zone'}")
    return f'<figure>{svg}<figcaption><ul class="keys">{"".join(keys)}</ul></figcaption></figure>'


def _key(swatch: str, text: str) -> str:
    return f'<li><svg class="key" aria-hidden="true" viewBox="0 0 22 10">{swatch}</svg>{text}</li>'


def spoken_zone(low: float, high: float) -> str:
    """A dead zone in words."""
    return f"below {number(high)}" if low < 0 else f"above {number(low)}"


def _distances(r: AuditResult) -> str:
    rows = "".join(
        f'<tr><th scope="row">{SHORT[name.replace("_", "-")]}</th>'
        f"{_distance(r.bias[name])}{_distance(r.bias_off_policy[name])}</tr>"
        for name in TARGETS
    )
    return (
        '<table class="bias"><thead><tr><th scope="col">target</th><th scope="col">on-policy</th>'
        f'<th scope="col">off-policy</th></tr></thead><tbody>{rows}</tbody></table>'
        '<p class="hint">0% is a match, 100% no likeness.</p>'
    )


def _distance(bias: float) -> str:
    if not math.isfinite(bias):
        return f"<td>{number(bias)}</td>"
    text = "match" if bias <= MATCH else percent(bias)
    return f'<td class="{"match" if bias <= MATCH else ""}">{text}{bar(bias)}</td>'


def bar(share: float) -> str:
    """A share of one as a bar, beside the number that says it."""
    rects = f'<rect class="track" width="100" height="6"/><rect width="{share * 100:.1f}" height="6"/>'
    return f'<svg class="bar" aria-hidden="true" viewBox="0 0 100 6" preserveAspectRatio="none">{rects}</svg>'


def _facts(r: AuditResult, curve: Curve) -> list[str]:
    """What was measured beside the verdict; what is amiss is in bold."""
    zones = [spoken_zone(*zone) for zone in dead_zones(curve)]
    if not zones and r.dead_zone_from is not None:
        zones = [f"from {number(r.dead_zone_from)} on"]
    wrong = r.float32_wrong_from
    found = [
        ("Variance", f"{number(r.variance)}, near ref {number(r.variance_near)}", False),
        ("Scale", _scale(r), False),
        ("Lengths", _lengths(r), r.length_sensitive),
        ("Dead zone", f"no gradient for log π/ref {' and '.join(zones)}" if zones else "none", bool(zones)),
        (
            "float32",
            "keeps its digits" if wrong is None else f"wrong from log π/ref = {number(wrong)} on",
            wrong is not None,
        ),
        ("Finite", "always" if r.finite else "overflows, or 0/0", not r.finite),
        ("Padding", "gets gradient" if r.touches_padding else "gets none", r.touches_padding),
        ("Depends on ref", "yes" if r.depends_on_reference else "no", not r.depends_on_reference),
    ]
    if r.verdict == "unknown" != r.verdict_near:
        found.append(("Near ref alone", WORDS[r.verdict_near][0].lower().replace("kl", "KL"), False))
    if not r.deterministic:
        found.append(("Deterministic", "no", True))
    return [
        f"<div><dt>{name}</dt><dd>{f'<strong>{text}</strong>' if amiss else text}</dd></div>"
        for name, text, amiss in found
    ]


def _scale(r: AuditResult) -> str:
    scales = list(r.scale_by_shape.values())
    if r.verdict in ("nothing", "unknown") or not scales:
        return "none without a target"
    if max(scales) - min(scales) <= 1e-6 * max(map(abs, scales)):
        return f"{number(scales[0])} × the target"
    return f"{number(min(scales))} to {number(max(scales))} × the target, by the batch’s shape"


def _lengths(r: AuditResult) -> str:
    if not r.length_sensitive:
        return "do not change the verdict"
    return f"change the verdict; equal ones give: {WORDS[r.verdict_fixed_lengths][0]}"
