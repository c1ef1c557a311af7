"""`audit`: from a loss to its parts, the name of what it descends, and advice."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal, cast

import torch
from torch import Tensor

from ..errors import LossCallError
from ..support import Json
from ..targets import TARGETS, TargetName, Verdict, signed
from .advice import Advice, advise
from .anatomy import enumerate_gradients, read_anatomy
from .batch import Advantages, Batch, advantage_of, cases
from .call import Settings
from .parts import Anatomy
from .subject import Kind, Parts, Subject, all_finite, as_subject, evaluate, expected_gradient

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
    wrong_from, finite = probe_float32(subject)
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
        float32_wrong_from=wrong_from,
        finite=finite and anatomy.finite and anatomy.finite_at_ref,
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
    # The mean of a group shrinks what it is subtracted from by 1 - 1/n, and must shrink all of it.
    shrinks_a_part = a.baseline.name == "group-mean" and bool(a.credits) and (a.is_exact or a.baseline.covers != "all")
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
    if a.is_sum_of_all:
        return "squared-sequence"
    if a.credits or a.baseline.name != "none" or (a.is_exact and not a.own.is_zero):
        return None
    if a.is_exact:
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
        or a.is_other_policy
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


# Numerical faults of a loss: overflow and lost digits in float32, masks with gaps, and empty completions.


# How a loss behaves in float32 at log-ratios that occur in training and rarely in tests.

LIVE_RANGE = (0.1, 1.0, 2.0, 2.65, 3.0, 4.0, 4.5, 5.0, 7.5, 10.0, 14.0, 16.0, 17.0, 20.0, 25.0, 30.0)
"""|log ref/π| of a token at which its coefficient is compared with that in float64. None is near 15: where exp(-l) is
multiplied by exp(l), float32 is 0.8 to 1.7% off there, and which it is depends on the processor."""

NEIGHBOURS = 4
SPACING = 0.01
"""Each of these sizes stands for this many log-ratios: the rounding of a single one may happen to be small."""

EXTREMES = (50.0, 90.0, 200.0, 1e3, 9e3)
"""|log ref/π| at which loss and gradient must still be finite."""

DIGITS_LOST = 0.01
"""Relative difference between the float32 and the float64 coefficient that counts as wrong."""


def probe_float32(subject: Subject) -> tuple[float | None, bool]:
    """Vary the log-ratio of one token of a group of three, with one group for each log-ratio in one batch.

    Returns:
        The log-ratio, log π - log ref, smallest in size at which the float32 coefficient is more than 1% off its
        float64 value, or None; and whether loss and gradient stay finite in float32 at every probe. A loss that raises
        an error there, as one that checks its own values, is not finite.
    """
    sizes = tuple(x + i * SPACING for x in LIVE_RANGE for i in range(NEIGHBOURS))
    live, extreme = (tuple(sign * x for sign in (-1.0, 1.0) for x in each) for each in (sizes, EXTREMES))
    low, finite = _coefficients(subject, live, torch.float32)
    high, _ = _coefficients(subject, live, torch.float64)
    _, finite_beyond = _coefficients(subject, extreme, torch.float32)
    n = len(sizes)
    wrong = [_wrong_from(-1.0, low[:n], high[:n]), _wrong_from(1.0, low[n:], high[n:])]
    return min((x for x in wrong if x is not None), key=abs, default=None), finite and finite_beyond


def _wrong_from(sign: float, low: list[float], high: list[float]) -> float | None:
    """On one side, the first log-ratio at which float32 is wrong."""
    usual = max(map(abs, high[: 3 * NEIGHBOURS]))
    for i, (x, y) in enumerate(zip(low, high, strict=True)):
        expected = max(usual, abs(y))  # where the coefficient crosses 0, compare with its usual size
        if not abs(x - y) <= DIGITS_LOST * expected:
            return sign * LIVE_RANGE[i // NEIGHBOURS]
    return None


def _coefficients(subject: Subject, log_ratios: tuple[float, ...], dtype: torch.dtype) -> tuple[list[float], bool]:
    """The moved token's coefficient at each log-ratio, and whether the loss and every gradient is finite."""
    try:
        loss, parts = evaluate(subject.large(), probe_batch(*log_ratios, dtype=dtype))
    except LossCallError:
        return [math.nan] * len(log_ratios), False
    return parts[0][:: len(LOGP), 1].tolist(), all_finite((loss, *parts))


LOGP = ((-0.7, -0.5, -1.9), (-1.1, -0.3, -0.8), (-2.3, -1.4, -0.6))
REF_LOGP = ((-1.0, -0.5, -1.6), (-0.6, -0.9, -1.2), (-1.7, -1.5, -0.2))
"""Log-probs of the group, before the log-ratio of one token is changed."""


