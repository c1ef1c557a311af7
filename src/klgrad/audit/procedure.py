"""`audit`: from a loss to its verdict and advice."""

from dataclasses import replace
from typing import cast

import torch

from ..enumeration import every_group
from ..errors import LossCallError
from ..targets import TARGETS, TargetName
from .advice import advise
from .anatomy import Anatomy, read_anatomy
from .audit_result import AtEverySize, AuditResult, bias_by_batch, measure
from .batch import Advantages, advantage_of, from_problem
from .call import Settings
from .gradients import Shape, at_batch_size, evaluate, every_gradient, in_pairs, limit_cases
from .match import MATCH, Comparison
from .numerics import (
    divides_by_length,
    in_large_vocabulary,
    is_finite_if_empty,
    order_matters,
    probe,
    reads_masked,
    stumbles_over_gaps,
)
from .problems import DISTANCES, Lengths, cases
from .subject import Subject, as_subject

FEW_GROUPS = 16
"""Groups to evaluate at a time while looking for an effect of the reference, for a loss called group by group."""


def audit(
    loss: object,
    *,
    name: str | None = None,
    advantages: Advantages = "zero",
    lengths: Lengths = "all",
    settings: Settings | None = None,
) -> AuditResult:
    """Find which divergence a loss descends, by exact enumeration.

    The gradient of the loss is summed over every group of completions that a sampler can draw on small problems, in
    float64, and compared with the gradient of each target of `klgrad.targets`.

    Args:
        loss: a function or a module that takes any of `logp`, `ref_logp`, `old_logp`, `behavior_logp`, `mask`,
            `advantages`, `group`, `logits`, `ref_logits`, `tokens`, `labels`, `token_reverse_kl`, `token_forward_kl`,
            by these names or by those of TRL, verl or OpenRLHF, or one dictionary `batch` with all of them. It
            returns a scalar, (B,), (B, T), `(loss, metrics)` or `{"loss": loss}`. Or a class of such a loss, a
            `KLTerm`, or a `Cell`.
        name: the name in the report; by default that of the function.
        advantages: `zero` leaves the KL term alone in the loss. `random` gives every completion an advantage, and
            audits what the reference adds to the gradient: the gradient as it is, minus the gradient with the
            reference set to the policy. Off-policy the advantages stay zero.
        lengths: `all` problems, or only those with completions of `equal` length, for a loss that averages over
            tokens.
        settings: values of the loss's own parameters, such as `{"beta": 0.04}`.

    Returns:
        The verdicts on-policy and off-policy, the distances to all targets, the numerical findings, and advice.

    Example:
        >>> from klgrad.audit import audit
        >>> def k3(logp, ref_logp):
        ...     log_ratio = ref_logp - logp
        ...     return log_ratio.exp() - log_ratio - 1
        >>> result = audit(k3)
        >>> result.verdict
        'forward-kl-token'
        >>> print(result.advice.finding)
        descends the token-level forward KL
    """
    subject = as_subject(loss, name, settings)
    on = _compare(subject, advantages, lengths, on_policy=True)
    on = replace(on, order_matters=order_matters(subject))
    # Off-policy a loss also differentiates its importance ratios, so the reference would change it: zero advantages.
    off = replace(_compare(subject, "zero", lengths, on_policy=False), order_matters=on.order_matters)
    numerics = probe(subject)
    bias, cosine, nearest = _distances(on)
    bias_off_policy, cosine_off_policy, nearest_off_policy = _distances(off)
    standard = on.small.only(lambda c: not c.wider)
    equal = standard.only(lambda c: not c.varying)
    near = standard.only(lambda c: c.distance == "near")
    near_ref = on.only(lambda c: c.distance == "near").of_one_target
    at_equal_lengths = on.only(lambda c: c.distance == "near" and not c.varying).of_one_target
    named = next((v for v in (near_ref, at_equal_lengths) if TARGETS[v].has_gradient), nearest)
    scales = _scales(on, nearest)
    result = AuditResult(
        name=subject.name,
        kind=subject.kind,
        framework=subject.framework,
        verdict=on.verdict,
        verdict_off_policy=off.verdict,
        holds=on.holds,
        holds_off_policy=off.holds,
        verdict_small_batches=on.small.verdict,
        verdict_off_policy_small_batches=off.small.verdict,
        bias_by_batch=bias_by_batch(on, nearest, lambda size: measure(subject, at_batch_size(size), advantages)),
        bias_by_distance={d: standard.only(lambda c, d=d: c.distance == d).bias[named] for d in DISTANCES},
        scale_varies=on.scale_varies,
        scale_varies_off_policy=off.scale_varies,
        decomposition=on.decomposition,
        decomposition_off_policy=off.decomposition,
        scale=next(iter(scales.values()), None),
        scale_by_shape=scales,
        bias=bias,
        cosine=cosine,
        bias_off_policy=bias_off_policy,
        cosine_off_policy=cosine_off_policy,
        nearest=nearest,
        nearest_off_policy=nearest_off_policy,
        variance=_variance(standard, nearest),
        variance_near=_variance(near, nearest),
        has_gradient=any(m.gradient.typical != 0 for m in on.small.measured),
        depends_on_reference=_depends_on_reference(subject, advantages),
        length_sensitive=standard.verdict != equal.verdict,
        verdict_standard=on.on_standard_problems,
        off_with=on.off_with,
        verdict_near=near_ref,
        verdict_near_fixed_lengths=at_equal_lengths,
        verdict_fixed_lengths=on.small.only(lambda c: not c.varying).verdict,
        dead_zone=numerics.dead_below is not None or numerics.dead_above is not None,
        dead_below=numerics.dead_below,
        dead_above=numerics.dead_above,
        float32_wrong_from=numerics.wrong_from,
        deterministic=_deterministic(subject),
        finite=numerics.finite and on.small.is_finite and off.small.is_finite,
        finite_in_float64=on.small.is_finite,
        touches_padding=any(m.gradient.on_padding for m in on.small.measured),
        # The batches that this package makes for a framework's own code have no such masks.
        reads_masked=None if subject.kind == "framework" else reads_masked(subject),
        stumbles_over_gaps=None if subject.kind == "framework" else stumbles_over_gaps(subject),
        finite_if_empty=None if subject.kind == "framework" else is_finite_if_empty(subject),
        order_matters=on.order_matters,
        divides_by_length=on.verdict == "unknown" and on.small.is_finite and divides_by_length(subject),
        verdict_by_problem={
            c.name: on.small.only(lambda k, c=c: k is c).verdict for c in (m.case for m in on.small.measured)
        },
        anatomy=_take_apart(subject),
    )
    if not result.deterministic:
        result = replace(result, verdict="unknown", verdict_off_policy="unknown", holds=None, holds_off_policy=None)
    return replace(result, advice=advise(result, subject))


