"""From the findings of an audit to its advice."""

from ..core.term import ImportanceWeighting, KLTerm
from ..remedies import Remedy
from ..targets import TARGETS, UNCORRECTED, Verdict
from ..zoo.replacements import AFTER_DIVISION, K2_OR_TOKEN, TOKEN
from .advice import Advice
from .audit_result import AuditResult
from .numbers import apart, at_and_beyond, outside
from .partly import partly
from .problems import group_sizes
from .subject import Subject
from .whitening import whitens
from .words import in_sum, nearest, small_batches

SEQUENCE = KLTerm()

INSTEAD: dict[Verdict, Remedy] = {
    "nothing": K2_OR_TOKEN,
    "forward-kl-token": Remedy("for the reverse KL", (TOKEN,)),
    "forward-kl-sequence": Remedy("for the reverse KL", (SEQUENCE,)),
    "sum-of-targets": Remedy(use=(TOKEN, SEQUENCE), why="whichever KL is meant"),
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
MASKED = Remedy("multiply each token's value by the mask before it is summed, as in (kl * mask).sum()")
LENGTHS = Remedy("divide by a constant or by all tokens of the batch, not by the length of each completion")
KEEP_TARGET = "for the same target off-policy"


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
    if result.verdict == "unknown":
        return _where_unknown(result)
    return (INSTEAD[result.verdict],) if result.verdict in INSTEAD else ()


def _where_unknown(result: AuditResult) -> tuple[Remedy, ...]:
    part = partly(result)
    if part is not None and TARGETS[part.verdict].climbed:
        return (WRONG_SIGN,)
    if part is not None and part.verdict == "nothing":
        return (INSTEAD["nothing"],)
    known = INSTEAD.get(result.verdict_fixed_lengths)
    others = (known,) if known else ()
    if result.touches_padding or result.reads_masked:
        return (MASKED, *others)
    if result.divides_by_length:
        return (LENGTHS, *others)
    return (INSTEAD["unknown"],)


def _for_stale_samples(result: AuditResult, others: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    weighted = any(term.weighting is not None for remedy in others for term in remedy.terms)
    if not _lost_when_stale(result) or result.verdict not in STALE or not result.deterministic or weighted:
        return ()
    return (Remedy(KEEP_TARGET, (STALE[result.verdict],)),)


def _lost_when_stale(result: AuditResult) -> bool:
    """Whether stale samples leave no KL."""
    verdict = result.verdict_off_policy
    return not TARGETS[verdict].has_gradient or verdict in UNCORRECTED


def climbs(result: AuditResult) -> bool:
    """Whether the loss is a target's gradient with the wrong sign."""
    return TARGETS[result.verdict].climbed is not None


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
    if climbs(result):
        return f"{TARGETS[result.verdict].does}: the sign is wrong"
    if result.verdict == "sum-of-targets" and result.decomposition is not None:
        return f"descends a sum: {in_sum(result.decomposition)}"
    if result.verdict != "unknown":
        return TARGETS[result.verdict].does + _in_large_batches(result)
    return _unknown(result)


def _in_large_batches(result: AuditResult) -> str:
    if result.scale_varies:
        return " in large batches, at a scale that depends on the spread of the batch"
    off = small_batches(result)
    return f" in large batches; small ones are biased ({off})" if off else ""


def _unknown(result: AuditResult) -> str:
    part = partly(result)
    if part is not None:
        return part.finding
    declared = "is a declared compromise" if result.kind == "term" else f"descends {TARGETS['unknown'].phrase}"
    return f"{declared} ({nearest(result)})"


def _warnings(result: AuditResult) -> list[str]:
    if not result.deterministic or not result.finite_in_float64:
        return []
    found = []
    matched = TARGETS[result.verdict].has_gradient
    if matched and result.scale_range and not result.scale_varies:
        low, high = apart(*result.scale_range)
        found.append(f"its strength depends on the shape of the batch ({low} to {high} x)")
    if result.is_wrong_before_dead:
        found.append(f"in float32 it is wrong {at_and_beyond(result.float32_wrong_from or 0.0)}")
    part = partly(result)
    if result.dead_zone and (part is None or part.where != "near ref"):
        found.append(f"it has no gradient where log π/ref is {outside(result.dead_below, result.dead_above)}")
    if not result.finite:
        found.append("it overflows in float32")
    if result.touches_padding:
        found.append("it puts gradient on masked positions")
    if result.reads_masked:
        found.append("the values at masked positions change its gradient")
    elif result.stumbles_over_gaps:
        found.append("masked positions inside a completion, such as the output of a tool, change its gradient")
    if result.finite_if_empty is False:
        found.append("it is no finite number if a completion is empty")
    if result.order_matters:
        found.append(
            "the order of the rows changes its gradient, "
            f"so this is said of batches of {group_sizes()} completions only"
        )
    if matched or result.verdict == "nothing":
        found += _on_stale_samples(result)
    return found


def _on_stale_samples(result: AuditResult) -> list[str]:
    stale, parts = TARGETS[result.verdict_off_policy], result.decomposition_off_policy
    if stale.name == "sum-of-targets" and parts is not None:
        return [f"on stale samples it descends a sum: {in_sum(parts)}"]
    if stale.anchor == "sampler" or (_lost_when_stale(result) and stale.name != "nothing"):
        return [f"on stale samples it {stale.does}"]
    return []
