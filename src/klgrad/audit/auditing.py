"""`audit`: from a loss to its verdict and advice."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..enumeration import Problem, every_group
from ..targets import TARGETS, Verdict
from .advising import advise
from .audit_result import AuditResult
from .batch import from_problem
from .calling import Settings
from .gradient import evaluate, every_gradient, expected_gradient
from .numerics import probe
from .problems import Lengths, cases
from .subject import Subject, as_subject
from .verdict import MATCH, Comparison, Measurement, Shape

Advantages = Literal["zero", "random"]

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
    # Off-policy a KL may be frozen at the old policy, and moving the reference would change it: zero advantages.
    off = _compare(subject, "zero", lengths, on_policy=False)
    numerics = probe(subject)
    bias, cosine, nearest = _distances(on)
    bias_off_policy, cosine_off_policy, nearest_off_policy = _distances(off)
    standard = on.only(lambda c: not c.wider)
    equal = standard.only(lambda c: not c.varying)
    near = standard.only(lambda c: c.distance == "near")
    scales = {} if on.is_nothing or not on.is_finite else {_shape_name(s): x for s, x in on.scales[nearest].items()}
    result = AuditResult(
        name=subject.name,
        kind=subject.kind,
        framework=subject.framework,
        verdict=on.verdict,
        verdict_off_policy=off.verdict,
        scale=next(iter(scales.values()), None),
        scale_by_shape=scales,
        bias=bias,
        cosine=cosine,
        bias_off_policy=bias_off_policy,
        cosine_off_policy=cosine_off_policy,
        nearest=nearest,
        nearest_off_policy=nearest_off_policy,
        variance=_variance(standard, on.verdict),
        variance_near=_variance(near, near.verdict),
        has_gradient=any(m.gradient.typical != 0 for m in on.measured),
        depends_on_reference=_depends_on_reference(subject, advantages),
        length_sensitive=standard.verdict != equal.verdict,
        verdict_standard=standard.verdict,
        off_with=_off_with(on, standard.verdict, equal.verdict),
        verdict_near=near.verdict,
        verdict_fixed_lengths=on.only(lambda c: not c.varying).verdict,
        dead_zone=numerics.dead_from is not None,
        dead_zone_from=numerics.dead_from,
        float32_wrong_from=numerics.wrong_from,
        deterministic=_deterministic(subject),
        finite=numerics.finite and on.is_finite and off.is_finite,
        finite_in_float64=on.is_finite,
        touches_padding=any(m.gradient.on_padding for m in on.measured),
        verdict_by_problem={c.name: on.only(lambda k, c=c: k is c).verdict for c in (m.case for m in on.measured)},
    )
    return replace(result, advice=advise(result, subject))


def _compare(subject: Subject, advantages: Advantages, lengths: Lengths, *, on_policy: bool) -> Comparison:
    return Comparison(
        [
            Measurement(c, expected_gradient(subject, c.problem, c.group_size, _advantage(c.problem, advantages)))
            for c in cases(on_policy, lengths)
        ]
    )


def _distances(found: Comparison) -> tuple[dict[Verdict, float], dict[Verdict, float], Verdict]:
    """Bias, cosine and nearest target over the standard problems.

    An average can hide a single problem without a match: a wider one, or one with a small gradient. In that case the
    largest distance on any problem is returned.
    """
    standard = found.only(lambda c: not c.wider)
    shown = found if standard.is_nothing else standard
    hidden = found.verdict == "unknown" and shown.bias[shown.nearest] <= MATCH
    return found.worst if hidden else shown.bias, shown.cosine, shown.nearest


def _off_with(on: Comparison, standard: Verdict, equal: Verdict) -> list[str]:
    """The wider problems on which the verdict of the standard ones, or else that at equal lengths, does not hold."""
    known = equal if standard == "unknown" else standard
    if known == "unknown":
        return []
    compared = [m for m in on.measured if m.case.wider and (known == standard or not m.case.varying)]
    return [m.case.wider for m in compared if not on.matches(m, known)]


def _advantage(problem: Problem, kind: Advantages) -> Tensor:
    n = len(problem.space)
    if kind == "zero":
        return torch.zeros(n, dtype=torch.float64)
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def _variance(on: Comparison, verdict: Verdict) -> float:
    """The mean variance, at scale 1 where there is a verdict, which has a positive scale on every shape."""
    matched = TARGETS[verdict].has_gradient
    scales = on.scales[on.nearest]
    deviations = [m.gradient.deviation / (scales[m.case.shape] if matched else 1.0) for m in on.measured]
    return sum(x * x for x in deviations) / len(deviations)


def _depends_on_reference(subject: Subject, advantages: Advantages) -> bool:
    """Whether another reference changes the gradient of any group of completions on a problem that is not near ref."""
    for case in cases(on_policy=True):
        if case.distance != "near":
            problem = case.problem
            moved = replace(problem, ref_logits=problem.ref_logits.flip(-1))
            members, _ = every_group(problem, case.group_size, ordered=not subject.exchangeable)
            advantage = _advantage(problem, advantages)
            for some in [members] if subject.stacks else members.split(FEW_GROUPS):
                here, there = (every_gradient(subject, p, some, advantage)[0] for p in (problem, moved))
                if not torch.allclose(here, there, rtol=MATCH, atol=0.0, equal_nan=True):
                    return True
    return False


def _deterministic(subject: Subject) -> bool:
    """Whether the same batch gives the same gradient twice."""
    problem = cases(on_policy=True)[0].problem
    batch = from_problem(problem, torch.tensor([[0, 1]]), _advantage(problem, "zero"))
    once, again = (evaluate(subject, batch)[1] for _ in range(2))
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(once, again, strict=True))


def _shape_name(shape: Shape) -> str:
    rows, columns, varying = shape
    return f"{rows} x {columns}, {'varying' if varying else 'fixed'}"
