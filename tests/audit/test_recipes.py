"""Losses as recipes have them, of which each is taken apart into the parts that its formula has."""

import pytest
import torch
from torch.nn.functional import relu, softplus

from klgrad.audit import audit
from klgrad.audit.sentences import divergence


def k3(logp, ref_logp):
    return torch.expm1(ref_logp - logp) - (ref_logp - logp)


def k2(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2


def k1(logp, ref_logp):
    return logp - ref_logp


def token_mean(x, mask):
    return torch.where(mask, x, 0).sum() / mask.sum()


def completion_mean(x, mask):
    return torch.where(mask, x, 0).sum(-1) / mask.sum(-1)


def of_ratio(estimate, bound, *, geometric=False):
    """A ratio that is differentiated within its bound, times an estimate."""

    def loss(logp, ref_logp, old_logp, mask):
        log = logp - old_logp
        log = completion_mean(log, mask)[:, None] if geometric else log
        return token_mean(bound(log.exp()) * estimate(logp, ref_logp), mask)

    return loss


DIFFERENTIATED = [
    # estimate, bound, where it is; what is left within it and beyond it: shares of slopes, and a constant
    (k3, lambda r: r.clamp(max=2.0), (None, 2.0), {"reverse-kl": 1.0}, {"forward-kl": 1.0}, 0.0),
    (k3, lambda r: r.clamp(0.8, 1.2), (0.8, 1.2), {"reverse-kl": 1.0}, {"forward-kl": 1.0}, 0.0),
    (k3, lambda r: r.clamp(min=0.5), (0.5, None), {"reverse-kl": 1.0}, {"forward-kl": 1.0}, 0.0),
    (k2, lambda r: r.clamp(0.8, 1.2), (0.8, 1.2), {"other": 1.0}, {"reverse-kl": 1.0}, 0.0),
    (k1, lambda r: r.clamp(0.8, 1.2), (0.8, 1.2), {"reverse-kl": 1.0}, {}, 1.0),
]


@pytest.mark.parametrize(("estimate", "bound", "edges", "inside", "beyond", "constant"), DIFFERENTIATED)
def test_a_ratio_that_is_differentiated_leaves_another_curve_beyond_its_bound(
    estimate, bound, edges, inside, beyond, constant
):
    a = audit(of_ratio(estimate, bound)).anatomy
    found = a.samples.bound
    assert a.proved
    assert found is not None
    assert found.beyond is not None
    assert (a.samples.ratio, found.low, found.high) == ("token", *edges)
    assert (a.shares, found.beyond[0].shares, found.beyond[1]) == (inside, beyond, constant)


def test_the_ratio_of_a_completion_is_differentiated_in_all_its_tokens():
    a = audit(of_ratio(k3, lambda r: r.clamp(0.8, 1.2), geometric=True)).anatomy
    assert a.proved
    assert (a.samples.ratio, a.samples.bound.low, a.samples.bound.high) == ("mean", 0.8, 1.2)
    assert a.samples.bound.beyond[0].shares == {"forward-kl": 1.0}
    assert [c.divided for c in a.credits] == [True]


def gated(ratio, inside):
    """Tokens count if a ratio, which weighs nothing, is within bounds."""

    def loss(logp, ref_logp, old_logp, mask):
        log = torch.where(mask, logp - old_logp, 0).detach()
        total = log.sum(-1, keepdim=True)
        ratios = {"token": log, "sequence": total, "mean": total / mask.sum(-1, keepdim=True)}[ratio].exp()
        return token_mean(k3(logp, ref_logp) * inside(ratios), mask)

    return loss


@pytest.mark.parametrize("ratio", ["token", "sequence", "mean"])
@pytest.mark.parametrize("edges", [(None, 1.2), (0.5, 2.0)])
def test_a_ratio_may_only_decide_which_tokens_count(ratio, edges):
    low, high = edges[0] or 0.0, edges[1]
    a = audit(gated(ratio, lambda r: (r >= low) & (r <= high))).anatomy
    assert a.proved
    assert (a.samples.weight, a.samples.ratio) == ("none", ratio)
    assert (a.samples.bound.kind, a.samples.bound.low, a.samples.bound.high) == ("gate", *edges)


OWN_PROBABILITY = [
    (lambda logp, ref_logp: (logp.exp() - ref_logp.exp()) ** 2, 2.0, {"forward-kl": 2.0}, 0.0),
    (lambda logp, ref_logp: logp.exp() * (logp - ref_logp), 1.0, {"reverse-kl": 1.0}, 1.0),
    (lambda logp, ref_logp: ref_logp.exp() * (ref_logp - logp), 1.0, {"forward-kl": 1.0}, -1.0),
]


@pytest.mark.parametrize(("value", "power", "shares", "constant"), OWN_PROBABILITY)
def test_a_probability_that_weighs_the_sample_again(value, power, shares, constant):
    result = audit(lambda logp, ref_logp, mask: token_mean(value(logp, ref_logp), mask))
    a = result.anatomy
    assert a.proved
    assert (a.power, a.shares, a.constant) == (power, shares, pytest.approx(constant))
    assert (result.verdict, result.verdict_off_policy) == ("unknown", "unknown")
    assert "leave out the factor π" in str(result.advice).lower()


@pytest.mark.parametrize("temperature", [0.5, 2.0, 3.0])
def test_a_divergence_at_a_temperature(temperature):
    def loss(logits, ref_logits, mask):
        p, q = ((z / temperature).log_softmax(-1) for z in (logits, ref_logits))
        return token_mean((q.exp() * (q - p)).sum(-1), mask)

    result = audit(loss)
    assert result.anatomy.proved
    assert (result.anatomy.temperature, result.anatomy.shares) == (temperature, {"forward-kl": 1.0})
    assert result.verdict == "unknown"
    assert divergence(result.anatomy) == f"forward KL, KL(ref‖π), of each token, at temperature {temperature:g}"


@pytest.mark.parametrize(("value", "shares"), [(k2, {"reverse-kl": 1.0}), (k3, {"forward-kl": 1.0})])
def test_a_function_of_the_mean_log_ratio(value, shares):
    def loss(logp, ref_logp, mask):
        return value(completion_mean(logp, mask), completion_mean(ref_logp, mask)).mean()

    result = audit(loss)
    a = result.anatomy
    assert a.proved
    assert (a.level, a.unit.name, a.shares, a.horizon.kind) == ("mean", "completion-mean", shares, "all")
    assert result.verdict == "unknown"


def test_an_exponential_of_the_whole_completion_is_not_compared_where_it_overflows():
    def loss(logp, ref_logp, mask):
        d = torch.where(mask, ref_logp - logp, 0).sum(-1)
        return (d.exp() - d - 1).mean()

    assert audit(loss).verdict == "forward-kl-sequence"


@pytest.mark.parametrize(
    ("value", "shares", "constant"),
    [
        (lambda l: relu(l), {"total-variation": 0.5}, 0.5),
        (lambda l: relu(-l), {"total-variation": 0.5}, -0.5),
        (lambda l: relu(-l) ** 2 / 2, {"reverse-kl": 1.0}, 0.0),
        (lambda l: relu(l) + 0.2 * relu(-l), {"total-variation": 0.6}, 0.4),
    ],
)
def test_a_coefficient_that_jumps_at_ref_by_unlike_steps(value, shares, constant):
    a = audit(lambda logp, ref_logp, mask: token_mean(value(logp - ref_logp), mask)).anatomy
    assert a.proved
    assert (a.shares, a.constant) == (pytest.approx(shares), pytest.approx(constant))


def test_a_smooth_coefficient_has_no_jump():
    a = audit(lambda logp, ref_logp, mask: token_mean(softplus(logp - ref_logp), mask)).anatomy
    assert (a.proved, a.constant, a.scale) == (True, 0.5, 0.25)


UNITS = {
    "sum": lambda x, mask: torch.where(mask, x, 0).sum(-1).mean(),
    "token-mean": token_mean,
    "completion-mean": lambda x, mask: completion_mean(x, mask).mean(),
    "fixed-length": lambda x, mask: torch.where(mask, x, 0).mean(),
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("of", ["tokens", "completions"])
def test_the_unit_beside_a_spread(unit, of):
    def loss(logp, ref_logp, mask):
        log_ratio = torch.where(mask, (logp - ref_logp).detach(), 0)
        credit = log_ratio if of == "tokens" else log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
        each = credit[mask] if of == "tokens" else credit[:, 0]
        return UNITS[unit]((credit - each.mean()) / (each.std() + 1e-8) * logp, mask)

    a = audit(loss).anatomy
    assert a.proved
    assert (a.unit.name, a.baseline.spread) == (unit, "batch")
