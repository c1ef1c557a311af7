"""One sentence of advice: what the loss does, and the sound alternative."""

from .result import AuditResult
from .subject import Subject

SPOKEN = {
    "reverse-kl-sequence": "the reverse KL between completions",
    "reverse-kl-token": "the token-level reverse KL (prefixes held fixed)",
    "reverse-kl-token-sampler": "the token-level reverse KL on the sampler's prefixes",
    "forward-kl-token": "the token-level forward KL",
    "forward-kl-sequence": "the forward KL between completions",
    "squared-sequence": "the squared sequence log-ratio",
}

INSTEAD = {
    "nothing": "differentiate k2, or use KLTerm(level='token')",
    "forward-kl-token": "for the reverse KL use KLTerm(level='token')",
    "forward-kl-sequence": "for the reverse KL use KLTerm()",
    "unknown": "use KLTerm(level='token') or KLTerm(), whichever was meant",
}


def advise(result: AuditResult, subject: Subject) -> str:
    """The sentence."""
    sentence = "; ".join([_main(result), *_warnings(result)])
    instead = subject.instead or ("" if subject.kind == "term" else INSTEAD.get(result.verdict, ""))
    if not instead and result.verdict != "unknown" and result.verdict_off_policy == "unknown":
        instead = "for stale data say KLTerm(sampler=OffPolicy(...))"
    return f"{sentence[0].upper()}{sentence[1:]}{f': {instead}' if instead else ''}."


def _main(result: AuditResult) -> str:
    if result.verdict == "nothing":
        if result.variance == 0:
            return "regularises nothing, for no gradient reaches the log-probs"
        why = "zero in expectation" + ("" if result.depends_on_reference else ", whatever the reference is")
        return f"regularises nothing, for its gradient is {why}"
    if result.verdict != "unknown":
        return f"descends {SPOKEN[result.verdict]}"
    nearest = SPOKEN[result.nearest.replace("_", "-")]
    if result.cosine[result.nearest] < -0.999:
        return f"climbs {nearest}: the sign is wrong"
    declared = "by declaration a compromise" if result.kind == "term" else "descends no known target"
    return f"{declared} (nearest, {result.bias[result.nearest]:.0%} off: {nearest})"


def _warnings(result: AuditResult) -> list[str]:
    found = []
    scales = list(result.scale_by_shape.values())
    if result.verdict not in ("nothing", "unknown") and max(scales) - min(scales) > 1e-6 * max(scales):
        found.append(f"its strength depends on the batch's shape ({min(scales):.3g} to {max(scales):.3g} x)")
    if result.length_sensitive:
        at_equal = SPOKEN.get(result.verdict_fixed_lengths, "no known target")
        found.append(f"lengths change that (were all equal: {at_equal})")
    if result.dead_zone_from is not None:
        found.append(f"no gradient from log π/ref = {result.dead_zone_from:g} on")
    elif result.float32_wrong_from is not None:
        found.append(f"float32 loses it from log π/ref = {result.float32_wrong_from:g} on")
    if not result.finite:
        found.append("overflows in float32")
    if result.touches_padding:
        found.append("puts gradient on masked positions")
    if result.verdict_off_policy == "unknown" and result.verdict not in ("nothing", "unknown"):
        found.append("off-policy it descends no known target")
    return found