def probe_batch(*log_ratios: float, dtype: torch.dtype = torch.float64) -> Batch:
    """Three completions of three tokens, on-policy, for each log-ratio, which the second token of the first one has."""
    moved, n = torch.tensor(log_ratios, dtype=torch.float64), len(log_ratios)
    logp, ref = (torch.tensor(x, dtype=torch.float64).repeat(n, 1) for x in (LOGP, REF_LOGP))
    logp[:: len(LOGP), 1] += moved.clamp(max=0.0)
    ref[:: len(LOGP), 1] -= moved.clamp(min=0.0)
    kl = (logp - ref).abs()
    two_tokens = lambda x: torch.stack([x, torch.log1p(-x.exp())], -1)  # logits in which token 0 has these log-probs
    batch = Batch(
        logp=logp,
        ref_logp=ref,
        old_logp=logp,
        behavior_logp=logp,
        mask=torch.ones_like(logp, dtype=torch.bool),
        advantages=torch.zeros_like(logp),
        rewards=torch.zeros_like(logp[:, 0]),
        group=torch.arange(n).repeat_interleave(len(LOGP)),
        token_reverse_kl=kl,
        token_forward_kl=kl,
        logits=two_tokens(logp),
        ref_logits=two_tokens(ref),
        behavior_logits=two_tokens(logp),
        tokens=torch.zeros(logp.shape, dtype=torch.long),
    )
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in vars(batch).items()}
    return Batch(**cast).fresh()


# Single batches that ask one question each, about masks.

SAME = 1e-5
"""Relative difference of derivatives that are the same, also for a loss that casts to float32."""

LOG_RATIO = 0.7
"""log π/ref of the token that `probe_batch` moves."""


def reads_masked(subject: Subject) -> bool:
    """Whether the gradient of live tokens depends on what is at masked positions."""
    batch = _masked_at((2, 1), (1, 2))  # inside a completion, and at the end of one
    other = {
        name: torch.where(_like(batch.mask, x), x, x - (2 if name.startswith("ref") else 1)).detach()
        for name, x in vars(batch).items()
        if x.is_floating_point() and x.dim() > 1 and name != "advantages"
    }
    return not _same_at(batch.mask, _evaluated(subject, batch), _evaluated(subject, replace(batch, **other).fresh()))


def probe_gaps(subject: Subject) -> tuple[bool, bool]:
    """Whether a masked position between live tokens has a gradient, and whether it changes theirs or is an error.

    The same completions without the gap have the masked position at their end. All have it at the same place, since a
    baseline may compare the tokens at one position.
    """
    # The second and the third column in the other order; a tensor without columns stays as it is.
    gap_last = lambda x: x if x.dim() == 1 else x.detach()[:, [0, 2, 1]]
    batch = _masked_at((0, 1), (1, 1), (2, 1))
    moved = Batch(**{name: gap_last(x) for name, x in vars(batch).items()}).fresh()
    inside, last = _evaluated(subject, batch), _evaluated(subject, moved)
    if inside is None or last is None:
        return False, inside is not last
    back = Parts(*map(gap_last, last))
    at_gap, at_end = (bool((x.logp[~batch.mask] != 0).any()) for x in (inside, back))
    return at_gap and not at_end, not _same_at(batch.mask, inside, back)


def is_finite_if_empty(subject: Subject) -> bool:
    """Whether loss and gradient are finite, and no error, where one completion of a batch has no token."""
    try:
        loss, parts = evaluate(subject, _masked_at((0, 0), (0, 1), (0, 2)))
    except LossCallError:
        return False
    return all_finite((loss, *parts))


def _masked_at(*positions: tuple[int, int]) -> Batch:
    """Three completions of three tokens, without those at some positions."""
    batch = probe_batch(LOG_RATIO)
    mask = batch.mask.clone()
    for position in positions:
        mask[position] = False
    return replace(batch, mask=mask).fresh()


def _evaluated(subject: Subject, batch: Batch) -> Parts | None:
    """The derivatives, or None if the loss raises an error."""
    try:
        return evaluate(subject, batch)[1]
    except LossCallError:
        return None


def _same_at(mask: Tensor, one: Parts | None, other: Parts | None) -> bool:
    """Whether derivatives at the positions of a mask are the same up to rounding."""
    if one is None or other is None:
        return one is other
    for pair in zip(one, other, strict=True):
        a, b = (torch.where(_like(mask, x), x, 0).nan_to_num() for x in pair)
        if float((a - b).norm()) > SAME * max(float(a.norm()), float(b.norm()), math.ulp(0.0)):
            return False
    return True


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask if x.dim() == mask.dim() else mask[..., None]
