"""`audit`: from a loss to its parts, the name of what it descends, and advice."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import product
from typing import Literal, cast

import torch
from torch import Tensor

from ..enumeration import Problem, autoregressive, population, target_gradients, with_rational_sampler
from ..errors import LossCallError
from ..support import Json
from ..targets import TARGETS, TargetName, Verdict, signed
from .advice import Advice, advise
from .anatomy import read_anatomy, rescale
from .call import Settings
from .parts import Anatomy, MicroBatches
from .probes import LESS_UNLIKELY, UNLIKELY, WIDTH, Advantages, Batch, ProbeInputs, from_problem
from .sentences import in_micro_batches
from .subject import (
    VOCABULARY,
    Kind,
    Parts,
    Subject,
    all_finite,
    as_subject,
    evaluate,
    expected_gradient,
    of_reference,
    sum_over_rows,
)

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
        variance: exact variance of the gradient of one completion at scale 1, over small problems with samples from π;
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
    subject = with_vocabulary(as_subject(loss, name, settings))
    anatomy = enumerate_gradients(subject, read_anatomy(subject, advantages), advantages)
    anatomy = replace(anatomy, micro_batches=probe_micro_batches(subject, anatomy))
    fresh, stale = fresh_name(anatomy), stale_name(anatomy)
    wrong_from, finite = probe_float32(subject)
    of_others = subject.kind == "framework"  # the batches that this package makes for their code have no such masks
    leaks, changes = (None, None) if of_others else probe_gaps(subject)
    has_variance = _holds(anatomy, fresh) == "always" and TARGETS[fresh].has_gradient and anatomy.unit.rows
    near, far = (variance_of(subject, fresh, x) if has_variance else None for x in ("near", "far"))
    result = AuditResult(
        name=subject.name,
        kind=subject.kind,
        framework=subject.framework,
        call=subject.describe_call(ProbeInputs.at_random([3] * 3, 3, 3).batch()),
        anatomy=anatomy,
        verdict=fresh,
        verdict_off_policy=stale,
        holds=_holds(anatomy, fresh),
        holds_off_policy=_holds(anatomy, stale),
        scale=None if anatomy.is_nothing or not anatomy.proved_fresh else anatomy.scale,
        variance=None if near is None or far is None else (near + far) / 2,
        variance_near=near,
        float32_wrong_from=wrong_from,
        finite=finite and anatomy.finite and anatomy.finite_at_ref,
        reads_masked=None if of_others else reads_masked(subject),
        leaks_at_gaps=leaks,
        stumbles_over_gaps=leaks or changes,
        finite_if_empty=None if of_others else is_finite_if_empty(subject),
    )
    return replace(result, advice=advise(result, subject))


def with_vocabulary(subject: Subject) -> Subject:
    """The loss with a large vocabulary, if it fails in a small one: its list of the most likely tokens may be long."""
    batches = [ProbeInputs.at_random([3] * 3, 3, 3).batch()]
    if subject.is_given_logits:  # the enumerated problems have vocabularies of 2 and 3 tokens
        batches += [from_problem(c.problem, c.members[:1], advantage_of(c.problem, "zero")) for c in proof_cases(False)]
    try:
        for batch in batches:
            evaluate(subject, batch)
    except LossCallError:
        if not subject.is_given_logits:
            raise
        for entries, added in product((VOCABULARY // 8, VOCABULARY), (UNLIKELY, LESS_UNLIKELY)):
            larger = replace(subject, entries=entries, added=added)
            with suppress(LossCallError):
                loss, parts = evaluate(larger, batches[0])
                if all_finite((loss, *parts)):
                    return larger
        raise
    return subject


# Proof by enumeration: the gradient of the loss on small problems, summed over every outcome, is that of the formula.
#
# A gradient that depends on statistics of the batch, such as a mean over all its tokens, differs in batches of 2, 3 and
# 32 completions. Here one batch has every group of completions as often as it is likely: the gradient of the loss on it
# is that of the limit of large batches, up to rounding.

DISTANCES = {"near": (0.2, 0.5), "far": (2.5, 2.0)}
"""Standard deviation of the logits of ref, and of the sampler, from those of π. Near ref, reverse and forward KL almost
agree; far from it they do not."""

PROOF_SHAPES = (
    # Distance to ref, vocabulary, length, ends, group size, parts. The batch has parts ^ (length * group size) groups:
    # 64 or 256, few enough for a framework's trainer. With 2 parts the sampler is uniform.
    ("near", 3, 2, False, 2, 4),
    ("far", 3, 2, False, 2, 4),
    ("far", 3, 2, True, 2, 4),
    ("far", 2, 3, True, 2, 2),
    ("far", 2, 2, True, 3, 2),
)

SURE = 20
"""One over the probability of the rarer of two tokens: in the other problems and in the probes of a loss of logits no
token is much more likely than one half."""


@dataclass(frozen=True, eq=False)
class Case:
    """A problem, and one batch that holds every group of completions as often as it is likely."""

    distance: str
    problem: Problem
    group_size: int
    parts: int

    @property
    def name(self) -> str:
        """A description that is unique among the problems."""
        space = self.problem.space
        groups = f"groups of {self.group_size} in one large batch"
        return f"{self.distance}, {'varying' if space.ends else 'fixed'} length, vocabulary {space.vocab}, {groups}"

    @cached_property
    def members(self) -> Tensor:
        """(M, G) every group as often as it is likely."""
        return population(self.problem, self.group_size, self.parts)

    def batch(self, advantages: Advantages = "zero") -> Batch:
        """The batch that holds all of them."""
        return from_problem(self.problem, self.members, advantage_of(self.problem, advantages))

    @cached_property
    def targets(self) -> Mapping[str, Tensor]:
        """The gradient of every target on this problem: on the logits, and 0 on the padding."""
        padding = self.problem.logits.new_zeros(self.problem.space.length)
        return {name: torch.cat([t, padding]) for name, t in target_gradients(self.problem).items()}

    def describe(self) -> dict[str, object]:
        """Plain data for JSON."""
        space = self.problem.space
        return {
            "name": self.name,
            "distance_to_reference": self.distance,
            "vocabulary": space.vocab,
            "length": space.length,
            "lengths_vary": space.ends,
            "completions": len(space),
            "group_size": self.group_size,
            "groups": len(space) ** self.group_size,
        }


def advantage_of(problem: Problem, kind: Advantages) -> Tensor:
    """(N,) an advantage for each completion of a problem."""
    n = len(problem.space)
    if kind == "zero":
        return torch.zeros(n, dtype=torch.float64)
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


@cache
def proof_cases(on_policy: bool, *, few: bool = False) -> tuple[Case, ...]:
    """The problems on which the formula of a loss is compared with its enumerated gradient.

    Args:
        on_policy: whether the policy itself is the sampler.
        few: the two smallest only, for a framework's trainer, whose calls take long.
    """
    if few:
        return tuple(rational_case(*shape, on_policy=on_policy) for shape in PROOF_SHAPES if shape[-1] == 2)
    return (*(rational_case(*shape, on_policy=on_policy) for shape in PROOF_SHAPES), _sure_case(on_policy))


def rational_case(
    distance: str, vocab: int, length: int, ends: bool, group_size: int, parts: int, *, on_policy: bool
) -> Case:
    """A random problem around a sampler with rational probabilities: π is away from the sampler, and ref from π.

    The near and the far problem have the same sampler, and so the same mean length: a loss that divides by the mean
    length has the same scale on both.
    """
    from_ref, off_policy = DISTANCES[distance]
    drawn = autoregressive(vocab, length, ends=ends, seed=3, away_from_ref=from_ref, off_policy=off_policy)
    sampler = with_rational_sampler(drawn.on_policy(), parts, on_policy=True)
    to_ref, to_sampler = drawn.ref_logits - drawn.logits, drawn.behavior_logits - drawn.logits
    logits = sampler.logits if on_policy else sampler.logits - to_sampler
    problem = replace(sampler, logits=logits, ref_logits=logits + to_ref)
    return Case(distance, problem, group_size, parts)


def _sure_case(on_policy: bool) -> Case:
    """One token out of two, of which the sampler is nearly certain."""
    drawn = autoregressive(2, 1, ends=False, seed=3, away_from_ref=1.0)
    sampler = torch.tensor([[SURE - 1, 1]], dtype=torch.float64).log() - math.log(SURE)
    logits = sampler if on_policy else sampler + torch.tensor([[-0.5, 0.5]], dtype=torch.float64)
    ref_logits = logits + drawn.ref_logits - drawn.logits
    return Case("far", replace(drawn, logits=logits, ref_logits=ref_logits, behavior_logits=sampler), 2, SURE)


def enumerate_gradients(subject: Subject, parts: Anatomy, advantages: Advantages = "zero") -> Anatomy:
    """The parts with the difference between formula and loss, each summed over every outcome of small problems."""
    if parts.late:  # at the first token a late ref has no coefficient of its own, and these completions are short
        return parts
    subject = replace(subject, temperature=parts.temperature)
    unexplained, problems = dict(parts.unexplained), 0
    for on_policy, samples in ((True, "fresh"), (False, "stale")):
        gap, cases = 0.0, proof_cases(on_policy, few=subject.kind == "framework")
        for case in cases:
            batch = case.batch(advantages if on_policy else "zero")
            answer, formula = of_reference(subject, batch), parts.predict(batch)
            if parts.baseline.spread != "none":
                formula = formula._replace(logp=rescale(formula.logp, answer.logp, batch.group, parts.baseline.spread))
            gradient, expected = (sum_over_rows(case.problem, case.members, x) for x in (answer, formula))
            difference = (gradient.mean - expected.mean) / (gradient.typical or 1.0)
            if parts.leaks:  # which is told; the formula is that of the live tokens
                difference = difference[: -case.problem.space.length]
            gap = max(gap, float(difference.norm()))
        unexplained[f"every outcome of {len(cases)} problems, {samples} samples"] = gap
        problems += len(cases)
    return replace(parts, unexplained=unexplained, problems=problems)


# The noise of a loss: the variance of the gradient of one completion.

VARIANCE_SHAPES = (
    # Vocabulary, length, ends, group size, seed. Pairs on the larger spaces, triples on the smaller: of a pair, a
    # division by the standard deviation of the group keeps only the sign.
    (3, 2, False, 2, 19),
    (3, 3, True, 2, 1),
    (2, 2, False, 3, 75),
    (2, 3, True, 3, 1620),
)


@cache
def variance_problems(distance: str) -> tuple[tuple[Problem, int, Mapping[TargetName, Tensor]], ...]:
    """Problems at a distance to ref, each with a size of groups and the gradients of the targets."""
    from_ref, off_policy = DISTANCES[distance]
    problems = []
    for vocab, length, ends, size, seed in VARIANCE_SHAPES:
        problem = autoregressive(vocab, length, ends=ends, seed=seed, away_from_ref=from_ref, off_policy=off_policy)
        problems.append((problem.on_policy(), size, target_gradients(problem.on_policy())))
    return tuple(problems)


def variance_of(subject: Subject, verdict: Verdict, distance: str) -> float:
    """The mean over the problems, in units of the target; for a mean over rows whose groups do not see each other."""
    variances = []
    for problem, size, targets in variance_problems(distance):
        target, none = targets[cast(TargetName, verdict)], advantage_of(problem, "zero")
        gradient = expected_gradient(subject, problem, size, none, at_once=True)
        scale = float(gradient.mean[: len(target)] @ target / target.square().sum())
        variances.append((gradient.deviation / scale) ** 2)
    return sum(variances) / len(variances)


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
    if not a.proved_fresh or any(a.entropy) or a.is_misplaced or a.temperature != 1 or a.top is not None:
        return "unknown"
    if a.is_nothing or a.anchor == "sampler":  # at the sampler every log-ratio is 0
        return "unknown" if a.constant and a.unit.name == "completion-mean" else "nothing"
    return _at_level(a) if _keeps_direction(a) else "unknown"


def _keeps_direction(a: Anatomy) -> bool:
    """Whether the unit, the baseline and the bounds of the coefficient leave the direction of a target."""
    # The mean of a group shrinks what it is subtracted from by 1 - 1/n, and must shrink all of it.
    shrinks_a_part = a.baseline.name == "group-mean" and bool(a.credits) and (a.is_exact or not a.baseline.covers_all)
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
    is_named = a.proved and not any(a.entropy) and not a.is_misplaced and a.temperature == 1
    is_named = is_named and a.samples.pull is None and a.top is None
    if not is_named or a.unit.name in ("completion-mean", "other"):
        return "unknown"
    ratio, bound = a.samples.ratio, a.samples.bound
    if a.anchor == "sampler":
        return "reverse-kl-sampler-token-sampler" if ratio == "token" and a.shares == {"reverse-kl": 1.0} else "unknown"
    if a.is_nothing:
        if not a.constant or (ratio in ("token", "prefix", "sequence") and bound is None):
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
            return "sum-of-targets" if a.baseline.of_ended else "unknown"
    elif ratio == "token" and not _drifts(a):
        named = SAMPLER_PREFIXES.get(plain)
    elif sees_later:
        named = plain
    if named is None or named == "unknown":
        return "unknown"
    if a.constant and ratio == "none":
        return "sum-of-targets"
    if named == "sum-of-targets":
        return named
    return signed(cast(TargetName, named), climbs=fresh != plain)


# How a loss behaves in float32 at log-ratios that occur in training and rarely in tests.

LIVE_RANGE = (0.1, 1.0, 2.0, 2.65, 3.0, 4.0, 4.5, 5.0, 7.5, 10.0, 14.0, 16.0, 17.0, 20.0, 25.0, 30.0)
"""|log ref/π| of a token at which its coefficient is compared with that in float64. None is near 15: where exp(-l) is
multiplied by exp(l), float32 is 0.8 to 1.7% off there, and which it is depends on the processor."""

NEIGHBOURS = torch.tensor((0.0, 0.01, 0.02, 0.03), dtype=torch.float64)
"""Each of these sizes stands for four log-ratios: the rounding of a single one may happen to be small."""

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
    subject = replace(subject, added=LESS_UNLIKELY)
    sizes = torch.tensor(LIVE_RANGE, dtype=torch.float64)[:, None] + NEIGHBOURS
    live, extreme = torch.stack([-sizes, sizes]), torch.tensor(EXTREMES, dtype=torch.float64)
    low, is_finite = _coefficients(subject, live, torch.float32)
    high, _ = _coefficients(subject, live, torch.float64)
    _, is_finite_beyond = _coefficients(subject, torch.cat([-extreme, extreme]), torch.float32)
    usual = high[:, :3].abs().amax((1, 2), keepdim=True)  # to compare with where the coefficient crosses 0
    is_right = ((low - high).abs() <= DIGITS_LOST * torch.maximum(usual, high.abs())).all(-1)
    wrong = [sign * x for sign, side in zip((-1, 1), is_right, strict=True) for x in _first_wrong(side)]
    return min(wrong, key=abs, default=None), is_finite and is_finite_beyond


def _first_wrong(is_right: Tensor) -> list[float]:
    """The first of the sizes at which float32 is wrong, if there is one."""
    return [LIVE_RANGE[i] for i in (~is_right).nonzero()[:1, 0].tolist()]


def _coefficients(subject: Subject, log_ratios: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """The moved token's coefficient at each log-ratio, and whether the loss and every gradient is finite."""
    try:
        loss, parts = evaluate(subject, probe_batch(log_ratios.flatten(), dtype))
    except LossCallError:
        return torch.full_like(log_ratios, math.nan), False
    return parts.logp[::3, 1].double().view(log_ratios.shape), all_finite((loss, *parts))


