"""The card of one loss."""

import math
from html import escape

from ...enumeration import TARGETS
from ..audit_result import AuditResult
from ..curve import Curve, dead_zones
from ..numbers import apart, listed, percent
from ..verdict import MATCH
from .chart import curve_svg
from .parts import SHORT, WORDS, bar, breakable, kind_of, mark, number, spoken
from .remedy import Fixes, advice


def card(r: AuditResult, curve: Curve, anchor: str, summary: str, fixes: Fixes) -> str:
    """Everything about one loss."""
    about = f'<p class="about">{escape(summary)}</p>' if summary else ""
    return f"""
<article class="card" id="{anchor}" aria-labelledby="{anchor}-name">
<header><h3 id="{anchor}-name">{breakable(r.name)}</h3>{about}</header>
<div class="verdicts">
{_verdict("On-policy", r)}
{_verdict("Off-policy", r)}
</div>
{advice(r, fixes)}
<div class="columns">
<section class="{kind_of(r.verdict)}"><h4>Coefficient on a sampled token</h4>{_curve(r, curve)}</section>
<section><h4>Distance to each target</h4>{_distances(r)}</section>
</div>
<section class="numbers"><h4>Numbers</h4><dl class="facts">{"".join(_facts(r, curve))}</dl></section>
</article>"""


def _verdict(where: str, r: AuditResult) -> str:
    on_policy = where == "On-policy"
    verdict = r.verdict if on_policy else r.verdict_off_policy
    kind = kind_of(verdict)
    title, sentence = WORDS[verdict]
    if verdict == "unknown":
        title, sentence = _unknown(r, on_policy)
    elif verdict == "nothing" and not r.has_gradient:
        sentence = "No gradient reaches the log-probs."
    return (
        f'<section class="verdict {kind}">{mark(kind)}<div><h4>{where}</h4>'
        f'<p class="title">{escape(title)}</p><p>{escape(sentence)}</p></div></section>'
    )


def _unknown(r: AuditResult, on_policy: bool) -> tuple[str, str]:
    nearest = r.nearest if on_policy else r.nearest_off_policy
    bias, cosine = (r.bias, r.cosine) if on_policy else (r.bias_off_policy, r.cosine_off_policy)
    name = spoken(nearest.replace("_", "-"))
    if not r.deterministic:
        return "No verdict", "The same batch gives different gradients."
    if not r.finite_in_float64:
        return "No verdict", "The gradient is not a finite number on some group."
    if cosine[nearest] < -0.999:
        return f"Climbs the {name}", "The sign is wrong."
    off = percent(bias[nearest])
    if on_policy and r.length_sensitive and r.verdict_fixed_lengths != "unknown":
        return f"{WORDS[r.verdict_fixed_lengths][0]}, at equal lengths only", f"When they vary: {off} off the {name}."
    if on_policy and r.off_with and r.verdict_standard != "unknown":
        return f"{WORDS[r.verdict_standard][0]}, but not always", f"With {listed(r.off_with)}: {off} off."
    return WORDS["unknown"][0], f"Nearest: {name}, {off} off."


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
    if r.off_with:
        found.append(("Off with", listed(r.off_with), True))
    elif r.verdict == "unknown" != r.verdict_near:
        found.append(("Near ref alone", WORDS[r.verdict_near][0].lower().replace("kl", "KL"), False))
    if not r.deterministic:
        found.append(("Deterministic", "no", True))
    return [
        f"<div><dt>{name}</dt><dd>{f'<strong>{text}</strong>' if amiss else text}</dd></div>"
        for name, text, amiss in found
    ]


def _scale(r: AuditResult) -> str:
    if r.verdict in ("nothing", "unknown") or r.scale is None:
        return "none without a target"
    if r.scale_range is None:
        return f"{number(r.scale)} × the target"
    low, high = apart(*r.scale_range)
    return f"{low} to {high} × the target, by the batch’s shape"


def _lengths(r: AuditResult) -> str:
    if not r.length_sensitive:
        return "do not change the verdict"
    return f"change the verdict; equal ones give: {WORDS[r.verdict_fixed_lengths][0]}"
