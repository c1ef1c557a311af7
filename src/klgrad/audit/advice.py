"""One sentence of advice: what the loss does, and the sound alternative."""

from .audit_result import AuditResult
from .numbers import apart, listed, percent
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


STALE = "for stale data say KLTerm(weighting=ImportanceWeighting(...))"


def advise(result: AuditResult, subject: Subject) -> str:
    """The sentence."""
    sentence = "; ".join([_main(result), *_warnings(result)])
    instead = _instead(result, subject)
    return f"{sentence[0].upper()}{sentence[1:]}{f': {instead}' if instead else ''}."


def _instead(result: AuditResult, subject: Subject) -> str:
    if not result.deterministic:
        return "audit it in evaluation mode, without dropout or random state"
    if not result.finite_in_float64:
        return "add a small constant to what it divides by"
    if subject.instead or _climbs(result):
        return subject.instead or "return what is to be minimised"
    if subject.kind == "term":
        return STALE if result.verdict != "unknown" and result.verdict_off_policy == "unknown" else ""
    if not result.depends_on_reference:
        return INSTEAD["nothing"]
    if result.length_sensitive:
        sum_up = "sum over the completion instead, or audit it with --lengths equal"
        return "; ".join(filter(None, [sum_up, INSTEAD.get(result.verdict_fixed_lengths, "")]))
    if result.verdict in INSTEAD:
        return INSTEAD[result.verdict]
    return STALE if result.verdict_off_policy == "unknown" else ""


def _climbs(result: AuditResult) -> bool:
    return result.verdict == "unknown" and result.cosine[result.nearest] < -0.999


def _main(result: AuditResult) -> str:
    if not result.deterministic:
        return "is not deterministic: the same batch gives different gradients, and no verdict holds"
    if not result.finite_in_float64:
        return "gives NaN or inf in float64 on some group (completions that are all alike, a deviation of 0?)"
    if result.verdict == "nothing" or not result.depends_on_reference:
        if not result.has_gradient:
            return "regularises nothing, for no gradient reaches the log-probs"
        if result.depends_on_reference:
            return "regularises nothing, for its gradient is zero in expectation"
        return "regularises nothing: its gradient is the same whatever the reference is"
    if result.verdict != "unknown":
        return f"descends {SPOKEN[result.verdict]}"
    nearest = SPOKEN[result.nearest.replace("_", "-")]
    if _climbs(result):
        return f"climbs {nearest}: the sign is wrong"
    if result.length_sensitive and result.verdict_fixed_lengths in SPOKEN:
        at_equal = SPOKEN[result.verdict_fixed_lengths]
        return f"descends {at_equal} if all completions are equally long, and is off when lengths vary"
    if result.verdict_standard in SPOKEN:
        what, off = SPOKEN[result.verdict_standard], percent(result.bias[result.nearest])
        return f"descends {what} on most problems, but not with {listed(result.off_with)} ({off} off)"
    declared = "by declaration a compromise" if result.kind == "term" else "descends no known target"
    return f"{declared} (nearest, {percent(result.bias[result.nearest])} off: {nearest})"


def _warnings(result: AuditResult) -> list[str]:
    if not result.deterministic or not result.finite_in_float64:
        return []
    found = []
    if result.verdict not in ("nothing", "unknown") and result.scale_range:
        low, high = apart(*result.scale_range)
        found.append(f"its strength depends on the batch's shape ({low} to {high} x)")
    wrong, dead = result.float32_wrong_from, result.dead_zone_from
    if wrong is not None and (dead is None or abs(wrong) < abs(dead)):
        found.append(f"float32 loses it from log π/ref = {wrong:g} on")
    if dead is not None:
        found.append(f"no gradient from log π/ref = {dead:g} on")
    if not result.finite:
        found.append("overflows in float32")
    if result.touches_padding:
        found.append("puts gradient on masked positions")
    if result.verdict_off_policy == "unknown" and result.verdict not in ("nothing", "unknown"):
        found.append("off-policy it descends no known target")
    return found