LOGP = torch.tensor(((-0.7, -0.5, -1.9), (-1.1, -0.3, -0.8), (-2.3, -1.4, -0.6)), dtype=torch.float64)
REF_LOGP = torch.tensor(((-1.0, -0.5, -1.6), (-0.6, -0.9, -1.2), (-1.7, -1.5, -0.2)), dtype=torch.float64)
"""Log-probs of the group, before the log-ratio of one token is changed."""


def probe_batch(moved: Tensor, dtype: torch.dtype = torch.float64) -> Batch:
    """Three completions of three tokens, on-policy, for each log-ratio, which the second token of the first one has."""
    n = len(moved)
    logp, log_ratio = LOGP.repeat(n, 1), (LOGP - REF_LOGP).repeat(n, 1)
    logp[::3, 1] += moved.clamp(max=0.0)
    log_ratio[::3, 1] = moved
    batch = replace(ProbeInputs.at_reference([3] * 3 * n, 3, 3), logp=logp, log_ratio=log_ratio).batch()
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in vars(batch).items()}
    return Batch(**cast).fresh()


# Single batches that ask one question each, about masks and micro-batches.

SAME = 1e-5
"""Relative difference of derivatives that are the same, also for a loss that casts to float32."""


def reads_masked(subject: Subject) -> bool:
    """Whether the gradient of live tokens depends on what is at masked positions."""
    batch = _masked_at((2, 1), (1, 2))  # inside a completion, and at the end of one
    names = ("logp", "ref_logp", "old_logp", "behavior_logp", "logits", "ref_logits", "behavior_logits")
    live = lambda x: batch.mask if x.dim() == 2 else batch.mask[..., None]
    shifted = lambda name, x: torch.where(live(x), x, x - (2 if name.startswith("ref") else 1)).detach()
    other = replace(batch, **{name: shifted(name, getattr(batch, name)) for name in names}).fresh()
    return not _same_at(batch.mask, _evaluated(subject, batch), _evaluated(subject, other))


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


def probe_micro_batches(subject: Subject, parts: Anatomy) -> MicroBatches:
    """What becomes of the gradient in two micro-batches of whole groups.

    A framework's own way is measured. Other losses are called on each micro-batch, and their parts tell.
    """
    by_parts = in_micro_batches(parts)
    if subject.in_micro_batches is None:
        return MicroBatches() if subject.kind == "framework" else by_parts
    batch = ProbeInputs.at_random([9, 7, 9, 8, 3, 5, 2, 4], WIDTH, stale=1.0, seed=18).batch()
    halves = replace(subject, loss=subject.in_micro_batches)
    change = not _same_at(batch.mask, evaluate(subject, batch)[1], evaluate(halves, batch)[1])
    return MicroBatches(change, by_parts.why if change and by_parts.change else "")


def _masked_at(*positions: tuple[int, int]) -> Batch:
    """Three completions of three tokens, without those at some positions."""
    batch = probe_batch(torch.tensor([0.7], dtype=torch.float64))
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
        a, b = (x[mask].nan_to_num() for x in pair)
        if float((a - b).norm()) > SAME * max(float(a.norm()), float(b.norm()), math.ulp(0.0)):
            return False
    return True
