"""What the audit says: verdicts in words, what was expected, and what to change."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..core.term import ImportanceWeighting, KLTerm, Remedy
from ..targets import TARGETS, UNCORRECTED, TargetName, Verdict
from ..zoo.cell import AFTER_DIVISION, K2_OR_TOKEN, TOKEN, TOKEN_RATIO
from .audit_result import Advice, AuditResult, LargeBatchResult
from .batch import Batch
from .gradients import evaluate
from .match import MATCH, Decomposition
from .numerics import probe_batch
from .problems import group_sizes
from .subject import Subject

# Numbers as text: a difference is never rounded away.


def percent(share: float) -> str:
    """A share in percent, with more digits if it is small, so that only 0 reads 0%."""
    if not math.isfinite(share):
        return "–"
    if share >= 0.01 or share <= 0:
        return f"{share:.0%}"
    return f"{share:.1%}" if share >= 0.0005 else f"{100 * share:.1g}%"


def outside(below: float | None, above: float | None, number: Callable[[float], str] = "{:.3g}".format) -> str:
    """A range that is open on one or both sides; `number` writes its ends. Empty if there is none.

    Example:
        >>> outside(-2.61, 11.0)
        'below -2.61 or above 11'
    """
    ends = (("below", below), ("above", above))
    return " or ".join(f"{word} {number(end)}" for word, end in ends if end is not None)


def at_and_beyond(log_ratio: float, number: Callable[[float], str] = "{:g}".format) -> str:
    """Where log π/ref has this value, or one farther from 0; `number` writes the value.

    Example:
        >>> at_and_beyond(-16)
        'where log π/ref is -16 or less'
    """
    return f"where log π/ref is {number(log_ratio)} or {'less' if log_ratio < 0 else 'more'}"


def apart(low: float, high: float, digits: int = 3) -> tuple[str, str]:
    """Two different numbers, with enough digits to tell them apart."""
    while f"{low:.{digits}g}" == f"{high:.{digits}g}" and digits < 17:
        digits += 1
    return f"{low:.{digits}g}", f"{high:.{digits}g}"


def listed(words: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# What a loss without a verdict descends on some of the problems: near ref, at equal lengths, or on most of them.

Where = Literal["most problems", "near ref", "near ref at equal lengths", "equal lengths"]


@dataclass(frozen=True)
class Partly:
    """A verdict that holds on some of the problems.

    Attributes:
        where: on which.
        verdict: the verdict there.
        limits: the same in words, with what is off elsewhere.
    """

    where: Where
    verdict: Verdict
    limits: str

    @property
    def words(self) -> str:
        """As a noun phrase."""
        return f"{TARGETS[self.verdict].title_in_sentence}, {self.limits}"

    @property
    def finding(self) -> str:
        """As what the loss does."""
        return f"{TARGETS[self.verdict].does}, {self.limits}"


def partly(r: AuditResult) -> Partly | None:
    """On which problems a loss without a verdict on fresh samples has one; None if there are none, or it has one."""
    if r.verdict != "unknown" or not (r.deterministic and r.finite_in_float64 and r.depends_on_reference):
        return None
    if r.verdict_standard not in ("unknown", "sum-of-targets") and r.off_with:
        return Partly("most problems", r.verdict_standard, f"but not with {listed(r.off_with)}")
    near, far = (percent(r.bias_by_distance[distance]) for distance in ("near", "far"))
    equal = "only if nothing is masked" if r.touches_padding or r.reads_masked else "at equal lengths only"
    if TARGETS[r.verdict_near].has_gradient:
        zone = outside(r.dead_below, r.dead_above)
        dead = f"; no gradient where log π/ref is {zone}" if zone else ""
        return Partly("near ref", r.verdict_near, f"near ref only ({far} off far from it{dead})")
    if r.length_sensitive and TARGETS[r.verdict_fixed_lengths].has_gradient:
        off = percent(r.bias_by_batch.get("limit", r.bias[r.nearest]))
        return Partly("equal lengths", r.verdict_fixed_lengths, f"{equal} ({off} off if not)")
    is_a_matter_of_lengths = r.divides_by_length or r.touches_padding or r.reads_masked
    if is_a_matter_of_lengths and TARGETS[r.verdict_near_fixed_lengths].has_gradient:
        off = f"{near} off near ref, {far} far from it"
        return Partly("near ref at equal lengths", r.verdict_near_fixed_lengths, f"near ref and {equal} ({off})")
    return None


# What an audit found, in words: shared by the advice, the terminal, Markdown and the page.

Standing = Literal["right", "large", "else", "nothing"]
"""How a loss stands as a reverse KL: it is one, it is one in large batches, it is something else, or it is nothing."""

STANDINGS: dict[Standing, str] = {
    "right": "The reverse KL",
    "large": "The reverse KL in large batches",
    "else": "Something else",
    "nothing": "Nothing",
}
"""The heading of each, in the order of a report."""


def standing(r: AuditResult) -> Standing:
    """How a loss stands on fresh samples."""
    target = TARGETS[r.verdict]
    if target.role == "nothing" or ignores_reference(r):
        return "nothing"
    if target.role != "reverse":
        return "else"
    return "large" if r.holds == "large-batches" else "right"


def ignores_reference(r: AuditResult) -> bool:
    """Whether the gradient is known not to depend on the reference; one that is not finite cannot be compared."""
    return r.finite_in_float64 and not r.depends_on_reference


def in_words(r: AuditResult, *, on_policy: bool = True) -> str:
    """What the loss descends, as a noun phrase, with the percentage by which it is off."""
    verdict = r.verdict if on_policy else r.verdict_off_policy
    found = r.decomposition if on_policy else r.decomposition_off_policy
    if verdict == "sum-of-targets" and found is not None:
        return in_sum(found)
    if verdict == "unknown":
        part = partly(r) if on_policy else None
        return part.words if part is not None else _without_verdict(r, on_policy=on_policy)
    holds = r.holds if on_policy else r.holds_off_policy
    off = f" ({small_batches(r)})" if on_policy and small_batches(r) else ""
    has_own_scale = r.scale_varies if on_policy else r.scale_varies_off_policy
    varies = ", at a scale that depends on the batch" if has_own_scale else ""
    large = f", in large batches{off}" if holds == "large-batches" else ""
    large = f", in batches of {group_sizes()} completions" if holds == "small-batches" else large
    return f"{TARGETS[verdict].title_in_sentence}{large}{varies}"


def _without_verdict(r: AuditResult, *, on_policy: bool) -> str:
    if not r.deterministic:
        return "no verdict: the same batch gives different gradients"
    if not r.finite_in_float64:
        return "no verdict: its gradient is NaN or infinite on some group"
    if on_policy and ignores_reference(r):
        return "no KL: its gradient is the same for every ref"
    return f"no known divergence ({nearest(r, on_policy=on_policy)})"


def in_sum(found: Decomposition) -> str:
    """A sum of two targets, such as "reverse KL, whole completions, minus forward KL, token by token"."""
    one, other = found.parts
    if other.scale is None:
        return f"{TARGETS[one.verdict].title_in_sentence}, plus a drift to or from the sampler"
    if TARGETS[one.verdict].climbed and not TARGETS[other.verdict].climbed:
        one, other = other, one
    first, second = TARGETS[one.verdict], TARGETS[other.verdict]
    sign = "minus" if second.climbed and not first.climbed else "plus"
    named = TARGETS[second.climbed] if second.climbed and sign == "minus" else second
    shares = [part.scale for part in (one, other) if part.scale is not None]
    equal = max(shares) - min(shares) <= SAME_SHARE * max(shares)
    return f"{first.title_in_sentence}, {sign} {'' if equal else 'a multiple of the '}{named.title_in_sentence}"


SAME_SHARE = 1e-3
"""Shares of a sum that differ by less, relatively, are shown as equal."""


def small_batches(r: AuditResult | LargeBatchResult) -> str:
    """By how much small batches are off, such as "9% off with 2 completions, 6% with 3"; empty if not at all."""
    if r.holds != "large-batches" or not r.bias_by_batch or r.scale_varies:
        return ""
    sizes = [(size, x) for size, x in r.bias_by_batch.items() if size != "limit"]
    first, *others = [f"{percent(x)}{' off' if i == 0 else ''} with {size}" for i, (size, x) in enumerate(sizes)]
    return ", ".join([f"{first} completions", *others])


def nearest(r: AuditResult, *, on_policy: bool = True) -> str:
    """The nearest target of an unknown verdict, with its distance near ref and far from it where these differ."""
    name: TargetName = r.nearest if on_policy else r.nearest_off_policy
    bias = (r.bias if on_policy else r.bias_off_policy)[name]
    by_distance = r.bias_by_distance if on_policy else {}
    if not by_distance or bias >= 1:
        return f"nearest: {TARGETS[name].title_in_sentence}, {percent(bias)} off"
    near, far = by_distance["near"], by_distance["far"]
    if near <= MATCH:
        return f"nearest: {TARGETS[name].title_in_sentence}, exact near ref and {percent(far)} off far from it"
    return f"nearest: {TARGETS[name].title_in_sentence}, {percent(near)} off near ref and {percent(far)} far from it"


def notes(r: AuditResult, *, lengths: bool = True) -> list[str]:
    """Findings beside the verdict, in a few words each.

    Args:
        r: the audit of the loss.
        lengths: whether to include what varying lengths change.
    """
    found = []
    if not r.deterministic:
        found.append("not deterministic")
    if ignores_reference(r):
        found.append("ignores ref" if r.has_gradient else "no gradient")
    part = partly(r)
    if r.length_sensitive and lengths and r.verdict == r.verdict_fixed_lengths == "unknown" and part is None:
        found.append("length-sensitive")
    if r.off_with and (part is None or part.where != "most problems"):
        found.append(f"off with {listed(r.off_with)}")
    if r.is_wrong_before_dead:
        found.append(f"float32 fails from l = {r.float32_wrong_from:g}")
    if r.dead_zone:
        found.append(f"dead for l {outside(r.dead_below, r.dead_above)}")
    if not r.finite:
        found.append("overflows")
    if r.touches_padding:
        found.append("touches padding")
    if r.reads_masked:
        found.append("reads masked positions")
    elif r.stumbles_over_gaps:
        found.append("masked gaps change it")
    if r.finite_if_empty is False:
        found.append("not finite if a completion is empty")
    if r.order_matters:
        found.append("order of rows matters")
    return found


# Recognise a KL in a reward that is whitened: centred, and divided by its standard deviation.

SCALE, SHIFT = -2.0, 5.0
"""What the log-ratios are multiplied by, and what is added to that of each first token, which changes its sign."""

SAME = 1e-2
"""Relative difference below which two gradients are opposite: 1e-4 is often added to the standard deviation."""


def whitens(subject: Subject) -> bool:
    """Whether the gradient only changes its sign when all log-ratios are multiplied by -2 and shifted.

    Args:
        subject: the loss.

    Returns:
        True for a loss that centres the KL and divides it by its spread; False also for a loss without a gradient.

    Example:
        >>> from klgrad import zoo
        >>> from klgrad.audit.subject import as_subject
        >>> whitens(as_subject(zoo.get("k1-reward-group-std"))), whitens(as_subject(zoo.get("k1-reward")))
        (True, False)
    """
    batch = _batch()
    log_ratio = SCALE * (batch.logp - batch.ref_logp).detach()
    log_ratio[:, 0] += SHIFT
    moved = replace(batch, ref_logp=batch.logp.detach() - log_ratio)
    before, after = (evaluate(subject, x)[1][0] for x in (batch, moved))
    return bool(before.abs().max() > 0) and bool((after + before).norm() < SAME * before.norm())


LOWER = 8.0
"""What is subtracted from all log-probs, so that the changed ones are log-probs too."""


def _batch() -> Batch:
    """One group of three completions, on-policy."""
    batch = probe_batch(0.0, torch.float64)
    names = ("logp", "ref_logp", "old_logp", "behavior_logp")
    return replace(batch, **{name: getattr(batch, name).detach() - LOWER for name in names}).fresh()


# From the findings of an audit to its advice.

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


# What is expected of a loss, for `klgrad audit --expect` and for `klgrad.testing.assert_descends`.

ON_POLICY: dict[Verdict, KLTerm] = {
    "reverse-kl-sequence": SEQUENCE,
    "reverse-kl-token": TOKEN,
    "forward-kl-token": KLTerm(divergence="forward", level="token", estimator="k3"),
    "forward-kl-sequence": KLTerm(divergence="forward", estimator="k3"),
}
"""A term for each on-policy verdict that a term has."""

OFF_POLICY: dict[Verdict, KLTerm] = {**STALE, "reverse-kl-token-sampler": TOKEN_RATIO}
"""The same off-policy."""


@dataclass(frozen=True)
class Difference:
    """One finding of an audit that is not as expected.

    Attributes:
        expected: what was expected.
        received: what was found.
        remedy: what to use for the verdict that was expected; None if it was no verdict, or one that no term has.
    """

    expected: str
    received: str
    remedy: Remedy | None = None

    def __str__(self) -> str:
        return f"expected {self.expected}, found {self.received}"


def differences(
    result: AuditResult, on_policy: Verdict | None = None, off_policy: Verdict | None = None, *, strict: bool = False
) -> list[Difference]:
    """Compare an audit with what is expected of the loss. One that is not deterministic meets no expectation.

    Args:
        result: the audit.
        on_policy: the expected verdict with samples from π. Where another target has the same gradient on-policy,
            either name will do.
        off_policy: the expected verdict with samples from another policy.
        strict: whether the verdict must hold in batches of every size, without a dead zone, and all must be finite.

    Returns:
        What differs; empty if nothing does.

    Example:
        >>> from klgrad.audit import audit, catalogue
        >>> from klgrad.audit.advice import differences
        >>> print(*differences(audit(catalogue()["k3-loss"]), "reverse-kl-token"))
        expected reverse-kl-token on-policy, found forward-kl-token
    """
    if not result.deterministic and (on_policy or off_policy or strict):
        return [Difference("a verdict", "none, since the same batch gives different gradients")]
    found = []
    if on_policy is not None:
        found += _verdict(TARGETS[on_policy].same_on_policy or on_policy, result.verdict, "on-policy", ON_POLICY)
    if off_policy is not None:
        found += _verdict(off_policy, result.verdict_off_policy, "off-policy", OFF_POLICY)
    if strict:
        off = small_batches(result)
        sides = [(result.verdict, result.holds, f", {off}" if off else "")]
        sides += [(f"{result.verdict_off_policy} off-policy", result.holds_off_policy, "")] if off_policy else []
        for verdict, holds, how in sides:
            if holds not in ("always", None):
                received = f"{verdict} in {holds.replace('-', ' ')} only{how}"
                found.append(Difference("a verdict that holds in batches of every size", received))
    if strict and (result.dead_zone or not result.finite):
        found.append(Difference("a finite gradient without a dead zone", ", ".join(notes(result))))
    if strict and (result.stumbles_over_gaps or result.finite_if_empty is False):
        found.append(Difference("the same gradient with masked gaps and empty completions", ", ".join(notes(result))))
    return found


def _verdict(wanted: Verdict, got: Verdict, where: str, terms: dict[Verdict, KLTerm]) -> list[Difference]:
    if wanted == got:
        return []
    remedy = Remedy(f"for {wanted} {where}", (terms[wanted],)) if wanted in terms else None
    return [Difference(f"{wanted} {where}", got, remedy)]


def remedies(result: AuditResult, found: list[Difference]) -> list[Remedy]:
    """What to do about the differences, most important first.

    The audit's replacements are those for the reverse KL. Where another target is expected, they would be wrong, and
    are used only if there is no term for it.

    Args:
        result: the audit.
        found: what differs.

    Returns:
        The remedies; none if the audit finds nothing wrong and no term has the expected verdict.
    """
    advised = [remedy for remedy in result.advice.remedies if remedy.do != KEEP_TARGET]
    repairs = [remedy for remedy in advised if not remedy.use]
    replacements = [difference.remedy for difference in found if difference.remedy is not None]
    return [*repairs, *replacements] or advised
