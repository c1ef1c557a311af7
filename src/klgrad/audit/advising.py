"""From the findings of an audit to its advice."""

from ..core.term import ImportanceWeighting, KLTerm
from ..remedies import Remedy
from ..targets import TARGETS, Verdict
from ..zoo.replacements import AFTER_DIVISION, K2_OR_TOKEN, TOKEN
from .advice import Advice
from .audit_result import AuditResult
from .numbers import apart, listed, percent
from .subject import Subject
from .whitening import whitens

SEQUENCE = KLTerm()

INSTEAD: dict[Verdict, Remedy] = {
    "nothing": K2_OR_TOKEN,
    "forward-kl-token": Remedy("for the reverse KL", (TOKEN,)),
    "forward-kl-sequence": Remedy("for the reverse KL", (SEQUENCE,)),
    "unknown": Remedy(use=(TOKEN, SEQUENCE), why="whichever KL is meant"),
}
"""By on-policy verdict, what to do about a loss without a remedy of its own."""

PREFIX = ImportanceWeighting("prefix", bound=None)

STALE: dict[Verdict, KLTerm] = {
    "reverse-kl-sequence": KLTerm(weighting=PREFIX),
    "reverse-kl-token": KLTerm(level="token", weighting=PREFIX),
    "forward-kl-token": KLTerm(divergence="forward", level="token", estimator="k3", weighting=PREFIX),
    "forward-kl-sequence": KLTerm(
        divergence="forward", estimator="k3", weighting=ImportanceWeighting("sequence", bound=None)
    ),
}
"""By on-policy verdict, a term that has the same target with samples from another policy too."""

NOT_DETERMINISTIC = Remedy("audit it in evaluation mode, without dropout or random state")
NOT_FINITE = Remedy("add a small constant to what it divides by")
WRONG_SIGN = Remedy("return the quantity to minimise")
LENGTHS = Remedy("sum over the completion, or audit it with --lengths equal")
KEEP_TARGET = "for the same target off-policy"

OPPOSITE = -0.999
"""A cosine below this is that of a loss with the wrong sign."""


def advise(result: AuditResult, subject: Subject) -> Advice:
    """Turn the findings into advice.

    Args:
        result: the audit of the loss, without advice.
        subject: the loss, which may have a remedy of its own.

    Returns:
        The main finding, warnings, and remedies.
    """
    remedies = _remedies(result, subject)
    return Advice(_finding(result), tuple(_warnings(result)), (*remedies, *_for_stale_samples(result, remedies)))


def _remedies(result: AuditResult, subject: Subject) -> tuple[Remedy, ...]:
    if not result.deterministic:
        return (NOT_DETERMINISTIC,)
    if not result.finite_in_float64:
        return (NOT_FINITE,)
    if subject.instead is not None:
        return (subject.instead,)
    if climbs(result):
        return (WRONG_SIGN,)
    if subject.kind == "term":  # a term that is no target's gradient declares a compromise
        return ()
    if not result.depends_on_reference:
        return (INSTEAD["nothing"],)
    if result.verdict == "unknown" and whitens(subject):
        return (AFTER_DIVISION,)
    if result.length_sensitive:
        known = INSTEAD.get(result.verdict_fixed_lengths)
        return (LENGTHS, known) if known else (LENGTHS,)
    return (INSTEAD[result.verdict],) if result.verdict in INSTEAD else ()


def _for_stale_samples(result: AuditResult, others: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    weighted = any(term.weighting is not None for remedy in others for term in remedy.terms)
    if result.verdict_off_policy != "unknown" or result.verdict not in STALE or not result.deterministic or weighted:
        return ()
    return (Remedy(KEEP_TARGET, (STALE[result.verdict],)),)


def climbs(result: AuditResult) -> bool:
    """Whether the loss is a target's gradient with the wrong sign."""
    return result.verdict == "unknown" and result.cosine[result.nearest] < OPPOSITE


def _finding(result: AuditResult) -> str:
    if not result.deterministic:
        return "is not deterministic: the same batch gives different gradients, so there is no verdict"
    if not result.finite_in_float64:
        return "gives NaN or inf in float64 on some group (perhaps one of equal completions, with a deviation of 0)"
    if result.verdict == "nothing" or not result.depends_on_reference:
        if not result.has_gradient:
            return "regularises nothing: no gradient reaches the log-probs"
        if result.depends_on_reference:
            return "regularises nothing: its gradient is zero in expectation"
        return "regularises nothing: its gradient is the same for every reference"
    if result.verdict != "unknown":
        return f"descends {TARGETS[result.verdict].phrase}"
    nearest, off = TARGETS[result.nearest].phrase, percent(result.bias[result.nearest])
    if climbs(result):
        return f"climbs {nearest}: the sign is wrong"
    at_equal, standard = TARGETS[result.verdict_fixed_lengths], TARGETS[result.verdict_standard]
    if result.length_sensitive and at_equal.has_gradient:
        return f"descends {at_equal.phrase} only if all completions have the same length"
    if standard.has_gradient:
        return f"descends {standard.phrase} on most problems, but not with {listed(result.off_with)} ({off} off)"
    declared = "is a declared compromise" if result.kind == "term" else f"descends {TARGETS['unknown'].phrase}"
    return f"{declared} (nearest, {off} off: {nearest})"


def _warnings(result: AuditResult) -> list[str]:
    if not result.deterministic or not result.finite_in_float64:
        return []
    found = []
    matched = TARGETS[result.verdict].has_gradient
    if matched and result.scale_range:
        low, high = apart(*result.scale_range)
        found.append(f"its strength depends on the shape of the batch ({low} to {high} x)")
    wrong, dead = result.float32_wrong_from, result.dead_zone_from
    if wrong is not None and (dead is None or abs(wrong) < abs(dead)):
        found.append(f"in float32 it is wrong from log π/ref = {wrong:g} on")
    if dead is not None:
        found.append(f"it has no gradient from log π/ref = {dead:g} on")
    if not result.finite:
        found.append("it overflows in float32")
    if result.touches_padding:
        found.append("it puts gradient on masked positions")
    if matched and result.verdict_off_policy == "unknown":
        found.append(f"off-policy it descends {TARGETS['unknown'].phrase}")
    return found
