"""Results of an audit, in batches of every size, and the advice that comes with them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal, cast

from ..core.term import Piece, Remedy, capitalised, joined
from ..targets import TO_REFERENCE, WITH_GRADIENT, TargetName, Verdict, signed
from .anatomy import Anatomy
from .batch import Advantages, advantage_of
from .gradients import BATCH_SIZES, Measurement, at_batch_size, expected_gradient, is_small, limit_cases, limit_gradient
from .match import MATCH, Comparison, Decomposition
from .problems import Case
from .subject import Kind, Subject, as_subject

# The advice of an audit, as data.


@dataclass(frozen=True)
class Advice:
    """What a loss does, what to beware of, and what to do about it.

    Attributes:
        finding: what the loss does, as the predicate of a sentence: "descends the token-level forward KL".
        warnings: further findings, in the same form.
        remedies: what to do, most important first; empty for a sound loss.
    """

    finding: str = ""
    warnings: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def pieces(self) -> list[Piece]:
        """The advice in sentences, with code marked as such."""
        findings = capitalised("; ".join([self.finding, *self.warnings]))
        found = [Piece(f"{findings}.")] if findings else []
        for remedy in self.remedies:
            found += [Piece(" "), *remedy.pieces]
        return found

    def __str__(self) -> str:
        return joined(self.pieces)


# Small batches and the limit of large ones side by side: the verdict, and for which batches it holds.

Holds = Literal["always", "large-batches", "small-batches"]
"""Whether a verdict holds in batches of every size, in the limit of large ones only, or in batches of 2, 3 and 4
completions, where the order of the rows matters and larger batches are not audited."""

NEAR_SUM = 0.1
"""A sum of two targets that leaves a larger remainder explains too little to be reported."""


@dataclass(frozen=True, eq=False)
class AtEverySize:
    """The gradients of a loss in small batches and in the limit.

    Attributes:
        small: batches of one group of 2, 3 or 4 completions.
        limit: batches with every group as often as it is likely.
        pairs: makes the gradients on the limit's problems in batches of 2 completions; they are computed only if they
            are needed.
        order_matters: whether the order of the groups of a large batch changes the gradient. The limit lists them in
            an order in which nobody draws them, so small batches decide.
    """

    small: Comparison
    limit: Comparison
    pairs: Callable[[], Comparison]
    order_matters: bool = False

    def only(self, keep: Callable[[Case], bool]) -> "AtEverySize":
        """The same on some of the problems."""
        pairs = lambda: self._pairs.only(keep)
        return AtEverySize(self.small.only(keep), self.limit.only(keep), pairs, self.order_matters)

    @cached_property
    def _pairs(self) -> Comparison:
        return self.pairs()

    @cached_property
    def verdict(self) -> Verdict:
        """That of the limit, if no problem in small batches contradicts it."""
        if not self.small.is_finite or self._is_clipped_away:
            return "unknown"
        if self.order_matters:
            return self.small.verdict
        found = self._of_limit
        if found == "unknown" or self._is_contradicted or not self._is_a_matter_of_size(found):
            return "unknown"
        return found

    @cached_property
    def _of_limit(self) -> Verdict:
        if self.scale_varies:
            match = self.limit.match_at_own_scales
            assert match is not None
            return signed(cast(TargetName, match.target), climbs=match.climbs)
        is_sum = self.decomposition is not None and self.decomposition.remainder <= MATCH
        return "sum-of-targets" if self.limit.verdict == "unknown" and is_sum else self.limit.verdict

    @cached_property
    def of_one_target(self) -> Verdict:
        """As `verdict`, at one scale and without sums."""
        return "unknown" if self.scale_varies or self.verdict == "sum-of-targets" else self.verdict

    def _is_a_matter_of_size(self, verdict: Verdict) -> bool:
        """Whether small batches lack a verdict of the limit because of their size, or do not lack it.

        The limit's problems are narrower than those of small batches: fewer probabilities, log-ratios and ratios. If
        the verdict holds on them in batches of 2 as well, the size plays no role, and the problems of small batches
        must have the verdict too. Equal and varying lengths are held apart, since a mean over tokens depends on the
        size at varying lengths only.
        """
        if self._has(self.small, verdict):
            return True
        kinds: list[Callable[[Case], bool]] = [lambda c: c.varying, lambda c: not c.varying]
        return all(
            self._has(self.small.only(kind), verdict) or not self._has(self._pairs.only(kind), verdict)
            for kind in kinds
        )

    def _has(self, found: Comparison, verdict: Verdict) -> bool:
        """Whether these gradients have a verdict of the limit, in the sense in which the limit has it."""
        if not found.measured:
            return True
        if self.scale_varies:
            return found.match_at_own_scales == self.limit.match_at_own_scales
        if verdict != "sum-of-targets":
            return all(found.has_verdict(m, verdict) for m in found.measured)
        same, limit = found.decomposition, self.limit.decomposition
        return same is not None and limit is not None and same.remainder <= MATCH and same.names == limit.names

    @cached_property
    def scale_varies(self) -> bool:
        """Whether the gradient in the limit is that of a target at a scale that depends on the problem."""
        return self.limit.verdict == "unknown" and self.limit.match_at_own_scales is not None

    @cached_property
    def _is_clipped_away(self) -> bool:
        """Whether no completion of the limit's problems has a gradient, but some of those of small batches have one.

        A loss that clips the ratio has no gradient beyond it, and there are few completions.
        """
        without = all(m.gradient.typical == 0 for m in self.limit.measured)
        return without and any(m.gradient.typical != 0 for m in self.small.measured)

    @cached_property
    def _is_contradicted(self) -> bool:
        """Whether small batches match the limit except on wider problems.

        The problems of the limit have short completions and small groups, and a token must have a probability of 1/24
        to be in a batch, which bounds its log-ratio. The wider problems in small batches have more of each.
        """
        return self._in_small_batches == self._of_limit and bool(self.off_with)

    @cached_property
    def off_with(self) -> list[str]:
        """The wider problems on which the verdict of the standard ones, or else at equal lengths, does not hold."""
        known = self._in_small_batches
        if known == "unknown":
            return self._off_in_the_limit
        compared = [m for m in self.small.measured if m.case.wider and (known == self._standard or not m.case.varying)]
        return [m.case.wider for m in compared if not self.small.has_verdict(m, known)]

    @cached_property
    def _off_in_the_limit(self) -> list[str]:
        known = self.limit.only(lambda c: not c.wider).verdict
        if known == "unknown":
            return []
        return [m.case.wider for m in self.limit.measured if m.case.wider and not self.limit.has_verdict(m, known)]

    @cached_property
    def on_standard_problems(self) -> Verdict:
        """The verdict on the standard problems only.

        Where it differs from that on all, small batches must agree at equal lengths, where the size of a batch does not
        matter to a mean: the limit's problems have smaller log-ratios.
        """
        found = self.only(lambda case: not case.wider).verdict
        at_equal_lengths = self.small.only(lambda case: not case.wider and not case.varying).verdict
        return found if found in (self.verdict, at_equal_lengths) else "unknown"

    @cached_property
    def _standard(self) -> Verdict:
        return self.small.only(lambda c: not c.wider).verdict

    @cached_property
    def _in_small_batches(self) -> Verdict:
        """The verdict on the standard problems, or else at equal lengths."""
        if self._standard != "unknown":
            return self._standard
        equal = self.small.only(lambda c: not c.wider and not c.varying)
        return equal.verdict if equal.measured else "unknown"

    @cached_property
    def holds(self) -> Holds | None:
        """Where the verdict holds; None if it is `unknown`."""
        if self.verdict == "unknown":
            return None
        if self.order_matters:
            return "small-batches"
        return "always" if self._has(self.small, self.verdict) else "large-batches"

    @cached_property
    def decomposition(self) -> Decomposition | None:
        """The sum of two targets that the gradient is, or is near to; None where one target is enough."""
        found = None if self.scale_varies else self.limit.decomposition
        return found if found is not None and found.remainder <= NEAR_SUM else None


def bias_by_batch(found: AtEverySize, target: TargetName, at_size: Callable[[int], Comparison]) -> dict[str, float]:
    """The relative distance to a target by the number of completions in a batch, and in the `limit`.

    Args:
        found: the gradients of the loss on fresh samples.
        target: the target to compare with.
        at_size: the gradients on the problems of `at_batch_size` in batches of a given size.

    Returns:
        By size of the batch, over the same problems with varying lengths. Empty if the loss has no single target that
        it descends at one scale.
    """
    in_limit = found.limit.only(is_small)
    climbs = found.limit.match is not None and found.limit.match.climbs
    several = found.scale_varies or found.verdict == "sum-of-targets"
    if not in_limit.measured or in_limit.is_nothing or climbs or several or found.order_matters:
        return {}
    return {str(size): at_size(size).bias[target] for size in BATCH_SIZES} | {"limit": in_limit.bias[target]}


# Gradients of a loss on several cases, ready to compare with targets.


def measure(
    subject: Subject, cases: Iterable[Case], advantages: Advantages = "zero", *, on_policy: bool = True
) -> Comparison:
    """Compute the gradient of a loss on every case.

    Args:
        subject: the loss.
        cases: summed over every group, or with `parts` in the limit of large batches.
        advantages: the advantages that the loss receives.
        on_policy: whether π is the sampler; targets between the two then have no gradient, and are left out.

    Returns:
        The gradients, to be compared with the targets.
    """
    found = []
    for case in cases:
        advantage = advantage_of(case.problem, advantages)
        if case.parts is None:
            gradient = expected_gradient(subject, case.problem, case.group_size, advantage)
        else:
            gradient = limit_gradient(subject, case, advantage)
        found.append(Measurement(case, gradient))
    return Comparison(found, TO_REFERENCE if on_policy else WITH_GRADIENT)


# `audit_in_large_batches`: the verdict on one kind of samples, for a loss whose calls take long.


@dataclass(frozen=True)
class LargeBatchResult:
    """What one loss descends on one kind of samples, in large batches.

    Attributes:
        name: the name of the loss.
        verdict: as in `AuditResult`.
        holds: `always`, `large-batches`, or None if the verdict is `unknown`.
        scale_varies: whether the multiple of the target depends on the data, as in `AuditResult`.
        nearest: the target with the least bias in the limit of large batches.
        bias: relative distance to it in the limit.
        bias_by_batch: the same in batches of 2 and of 3 completions and in the `limit`, over the two problems that are
            enumerated at every size; empty if the loss has no single target that it descends at one scale.
        decomposition: the two targets whose sum the gradient is, or is nearly; None if one is enough.

    Example:
        >>> from klgrad import KLTerm
        >>> from klgrad.audit import audit_in_large_batches
        >>> result = audit_in_large_batches(KLTerm(level="token", reduction="token"))
        >>> result.verdict, result.holds
        ('reverse-kl-token', 'large-batches')
    """

    name: str
    verdict: Verdict
    holds: Holds | None
    scale_varies: bool
    nearest: TargetName
    bias: float
    bias_by_batch: dict[str, float]
    decomposition: Decomposition | None


def audit_in_large_batches(loss: object, *, on_policy: bool = True) -> LargeBatchResult:
    """Find what a loss descends in the limit of large batches, and how far batches of 2 and 3 completions are off it.

    This is the part of `audit` that decides its verdict, with a tenth of the calls: small batches are enumerated on the
    two smallest problems only, and there are no numerical probes. A verdict that only fails at probabilities,
    log-ratios or ratios beyond those of the limit's problems, as that of a loss with a distant dead zone, is found by
    `audit` alone.

    Args:
        loss: as for `audit`.
        on_policy: whether the samples are the policy's own, or those of another policy.

    Returns:
        The verdict, for which batches it holds, and the bias of small batches.

    Example:
        >>> from klgrad.audit import audit_in_large_batches
        >>> def token_mean(logp, ref_logp, mask):
        ...     return ((logp - ref_logp) ** 2 / 2 * mask).sum() / mask.sum()
        >>> result = audit_in_large_batches(token_mean)
        >>> result.verdict, result.holds
        ('reverse-kl-token', 'large-batches')
    """
    subject = as_subject(loss)
    small = [case for size in BATCH_SIZES for case in at_batch_size(size, on_policy=on_policy)]
    in_small = measure(subject, small, on_policy=on_policy)
    in_limit = measure(subject, limit_cases(on_policy), on_policy=on_policy)
    # Small batches have problems of the limit only, so that none has more than the limit.
    found = AtEverySize(in_small, in_limit, lambda: in_small)
    at_own_scales = found.limit.match_at_own_scales if found.scale_varies else None
    nearest = cast(TargetName, found.limit.nearest if at_own_scales is None else at_own_scales.target)
    return LargeBatchResult(
        name=subject.name,
        verdict=found.verdict,
        holds=found.holds,
        scale_varies=found.scale_varies,
        nearest=nearest,
        bias=found.limit.bias[nearest],
        bias_by_batch=bias_by_batch(found, nearest, lambda n: found.small.only(lambda c: c.group_size == n)),
        decomposition=found.decomposition,
    )


# The result of an audit.

SAME_SCALE = 1e-5
"""Scales whose relative difference is smaller count as equal: a loss that casts to float32 has them to about 1e-6."""


@dataclass(frozen=True)
class AuditResult:
    """What one loss descends.

    Attributes:
        name: the name of the loss.
        kind: `cell`, `term`, `function` or `framework`.
        framework: the framework whose code the loss is; empty for other losses.
        verdict: what the loss does with samples from π in large batches: the target that it descends, `climbs` and a
            target, `nothing`, `sum-of-targets`, or `unknown`.
        verdict_off_policy: the same with samples from another policy.
        holds: `always` if `verdict` holds in batches of every size, `large-batches` if it holds in the limit of large
            batches only, `small-batches` if it holds in small ones and large ones are not audited, because the order
            of rows matters; None if the verdict is `unknown`.
        holds_off_policy: the same for `verdict_off_policy`.
        verdict_small_batches: the on-policy verdict in batches of 2, 3 and 4 completions.
        verdict_off_policy_small_batches: the same off-policy.
        bias_by_batch: relative distance to `nearest` in batches of 2 and of 3 completions and in the `limit`, on-policy
            and on the same problems with varying lengths; empty where there is no gradient.
        bias_by_distance: relative distance over the problems `near` ref, and over those `far` from it, each at a scale
            of its own, on-policy; to the target of `verdict_near`, or else of `verdict_near_fixed_lengths`, or else to
            `nearest`.
        scale_varies: whether the multiple of the target depends on the data, as in a loss that divides by the standard
            deviation of the batch; on-policy.
        scale_varies_off_policy: the same off-policy.
        decomposition: the two targets whose sum the gradient is, or is nearly, in large batches, on-policy; None if
            one target is enough, or if no sum is near.
        decomposition_off_policy: the same off-policy.
        scale: the multiple of that target (of the nearest one, if `unknown`); None for `nothing`.
        scale_by_shape: the same for each batch shape, "rows x columns, fixed|varying".
        bias: relative distance to each target at the best positive scale, on-policy, over the standard problems. Where
            only a wider problem prevents a verdict, the largest distance on any problem.
        cosine: cosine with the gradient of each target, on-policy.
        bias_off_policy: as `bias`, off-policy.
        cosine_off_policy: as `cosine`, off-policy.
        nearest: the target with the least bias, on-policy.
        nearest_off_policy: the same off-policy.
        variance: exact variance of the gradient of one completion, over the standard on-policy problems, divided by the
            square of the loss's scale, so that all losses have one unit; None for a loss that descends no target.
        variance_near: the same over the problems near ref only, where most of training takes place.
        has_gradient: whether any gradient reaches the log-probs.
        depends_on_reference: whether moving ref changes any gradient at all.
        length_sensitive: whether varying lengths change the verdict that fixed lengths give, on the standard problems.
        verdict_standard: the on-policy verdict on the standard problems only.
        off_with: what the wider problems have on which `verdict_standard` (or, if that is unknown, the verdict at fixed
            lengths) does not hold.
        verdict_near: the on-policy verdict in large batches on the problems near ref only, where no clamp is active.
        verdict_near_fixed_lengths: the same on completions of equal length.
        verdict_fixed_lengths: the on-policy verdict where all completions have the same length.
        dead_zone: whether the gradient of a token vanishes at large log-ratios, in float32.
        dead_below: the log-ratio log π - log ref below which it does, or None.
        dead_above: the one above which it does, or None.
        float32_wrong_from: the first log-ratio at which the coefficient in float32 is more than 1% off.
        finite: whether loss and gradient stay finite in float32 down to log-probs of -9000.
        finite_in_float64: whether the gradient is finite on every group of every on-policy problem.
        deterministic: whether the same batch gives the same gradient twice; if not, the verdicts are `unknown`, and no
            number is valid.
        touches_padding: whether gradient falls on masked positions; it then matches no target.
        reads_masked: whether the gradient of live tokens depends on what is at masked positions; None for a framework,
            for which this and the next two are not tried.
        stumbles_over_gaps: whether masked positions between live tokens change their gradient, or have one.
        finite_if_empty: whether loss and gradient are finite where a completion has no token.
        order_matters: whether the order of the groups of a large batch changes the gradient; small batches then decide
            the verdict.
        divides_by_length: whether a loss without a verdict is a target's, divided by the length of each completion.
        verdict_by_problem: the on-policy verdict on each single problem.
        anatomy: the parts of the loss, read by probes; None if the loss cannot be called with the probes' batches, of
            8 to 64 completions and, for one of logits, four entries.
        advice: what the loss does and what to use instead; `str(advice)` is the text.

    Example:
        >>> from klgrad.audit import audit
        >>> result = audit(lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2, name="k2")
        >>> result.verdict, round(result.scale, 6)
        ('reverse-kl-token', 1.0)
    """

    name: str
    kind: Kind
    framework: str
    verdict: Verdict
    verdict_off_policy: Verdict
    holds: Holds | None
    holds_off_policy: Holds | None
    verdict_small_batches: Verdict
    verdict_off_policy_small_batches: Verdict
    bias_by_batch: dict[str, float]
    bias_by_distance: dict[str, float]
    scale_varies: bool
    scale_varies_off_policy: bool
    decomposition: Decomposition | None
    decomposition_off_policy: Decomposition | None
    scale: float | None
    scale_by_shape: dict[str, float]
    bias: dict[TargetName, float]
    cosine: dict[TargetName, float]
    bias_off_policy: dict[TargetName, float]
    cosine_off_policy: dict[TargetName, float]
    nearest: TargetName
    nearest_off_policy: TargetName
    variance: float | None
    variance_near: float | None
    has_gradient: bool
    depends_on_reference: bool
    length_sensitive: bool
    verdict_standard: Verdict
    off_with: list[str]
    verdict_near: Verdict
    verdict_near_fixed_lengths: Verdict
    verdict_fixed_lengths: Verdict
    dead_zone: bool
    dead_below: float | None
    dead_above: float | None
    float32_wrong_from: float | None
    deterministic: bool
    finite: bool
    finite_in_float64: bool
    touches_padding: bool
    reads_masked: bool | None
    stumbles_over_gaps: bool | None
    finite_if_empty: bool | None
    order_matters: bool
    divides_by_length: bool
    verdict_by_problem: dict[str, Verdict]
    anatomy: Anatomy | None = None
    advice: Advice = field(default_factory=Advice)

    @property
    def scale_range(self) -> tuple[float, float] | None:
        """The smallest and the largest scale of any batch shape, or None where they are equal."""
        scales = self.scale_by_shape.values()
        if not scales or max(scales) - min(scales) <= SAME_SCALE * max(map(abs, scales)):
            return None
        return min(scales), max(scales)

    @property
    def is_wrong_before_dead(self) -> bool:
        """Whether float32 is wrong at a log-ratio at which the coefficient is not dead yet."""
        wrong = self.float32_wrong_from
        dead = self.dead_below if wrong is not None and wrong < 0 else self.dead_above
        return wrong is not None and (dead is None or abs(wrong) < abs(dead))

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON: `advice` as text, and its remedies as data in `remedies`."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        remedies = [remedy.to_dict() for remedy in self.advice.remedies]
        sums = {name: found[name] and found[name].to_dict() for name in ("decomposition", "decomposition_off_policy")}
        parts = None if self.anatomy is None else self.anatomy.to_dict()
        return found | sums | {"advice": str(self.advice), "remedies": remedies, "anatomy": parts}