def _take_apart(subject: Subject) -> Anatomy | None:
    """The parts of a loss; None for one that fails on the batches of the probes."""
    try:
        return read_anatomy(subject)
    except LossCallError:
        return None


def _compare(subject: Subject, advantages: Advantages, lengths: Lengths, *, on_policy: bool) -> AtEverySize:
    """Compare the gradients in small batches and in the limit."""
    small = measure(subject, cases(on_policy, lengths), advantages, on_policy=on_policy)
    large = in_large_vocabulary(subject, advantages, on_policy=on_policy)
    return AtEverySize(
        small if large is None else replace(small, measured=[*small.measured, large]),
        measure(subject, limit_cases(on_policy, lengths), advantages, on_policy=on_policy),
        lambda: measure(subject, in_pairs(on_policy, lengths), advantages, on_policy=on_policy),
    )


def _distances(found: AtEverySize) -> tuple[dict[TargetName, float], dict[TargetName, float], TargetName]:
    """Bias, cosine and nearest target over the standard problems in small batches.

    An average can hide a single problem without a match: a wider one, or one with a small gradient. In that case the
    largest distance on any problem is returned.
    """
    standard = found.small.only(lambda c: not c.wider)
    shown = found.small if standard.is_nothing else standard
    hidden = found.small.verdict == "unknown" and shown.bias[shown.nearest] <= MATCH
    bias = found.small.worst if hidden else shown.bias
    match = found.limit.match or found.limit.match_at_own_scales
    nearest = match.target if match else shown.nearest
    return _named(bias), _named(shown.cosine), cast(TargetName, nearest)


def _named(numbers: dict[str, float]) -> dict[TargetName, float]:
    return cast("dict[TargetName, float]", numbers)


def _scales(on: AtEverySize, nearest: TargetName) -> dict[str, float]:
    """The scale of each batch shape: in small batches, or in the limit if the verdict holds there only."""
    shown = on.limit if on.holds == "large-batches" else on.small
    if shown.is_nothing or not shown.is_finite:
        return {}
    return {_shape_name(shape): x for shape, x in shown.scales[nearest].items()}


def _variance(on: Comparison, nearest: TargetName) -> float | None:
    """The mean variance, in units of the nearest target; None for a loss that descends none."""
    scales = on.scales[nearest]
    if on.is_nothing or not on.is_finite or min(scales.values()) <= 0:
        return None
    deviations = [m.gradient.deviation / scales[m.case.shape] for m in on.measured]
    return sum(x * x for x in deviations) / len(deviations)


def _depends_on_reference(subject: Subject, advantages: Advantages) -> bool:
    """Whether another reference changes the gradient of any group of completions on a problem that is not near ref."""
    for case in cases(on_policy=True):
        if case.distance != "near":
            problem = case.problem
            moved = replace(problem, ref_logits=problem.ref_logits.flip(-1))
            members, _ = every_group(problem, case.group_size, ordered=not subject.exchangeable)
            advantage = advantage_of(problem, advantages)
            for some in [members] if subject.stacks else members.split(FEW_GROUPS):
                here, there = (every_gradient(subject, p, some, advantage)[0] for p in (problem, moved))
                if not torch.allclose(here, there, rtol=MATCH, atol=0.0, equal_nan=True):
                    return True
    return False


def _deterministic(subject: Subject) -> bool:
    """Whether the same batch gives the same gradient twice."""
    problem = cases(on_policy=True)[0].problem
    batch = from_problem(problem, torch.tensor([[0, 1]]), advantage_of(problem, "zero"))
    once, again = (evaluate(subject, batch)[1] for _ in range(2))
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(once, again, strict=True))


def _shape_name(shape: Shape) -> str:
    rows, columns, varying, _ = shape
    return f"{rows} x {columns}, {'varying' if varying else 'fixed'}"
