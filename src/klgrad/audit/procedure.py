"""`audit`: from a loss to its parts, the name of what it descends, and advice."""

from dataclasses import dataclass, field, fields, replace
from typing import Literal, cast

from ..support import Json
from ..targets import TARGETS, TargetName, Verdict, signed
from .advice import Advice, advise
from .anatomy import enumerate_gradients, read_anatomy
from .batch import Advantages, advantage_of, cases
from .call import Settings
from .gradients import expected_gradient
from .numerics import is_finite_if_empty, probe_float32, probe_gaps, reads_masked
from .parts import Anatomy
from .subject import Kind, Subject, as_subject

Holds = Literal["always", "large-batches"]
"""Whether a verdict holds in batches of every size, or in the limit of large ones only."""


@dataclass(frozen=True)
class AuditResult:
    """What one loss descends.

    Attributes:
        name: the name of the loss.
        kind: `cell`, `term`, `function` or `framework`.
        framework: the framework whose code the loss is; empty for other losses.
        call: how the loss was called, in one line.
        anatomy: its parts: divergence, horizon, samples, unit, baseline, and the proof that they are the loss.
        verdict: the name of what it descends with samples from π: a target of `klgrad.targets`, `climbs` and a target,
            `nothing`, `sum-of-targets`, or `unknown` where the parts have no such name.
        verdict_off_policy: the same with samples from another policy.
        holds: `always` if `verdict` holds in batches of every size, `large-batches` if in the limit of large ones; None
            if it is `unknown`.
        holds_off_policy: the same for `verdict_off_policy`.
        scale: by which factor the loss multiplies β near ref, in its unit; None for `nothing`, inf for a jump.
        variance: exact variance of the gradient of one completion at scale 1, over the standard on-policy problems;
            None for a loss whose verdict does not hold always.
        variance_near: the same over the problems near ref only, where most of training takes place.
        float32_wrong_from: the first log-ratio at which the coefficient in float32 is more than 1% off.
        finite: whether loss and gradient stay finite in float32 down to log-probs of -9000.
        reads_masked: whether the gradient of live tokens depends on what is at masked positions; None for a framework,
            for which this and the next three are not tried.
        leaks_at_gaps: whether masked positions between live tokens, such as the output of a tool, have a gradient,
            though those after the last token have none.
        stumbles_over_gaps: whether they change the gradient of live tokens, or have one.
        finite_if_empty: whether loss and gradient are finite where a completion has no token.
        advice: what the loss does and what to use instead; `str(advice)` is the text.

    Example:
        >>> from klgrad.audit import audit
        >>> result = audit(lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2, name="k2")
        >>> result.verdict, result.scale
        ('reverse-kl-token', 1.0)
    """

    name: str
    kind: Kind
    framework: str
    call: str
    anatomy: Anatomy
    verdict: Verdict
    verdict_off_policy: Verdict
    holds: Holds | None
    holds_off_policy: Holds | None
    scale: float | None
    variance: float | None
    variance_near: float | None
    float32_wrong_from: float | None
    finite: bool
    reads_masked: bool | None
    leaks_at_gaps: bool | None
    stumbles_over_gaps: bool | None
    finite_if_empty: bool | None
    advice: Advice = field(default_factory=Advice)

    @property
    def dead_below(self) -> float | None:
        """The log π/ref below which a token has no gradient, or None."""
        return self.anatomy.own.low if self._is_dead(self.anatomy.own.below) else None

    @property
    def dead_above(self) -> float | None:
        """The one above which it has none, or None."""
        return self.anatomy.own.high if self._is_dead(self.anatomy.own.above) else None

    def _is_dead(self, pull: float) -> bool:
        """Whether the coefficient is 0 where the curve, which is 0 at ref, has this value."""
        a = self.anatomy
        return abs(pull + a.constant) <= a.allowed * abs(a.constant)

    @property
    def depends_on_reference(self) -> bool:
        """Whether ref has any effect on the gradient."""
        a = self.anatomy
        return not (a.is_nothing or (a.anchor == "sampler" and a.proved_fresh))

    def to_dict(self) -> Json:
        """Plain data, ready for JSON: `advice` as text, and its remedies as data in `remedies`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        remedies = [remedy.to_dict() for remedy in self.advice.remedies]
        parts = self.anatomy.to_dict()
        parts["masked_tokens_leak"] = self.anatomy.leaks or bool(self.leaks_at_gaps)
        return values | {"advice": str(self.advice), "remedies": remedies, "anatomy": parts}


def audit(
    loss: object,
    *,
    name: str | None = None,
    advantages: Advantages = "zero",
    settings: Settings | None = None,
) -> AuditResult:
    """Take a loss apart, and find which divergence it descends.

    The derivative of the loss by each token's log-prob is read at chosen inputs, in float64. The parts that are read
    are a formula for the loss. It is compared with the loss at random inputs, and with its gradient summed over every
    outcome of small problems, with samples from the policy and from another one.

    Args:
        loss: a function or a module that takes any of `logp`, `ref_logp`, `old_logp`, `behavior_logp`, `mask`,
            `advantages`, `group`, `logits`, `ref_logits`, `tokens`, `labels`, `token_reverse_kl`, `token_forward_kl`,
            by these names or by those of TRL, verl or OpenRLHF, or one dictionary `batch` with all of them. It
            returns a scalar, (B,), (B, T), `(loss, metrics)` or `{"loss": loss}`. Or a class of such a loss, a
            `KLTerm`, or a `Cell`.
        name: the name in the report; by default that of the function.
        advantages: `zero` leaves the KL term alone in the loss. `random` gives every completion an advantage, and
            audits what the reference adds to the gradient: the gradient as it is, minus the gradient with the
            reference set to the policy.
        settings: values of the loss's own parameters, such as `{"beta": 0.04}`.

    Returns:
        The parts, the names on-policy and off-policy, the numerical findings, and advice.

    Example:
        >>> from klgrad.audit import audit
        >>> def k3(logp, ref_logp):
        ...     log_ratio = ref_logp - logp
        ...     return log_ratio.exp() - log_ratio - 1
        >>> result = audit(k3)
        >>> result.anatomy.shares, result.anatomy.horizon.kind
        ({'forward-kl': 1.0}, 'none')
        >>> result.verdict
        'forward-kl-token'
    """
    subject = as_subject(loss, name, settings)
    anatomy = enumerate_gradients(subject, read_anatomy(subject, advantages), advantages)
    fresh, stale = fresh_name(anatomy), stale_name(anatomy)
    numerics = probe_float32(subject)
    of_others = subject.kind == "framework"  # the batches that this package makes for their code have no such masks
    leaks, changes = (None, None) if of_others else probe_gaps(subject)
    result = AuditResult(
        name=subject.name,
        kind=subject.kind,
        framework=subject.framework,
        call=subject.call,
        anatomy=anatomy,
        verdict=fresh,
        verdict_off_policy=stale,
        holds=_holds(anatomy, fresh),
        holds_off_policy=_holds(anatomy, stale),
        scale=None if anatomy.is_nothing or not anatomy.proved_fresh else anatomy.scale,
        variance=None,
        variance_near=None,
        float32_wrong_from=numerics.wrong_from,
        finite=numerics.finite and anatomy.finite and anatomy.finite_at_ref,
        reads_masked=None if of_others else reads_masked(subject),
        leaks_at_gaps=leaks,
        stumbles_over_gaps=leaks or changes,
        finite_if_empty=None if of_others else is_finite_if_empty(subject),
    )
    if result.holds == "always" and TARGETS[fresh].has_gradient and anatomy.unit.rows:
        variance, near = _variances(subject, fresh, couples_rows=anatomy.baseline.name != "none")
        result = replace(result, variance=variance, variance_near=near)
    return replace(result, advice=advise(result, subject))


def _variances(subject: Subject, target: Verdict, *, couples_rows: bool) -> tuple[float | None, float | None]:
    """The variance over the problems, and over those near ref, in units of the target."""
    if couples_rows and not subject.stacks:
        return None, None  # one call for each group would take long
    subject = replace(subject, stacks=True)
    variances, near = [], []
    for case in cases():
        gradient = expected_gradient(subject, case.problem, case.group_size, advantage_of(case.problem, "zero"))
        wanted = case.targets[target]
        scale = float(gradient.mean @ wanted / wanted.square().sum())
        variances.append((gradient.deviation / scale) ** 2)
        near += variances[-1:] if case.distance == "near" else []
    return sum(variances) / len(variances), sum(near) / len(near)


# The name of what a loss descends, from its parts. A name is given where the expected gradient is that of one of
# `klgrad.targets`. Other divergences, a discounted future, a mean per completion or a clamp have no name there: their
# parts say what they are.


def _holds(a: Anatomy, verdict: Verdict) -> Holds | None:
    """The batches for which a verdict holds; None for `unknown`."""
    if verdict == "unknown":
        return None
    in_every = a.unit.name in ("sum", "fixed-length") and a.baseline.name in ("none", "leave-one-out", "group-mean")
    is_zero = verdict == "nothing" and not a.constant  # the gradient of each token, whatever divides it
    return "always" if is_zero or (in_every and a.baseline.spread == "none") else "large-batches"


def fresh_name(a: Anatomy) -> Verdict:
    """With samples from π."""
    if not a.proved_fresh or any(a.entropy) or a.is_other_policy or a.is_misplaced:
        return "unknown"
    if a.is_nothing or a.anchor == "sampler":  # at the sampler every log-ratio is 0
        return "unknown" if a.constant and a.unit.name == "completion-mean" else "nothing"
    return _at_level(a) if _keeps_direction(a) else "unknown"


def _keeps_direction(a: Anatomy) -> bool:
    """Whether the unit, the baseline and the bounds of the coefficient leave the direction of a target."""
    is_exact = any(a.exact) or a.full is not None
    # The mean of a group shrinks what it is subtracted from by 1 - 1/n, and must shrink all of it.
    shrinks_a_part = a.baseline.name == "group-mean" and bool(a.credits) and (is_exact or a.baseline.covers != "all")
    return (
        not a.has_edges
        and not shrinks_a_part
        and a.unit.name not in ("completion-mean", "other")
        and (a.baseline.name != "other" and (a.baseline.name != "token-mean" or a.horizon.kind == "none"))
        and a.baseline.spread in ("none", "batch")
    )


def _at_level(a: Anatomy) -> Verdict:
    shares, horizon = a.shares, a.horizon
    if not shares or not set(shares) <= {"reverse-kl", "forward-kl"} or horizon.kind not in ("none", "all"):
        return "unknown"
    if horizon.estimate in ("k2", "other") or (
        horizon.kind == "all" and a.level == "token" and "reverse-kl" not in shares
    ):
        return "unknown"
    if len(shares) > 1:
        return "sum-of-targets"
    ((name, weight),) = shares.items()
    return signed(cast(TargetName, f"{name}-{'sequence' if horizon.kind == 'all' else 'token'}"), climbs=weight < 0)


SAMPLER_PREFIXES: dict[Verdict, TargetName] = {
    "reverse-kl-token": "reverse-kl-token-sampler",
    "forward-kl-token": "forward-kl-token-sampler",
}
"""By verdict on fresh samples, what the token ratio descends on stale ones, and the exact KL without a ratio."""


def _without_ratio(a: Anatomy, fresh: Verdict) -> TargetName | None:
    """The mean under the sampler that the coefficients of a verdict on fresh samples descend on stale ones."""
    is_exact = any(a.exact) or a.full is not None
    if a.is_sum_of_all:
        return "squared-sequence"
    if a.credits or a.baseline.name != "none" or (is_exact and not a.own.is_zero):
        return None
    if is_exact:
        return SAMPLER_PREFIXES.get(fresh)
    by_mean: dict[Verdict, TargetName] = {"reverse-kl-token": "squared-token", "forward-kl-token": "k3-token"}
    return by_mean.get(fresh)


def _drifts(a: Anatomy) -> bool:
    """Whether a ratio leaves a baseline, or the credit of earlier tokens, without the ratio of the token itself."""
    return a.baseline_drifts or (a.has_past and a.level == "token" and a.samples.per_decision)


def stale_name(a: Anatomy) -> Verdict:
    """With samples from another policy."""
    if (
        not a.proved
        or any(a.entropy)
        or a.power
        or a.temperature != 1
        or a.is_misplaced
        or a.unit.name in ("completion-mean", "other")
    ):
        return "unknown"
    ratio, bound = a.samples.ratio, a.samples.bound
    if a.anchor == "sampler":
        return "reverse-kl-sampler-token-sampler" if ratio == "token" and a.shares == {"reverse-kl": 1.0} else "unknown"
    if a.is_nothing:
        if not a.constant or (ratio in ("token", "prefix", "sequence") and bound is None and a.samples.constant):
            return "nothing"
        return signed("forward-kl-sampler-sequence", climbs=a.constant > 0) if ratio == "none" else "unknown"
    if bound is not None or not _keeps_direction(a):
        return "unknown"
    fresh = _at_level(a)
    plain = cast(Verdict, fresh.removeprefix("climbs "))
    whole = a.horizon.kind == "none" or ratio == "sequence" or a.samples.per_decision
    sees_later = (ratio == "sequence" or (ratio == "prefix" and a.level == "token")) and whole and not _drifts(a)
    if a.samples.frozen:  # KL(π‖ref) minus KL(π‖μ)
        return "sum-of-targets" if sees_later and plain == "reverse-kl-sequence" else "unknown"
    named: Verdict | None = None
    if ratio == "none":
        named = _without_ratio(a, plain)
        if named == "squared-sequence" and a.baseline.name != "none":
            # Its mean under the sampler, and the drift of the baseline, if that is the same for all tokens.
            is_alike = a.baseline.ended == "credit" and a.baseline.covers != "beside"
            return "sum-of-targets" if is_alike else "unknown"
    elif ratio == "token" and not _drifts(a):
        named = SAMPLER_PREFIXES.get(plain)
    elif sees_later:
        named = plain
    if named is None or named == "unknown":
        return "unknown"
    if a.constant and (ratio == "none" or not a.samples.constant):
        return "sum-of-targets"
    if named == "sum-of-targets":
        return named
    return signed(cast(TargetName, named), climbs=fresh != plain)
