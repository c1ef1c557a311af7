"""The result of an audit."""

from dataclasses import dataclass, field, fields

from ..targets import TargetName, Verdict
from .advice import Advice
from .at_every_size import Holds
from .decomposition import Decomposition
from .subject import Kind

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
        return found | sums | {"advice": str(self.advice), "remedies": remedies}
