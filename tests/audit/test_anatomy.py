"""Each part of a loss is read as it was declared, and losses as recipes have them are told for what they are."""

import math
from itertools import product

import pytest
import torch
from tolerances import EXACT
from torch.nn.functional import kl_div, relu, softplus

from klgrad import ImportanceWeighting, KLTerm, Truncate
from klgrad.audit import audit, catalogue
from klgrad.audit.anatomy import Bound, read_anatomy
from klgrad.audit.parts import TAILS, TopK
from klgrad.audit.probes import read_curve
from klgrad.audit.procedure import advantage_of, proof_cases
from klgrad.audit.sentences import TAIL, cells, divergence, formula, part_values, report, stale, summary
from klgrad.audit.subject import as_subject, expected_gradient
from klgrad.core.divergences import REVERSE_KL, alpha, huber, jensen_shannon
from klgrad.testing import assert_descends

TERMS = {
    "token": KLTerm(level="token"),
    "sequence": KLTerm(),
    "k1_k3": KLTerm(estimator="k1_k3"),
    "discount": KLTerm(discount=0.9),
    "forward": KLTerm(divergence="forward", level="token", estimator="k3"),
    "leave-one-out": KLTerm(baseline="leave_one_out"),
    "token mean": KLTerm(level="token", reduction="token"),
    "token ratio": KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None)),
    "prefix ratio": KLTerm(weighting=ImportanceWeighting("prefix", bound=None)),
    "sequence ratio": KLTerm(weighting=ImportanceWeighting("sequence", bound=None)),
    "truncated": KLTerm(level="token", weighting=ImportanceWeighting("token", bound=Truncate(1.2))),
    "huber": KLTerm(level="token", influence_bound=1.0),
}


@pytest.fixture(params=TERMS)
def term(request):
    return TERMS[request.param]


def test_the_parts_of_a_term_are_those_that_it_declares(term):
    parts = read_anatomy(as_subject(term))
    assert parts.shares == {f"{term.divergence}-kl": 1.0}
    assert (parts.own.low, parts.own.high) == (
        (None, None) if term.influence_bound is None else pytest.approx((-term.influence_bound, term.influence_bound))
    )
    assert parts.horizon.kind == ("none" if term.discount == 0 else "all" if term.discount == 1 else "discount")
    assert parts.horizon.discount == (term.discount if 0 < term.discount < 1 else None)
    assert parts.horizon.estimate == ("" if term.discount == 0 else "k3" if term.estimator == "k1_k3" else "k1")
    assert parts.unit.name == ("sum" if term.reduction == "sequence" else "token-mean")
    assert parts.samples.ratio == ("none" if term.weighting is None else term.weighting.ratio)
    bound = None if term.weighting is None else term.weighting.bound
    assert parts.samples.bound == (None if bound is None else Bound("truncate", None, bound.high))
    assert parts.baseline.name == term.baseline.replace("_", "-")
    assert (parts.constant, parts.has_past, parts.proved) == (0.0, False, True)


DIVERGENCES = {
    # by name, the known functions and the edges
    "jensen-shannon": ({"jensen-shannon": 1.0}, None),
    "jensen-shannon(0.1)": ({"jensen-shannon(0.1)": 1.0}, None),
    "alpha(0.3)": ({"alpha(0.3)": 1.0}, None),
    "hellinger": ({"hellinger": 1.0}, None),
    "chi-square": ({"chi-square": 1.0}, None),
    "total-variation": ({"total-variation": 1.0}, None),
    "0.3 forward + 0.9 reverse": ({"reverse-kl": 0.9, "forward-kl": 0.3}, None),
    "huber(2)": ({"reverse-kl": 1.0}, 2.0),
}


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("level", "estimator", "ratio"),
    [
        pytest.param(*options, marks=() if options == ("future", "exact", "prefix") else pytest.mark.many)
        for options in product(("token", "future"), ("sampled", "exact"), ("none", "prefix"))
    ],
)
def test_the_divergence_of_a_term_is_the_one_that_it_declares(divergence, level, estimator, ratio):
    weighting = None if ratio == "none" else ImportanceWeighting("prefix", bound=None)
    term = KLTerm(divergence=divergence, level=level, estimator=estimator, weighting=weighting)
    parts = audit(term).anatomy
    shares, edge = DIVERGENCES[divergence]
    assert parts.proved
    assert parts.shares == pytest.approx(shares)
    assert (parts.curve.low, parts.curve.high) == (None if edge is None else -edge, edge)
    assert parts.own.is_zero == (estimator == "exact")
    horizon = parts.horizon
    estimate = "" if level == "token" else "exact" if estimator == "exact" else "excess"
    assert (horizon.kind, horizon.estimate, horizon.fits) == ("none" if level == "token" else "all", estimate, True)
    assert (parts.samples.ratio, parts.samples.bound) == (ratio, None)
    assert (parts.unit.name, parts.baseline.name, parts.constant, parts.top) == ("sum", "none", 0.0, None)


RATIOS = {
    # by name: the weight as a function of the ratio, and the bound
    "truncate": (lambda r: r.clamp(max=10), Bound("truncate", None, 10.0)),
    "clip": (lambda r: r.clamp(0.8, 1.2), Bound("clip", 0.8, 1.2)),
    "mask": (lambda r: r * ((r >= 0.5) & (r <= 2)), Bound("mask", 0.5, 2.0)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", RATIOS)
def test_the_edges_of_a_bound_are_exact(name, dtype):
    weight, bound = RATIOS[name]

    def loss(logp, ref_logp, old_logp, mask):
        logp, ref_logp, old_logp = (x.to(dtype) for x in (logp, ref_logp, old_logp))
        each = weight((logp - old_logp).exp()).detach() * (logp - ref_logp).square() / 2
        return (each * mask).sum(-1).mean()

    parts = audit(loss).anatomy
    assert (parts.samples.bound, parts.proved) == (bound, True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_edges_of_ppo_are_exact(dtype):
    def loss(logp, ref_logp, old_logp, mask):
        logp, ref_logp, old_logp = (x.to(dtype) for x in (logp, ref_logp, old_logp))
        ratio, reward = (logp - old_logp).exp(), (logp - ref_logp).detach()
        return (torch.maximum(reward * ratio, reward * ratio.clamp(0.8, 1.2)) * mask).sum(-1).mean()

    assert audit(loss).anatomy.samples.bound == Bound("ppo", 0.8, 1.2)


def test_a_loss_may_change_what_it_is_given():
    def loss(logits, ref_logits, mask):
        p = logits.div_(1.0).log_softmax(-1)
        return of_mask((p.exp() * (p - ref_logits.log_softmax(-1))).sum(-1), mask).sum(-1).mean()

    assert audit(loss).verdict == "reverse-kl-token"


def test_a_divergence_to_the_sampler_beside_an_exact_kl():
    def loss(logp, behavior_logp, logits, ref_logits, mask):
        p = logits.log_softmax(-1)
        exact = (p.exp() * (p - ref_logits.log_softmax(-1))).sum(-1)
        return of_mask(exact + 0.1 * k2_of(logp - behavior_logp), mask).sum(-1).mean()

    result = audit(loss)
    assert (result.verdict, result.anatomy.samples.pull.shares) == ("reverse-kl-token", {"reverse-kl": 0.1})
    assert formula(result.anatomy) == "∇KL(π‖ref)_t + 0.1 log(π_t/μ_t)"


def test_a_bounded_pull_to_the_sampler_is_not_told_as_a_whole_one():
    loss = lambda logp, ref_logp, old_logp: k3_of(logp - ref_logp) + 0.3 * k2_of((logp - old_logp).clamp(-1, 1))
    assert not audit(loss).anatomy.proved


def test_a_veto_by_a_rare_ratio_is_not_told_as_none():
    def loss(logp, ref_logp, old_logp, mask):
        kept = ~((logp - old_logp < math.log(1e-4)) & mask).any(-1, keepdim=True)
        return of_mask(kept * k3_of(logp - ref_logp), mask).sum(-1).mean()

    assert audit(loss).anatomy.proved_fresh
    assert not audit(loss).anatomy.proved


@pytest.mark.parametrize(("low", "high"), [(-0.2, None), (-0.15, 0.25), (-0.7, 0.5)])
@pytest.mark.parametrize("pull", [0.0, 0.002])
def test_a_mask_by_the_probability_and_a_divergence_to_the_sampler_beside_the_kl(low, high, pull):
    """As in prime-rl's distillation, and the masks of DPPO."""

    def loss(logp, ref_logp, old_logp, mask):
        change = (logp.exp() - old_logp.exp()).detach()
        kept = (change >= low) & (change <= (1.0 if high is None else high))
        to_sampler = pull / 2 * (logp - old_logp).square()
        each = kept * (logp - ref_logp).detach() * (logp - old_logp).exp() + to_sampler
        return of_mask(each, mask).sum(-1).mean()

    a = audit(loss).anatomy
    assert a.proved
    assert (a.samples.ratio, a.samples.bound) == ("token", Bound("probability", low, high))
    assert (a.samples.pull.shares if a.samples.pull else {}) == ({"reverse-kl": pull} if pull else {})


def test_a_divergence_to_the_sampler_beside_an_estimate_is_taken_apart():
    loss = lambda logp, ref_logp, old_logp: k3_of(logp - ref_logp) + 0.3 * k3_of(logp - old_logp)
    result = audit(loss)
    assert result.anatomy.proved
    assert formula(result.anatomy) == "1 - exp(-l_t) + 0.3 (1 - exp(-log(π_t/μ_t)))"
    assert (result.verdict, result.verdict_off_policy) == ("forward-kl-token", "unknown")


@pytest.mark.parametrize("of_completion", [False, True])
@pytest.mark.parametrize(("name", "clamp"), [("k3", 10.0), ("k2", 9.0)])
def test_a_clamp_of_the_ratio_times_an_estimate_depends_on_both(name, clamp, of_completion):
    """As in slime, miles, NeMo-RL and Cosmos-RL: no ratio alone is its bound."""

    def loss(logp, ref_logp, old_logp, mask):
        away, estimate = of_mask(logp - old_logp, mask), {"k2": k2_of, "k3": k3_of}[name](logp - ref_logp)
        away = away.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True) if of_completion else away
        return of_mask((away.exp() * estimate).clamp(max=clamp), mask).sum(-1).mean()

    a = audit(loss).anatomy
    assert a.samples.bound == Bound("value", None, clamp, estimate=name)
    assert a.proved
    assert a.curve.below == a.curve.above == 0.0
    low, high = (float(a.curve(torch.tensor([x], dtype=torch.float64))) for x in (a.curve.low, a.curve.high))
    assert min(abs(low), abs(high)) > 0.5  # up to the edges the curve pulls


def test_a_curve_that_is_no_known_function_keeps_its_points():
    curve = read_curve(lambda x: torch.tanh(x) ** 3)
    assert curve.shares == {}
    at = torch.tensor([-1.95, 0.35], dtype=torch.float64)
    assert curve(at).tolist() == pytest.approx((torch.tanh(at) ** 3).tolist())


def test_the_scale_of_a_curve_is_its_slope_at_the_reference():
    assert read_curve(lambda x: 3 * REVERSE_KL.slope(x)).scale == pytest.approx(3)
    assert read_curve(huber(0.5).slope).scale == pytest.approx(1)
    assert read_curve(alpha(-1.0).slope).scale == pytest.approx(1, rel=0.01)  # between points, by interpolation


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (
            lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2 * (logp.detach().exp() < 0.6),
            "the probability of the token itself",
        ),
        (lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2 * (len(logp) % 2 == 0), "the number of completions"),
        (
            lambda logp, ref_logp: (logp - ref_logp) ** 2 * (torch.arange(logp.shape[1]) == 0),
            "the position of the token",
        ),
        (
            lambda logp, ref_logp: (logp - ref_logp)[: (len(logp) + 1) // 2].square().mean(),
            "the order of the completions in the batch",
        ),
    ],
)
def test_what_else_a_coefficient_depends_on(loss, cause):
    parts = audit(loss).anatomy
    assert not parts.proved
    assert cause in parts.matters


@pytest.mark.parametrize("weight", [1.0, "unsure"])
def test_every_batch_has_groups_of_one_size(weight):
    """A loss may cut its batch into groups, also one that is not proved, whose causes are looked for."""

    def loss(logp, ref_logp, mask, group):
        sizes = group.bincount()
        assert bool((sizes == sizes[0]).all())
        kept = 1.0 if weight == 1.0 else logp.detach().exp() < 0.6
        return of_mask((logp - ref_logp) ** 2 / 2 * kept, mask).sum(-1).mean()

    assert audit(loss).anatomy.proved == (weight == 1.0)


def test_an_expected_scale_is_a_part():
    assert_descends("k2-loss", "divergence=reverse-kl,horizon=none,scale=1")
    with pytest.raises(AssertionError, match="scale=2"):
        assert_descends("k2-loss", "scale=2")


def test_a_loss_that_is_not_proved_meets_no_expectation():
    with pytest.raises(AssertionError, match="not proved"):
        assert_descends(lambda logp, ref_logp: (logp - ref_logp) ** 2 * (logp.detach() < -0.5), "divergence=reverse-kl")


# Losses that were told as what they are not.


def of_mask(x, mask):
    return torch.where(mask, x, 0.0)


def ppo(cost, logp, old_logp, mask, dual=None):
    """A clipped policy loss whose advantage is minus a cost."""
    ratio = (logp - old_logp).exp()
    each = torch.maximum(cost * ratio, cost * ratio.clamp(0.8, 1.2))
    each = each if dual is None else torch.where(cost > 0, torch.minimum(each, cost * dual), each)
    return of_mask(each, mask).sum(-1).mean()


def cost_of(estimate, logp, ref_logp, mask):
    return of_mask(estimate(logp - ref_logp).detach(), mask).sum(-1).double()


def over_group(x, group):
    """The mean over the group of each completion."""
    same = (group[:, None] == group[None, :]).double()
    return same @ x / same.sum(-1)


def k2_of(log_ratio):
    return log_ratio.square() / 2


def k3_of(log_ratio):
    return torch.expm1(-log_ratio) + log_ratio


def clipped_leave_one_out(logp, ref_logp, old_logp, mask, group):
    cost = cost_of(k3_of, logp, ref_logp, mask)
    n = (group[:, None] == group[None, :]).sum(-1)
    return ppo((n / (n - 1) * (cost - over_group(cost, group)))[:, None].expand_as(logp), logp, old_logp, mask, 3.0)


def divided(estimate, sign, *, by_mean=False):
    """A clipped policy loss with the cost centred and divided within its group."""

    def loss(logp, ref_logp, old_logp, mask, group):
        cost = sign * cost_of(estimate, logp, ref_logp, mask)
        mean = over_group(cost, group)
        spread = (over_group(cost**2, group) - mean**2).clamp(min=0).sqrt()
        weighed = (cost - mean) / ((mean if by_mean else spread) + 1e-6)
        return ppo(weighed[:, None].expand_as(logp), logp, old_logp, mask)

    return loss


def test_a_clip_that_no_token_near_ref_reaches_does_not_hide_the_last_token():
    def loss(logp, ref_logp, mask):
        return of_mask((logp - ref_logp).clamp(-10, 10), mask).sum(-1).mean()

    parts = audit(loss).anatomy
    assert parts.ends
    assert parts.proved
    assert (parts.own.low, parts.own.high, parts.own.below, parts.own.above) == (-10.0, 10.0, -1.0, -1.0)
    assert divergence(parts) == "nothing where -10 < l < 10"
    assert formula(parts) == "(0 where -10 < l_t < 10, else -1) + 1"


def test_a_clamp_of_k1_from_one_side_has_no_gradient_on_the_other():
    result = audit(lambda logp, ref_logp, mask: of_mask((logp - ref_logp).clamp(max=2.951), mask).sum(-1).mean())
    assert (result.dead_below, result.dead_above) == (None, pytest.approx(2.951, abs=1e-9))
    assert divergence(result.anatomy) == "nothing but a step at l = 2.95"
    assert formula(result.anatomy) == "(0 where l_t < 2.95, else -1) + 1"


def test_a_constant_that_carries_the_ratio_is_within_it():
    parts = audit(catalogue()["ratio-k1-loss"]).anatomy
    assert parts.constant == 1.0
    assert formula(parts) == "r_t (l_t + 1)"


def test_a_spread_that_overflows_is_no_error():
    """A centred sum of k1 over the spread of the batch, on the first token, where batches are odd."""

    def loss(logp, ref_logp, mask):
        cost = of_mask((logp - ref_logp).detach(), mask).sum(-1)
        centred = (cost - cost.mean()) / (cost - cost.mean()).square().mean().sqrt()
        return (centred * logp[:, 0]).mean() * (len(logp) % 2)

    assert audit(loss).verdict == "unknown"


def whitened_k3(logp, ref_logp, old_logp, mask):
    """As NeMo-RL's REINFORCE++: each token's own estimate, over the spread of the batch."""
    cost = k3_of(old_logp - ref_logp).clamp(max=10)
    live = cost[mask]
    return ppo((cost - live.mean()) / live.std().clamp(min=1e-8), logp, old_logp, mask)


@pytest.mark.parametrize("loss", [clipped_leave_one_out, divided(k3_of, 1.0), whitened_k3])
def test_a_clip_of_ppo_is_found_where_no_estimate_is_negative(loss):
    parts = audit(loss).anatomy
    assert parts.shares.keys() == {"reverse-kl", "forward-kl"}
    bound = parts.samples.bound
    assert bound is not None
    assert (bound.kind, bound.low, bound.high) == ("ppo", 0.8, 1.2)
    assert parts.proved


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_division_by_the_spread_keeps_the_sign(sign):
    parts = audit(divided(lambda log_ratio: log_ratio, sign)).anatomy
    assert (parts.shares, parts.baseline.spread, parts.baseline.signed) == ({"reverse-kl": sign}, "group", 0)
    assert ("the sign is wrong" in dict(report(parts))["divergence"]) == (sign < 0)
    assert parts.proved


def rloo_per_token(logp, ref_logp, mask, group):
    """The centred sum of k1, divided by each completion's length: no variance, since the lengths differ."""
    cost = cost_of(lambda log_ratio: log_ratio, logp, ref_logp, mask)
    n = (group[:, None] == group[None, :]).sum(-1)
    centred = n / (n - 1) * (cost - over_group(cost, group))
    return (of_mask(centred[:, None] * logp, mask).sum(-1) / mask.sum(-1)).mean()


@pytest.mark.parametrize(("name", "share"), [("k1-reward-leave-one-out", 1.0), ("k1-reward-group-mean", 0.5)])
def test_a_baseline_of_whole_completions_leaves_half_the_log_variance_under_the_sampler(name, share):
    """Of the centred sum of log π/ref without a ratio: 0, and least, where π is ref."""
    subject = catalogue()[name]
    (case, *_) = (case for case in proof_cases(False) if case.group_size == 2 and case.problem.space.ends)
    problem, space = case.problem, case.problem.space
    gradient = expected_gradient(subject, problem, 2, advantage_of(problem, "zero")).mean[
        : space.prefixes * space.vocab
    ]
    logits = problem.logits.clone().requires_grad_()
    of_tokens = logits.log_softmax(-1)[space.prefix].gather(-1, space.tokens[..., None])[..., 0]
    away = torch.where(space.mask, of_tokens - problem.ref_logp, 0.0).sum(-1)
    weights = torch.where(space.mask, problem.behavior_logp, 0.0).sum(-1).exp()
    mean = (weights * away).sum()
    half_variance = (weights * (away - mean).square()).sum() / 2
    expected = torch.autograd.grad(share * half_variance, logits)[0].flatten()
    EXACT.check_vector(gradient, expected)
    per_token = audit(rloo_per_token)
    assert "its baseline adds a drift" in stale(per_token.anatomy)
    assert stale(audit(subject).anatomy) == (
        "not corrected: half the variance of L under the sampler, L = log π/ref of the completion, "
        "which still pulls to ref and is no KL"
    )


def test_a_division_by_the_mean_is_none_by_a_spread():
    parts = audit(divided(lambda log_ratio: log_ratio, -1.0, by_mean=True)).anatomy
    assert parts.baseline.signed
    assert parts.proved  # its clip of PPO cuts by the sign of the mean
    assert "which may be below 0" in dict(report(parts))["baseline"]


def test_a_loss_that_is_not_proved_is_not_told_as_a_divergence():
    result = audit(lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2 * (logp.detach().exp() < 0.6))
    text = "not known: its coefficient depends on the probability of the token itself; of one token alone: reverse KL"
    assert [label for label, _ in report(result.anatomy)] == ["divergence", "proved"]
    assert divergence(result.anatomy) == text
    assert cells(result.anatomy) == (text, "", "", "", "")
    assert result.scale is None
    assert (result.verdict, result.verdict_off_policy) == ("unknown", "unknown")


def over_the_likeliest(
    logits, ref_logits, behavior_logits, mask, k=20, of="ref", direction="forward", tail="left-out", form=""
):
    """As recipes of distillation write it: in a vocabulary of less than k tokens it is an error."""
    cast = {"float32": lambda x: x.float(), "T = 3": lambda x: x / 3}.get(form, lambda x: x)
    logits, ref_logits = cast(logits), cast(ref_logits)
    at = {"ref": ref_logits, "policy": logits, "sampler": behavior_logits}[of].topk(k, -1).indices
    raw = [x.gather(-1, at) for x in (logits, ref_logits)]
    p, q = (x.log_softmax(-1).gather(-1, at) for x in (logits, ref_logits))
    if tail == "lumped":
        others = lambda x: torch.log1p(-x.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-12))
        p, q = (torch.cat([x, others(x)], -1) for x in (p, q))
    p = raw[0].log_softmax(-1) if tail == "renormalised" else p
    q = raw[1].log_softmax(-1) if "renormalised" in tail else q
    if direction == "js":
        middle = torch.logaddexp(p, q) - math.log(2)
        each = (p.exp() * (p - middle) + q.exp() * (q - middle)) / 2
    else:
        each = q.exp() * (q - p) if direction == "forward" else p.exp() * (p - q)
    if form == "entries":
        return torch.zeros_like(logits).scatter(-1, at, each) * mask[..., None]
    return of_mask(each.sum(-1), mask).sum(-1).mean() * (9 if form == "T = 3" else 1)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("of", ["ref", "policy"])
def test_a_top_k_is_taken_apart(of, direction, tail):
    result = audit(over_the_likeliest, settings={"of": of, "direction": direction, "tail": tail})
    parts = result.anatomy
    constant = {"forward": -1.0, "reverse": 1.0}[direction] if tail in ("left-out", "ref-renormalised") else 0.0
    assert parts.top == TopK(20, of, tail, constant)
    assert parts.shares == {f"{direction}-kl": 1.0}
    assert parts.proved
    assert result.verdict == "unknown"  # no target is a divergence over some tokens
    whose = "ref's" if of == "ref" else "the policy's"
    assert f"over {whose} 20 likeliest tokens, {TAIL[tail]}" in divergence(parts)
    assert ("add the tail" in str(result.advice).lower()) == (tail != "lumped")


@pytest.mark.parametrize("form", ["float32", "T = 3", "entries"])
def test_a_top_k_in_float32_at_a_temperature_or_of_values_per_entry(form):
    result = audit(over_the_likeliest, settings={"form": form})
    assert result.anatomy.proved
    assert (result.anatomy.top.size, result.anatomy.top.tail) == (20, "left-out")
    assert result.anatomy.temperature == pytest.approx(3.0 if form == "T = 3" else 1.0, rel=1e-6)


def test_a_tail_that_is_left_out_of_a_bounded_divergence_has_no_pull_at_ref():
    result = audit(over_the_likeliest, settings={"direction": "js"})
    assert (result.anatomy.top, result.finite) == (TopK(20, "ref", "left-out"), True)
    assert "at ref too" not in dict(report(result.anatomy))["scale"]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_shortest_lists_of_likely_tokens(k):
    parts = audit(over_the_likeliest, settings={"k": k}).anatomy
    assert parts.proved == (k == 4)
    assert divergence(parts).startswith("forward KL" if k == 4 else "not known")


def test_the_likeliest_tokens_of_the_sampler_are_those_of_the_policy_on_fresh_samples_only():
    parts = audit(over_the_likeliest, settings={"of": "sampler"}).anatomy
    assert (parts.top.of, parts.proved_fresh, parts.proved) == ("policy", True, False)


def test_a_list_of_likely_tokens_of_another_form_is_told_as_the_cause():
    def loss(logits, ref_logits, mask):
        p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        inside = p >= p.topk(min(20, p.shape[-1]), -1).values[..., -1:]
        return of_mask((inside * p.exp() * (p - q)).sum(-1) * (1 + (inside * p.exp()).sum(-1)), mask).sum(-1).mean() / 2

    text = divergence(audit(loss).anatomy)
    assert text == "not known: in a vocabulary of 512 it sees 20 entries; of one token alone: reverse KL"


# Losses as recipes have them, of which each is taken apart into the parts that its formula has.


def token_mean(x, mask):
    return torch.where(mask, x, 0).sum() / mask.sum()


def completion_mean(x, mask):
    return torch.where(mask, x, 0).sum(-1) / mask.sum(-1)


def of_ratio(estimate, bound, *, geometric=False):
    """A ratio that is differentiated within its bound, times an estimate."""

    def loss(logp, ref_logp, old_logp, mask):
        log = logp - old_logp
        log = completion_mean(log, mask)[:, None] if geometric else log
        return token_mean(bound(log.exp()) * estimate(logp - ref_logp), mask)

    return loss


DIFFERENTIATED = [
    # estimate, bound, where it is; what is left within it and beyond it: shares of slopes, and a constant
    (k3_of, lambda r: r.clamp(max=2.0), (None, 2.0), {"reverse-kl": 1.0}, {"forward-kl": 1.0}, 0.0),
    (k3_of, lambda r: r.clamp(0.8, 1.2), (0.8, 1.2), {"reverse-kl": 1.0}, {"forward-kl": 1.0}, 0.0),
    (k3_of, lambda r: r.clamp(min=0.5), (0.5, None), {"reverse-kl": 1.0}, {"forward-kl": 1.0}, 0.0),
    (k2_of, lambda r: r.clamp(0.8, 1.2), (0.8, 1.2), {"other": 1.0}, {"reverse-kl": 1.0}, 0.0),
    (lambda l: l, lambda r: r.clamp(0.8, 1.2), (0.8, 1.2), {"reverse-kl": 1.0}, {}, 1.0),
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
    a = audit(of_ratio(k3_of, lambda r: r.clamp(0.8, 1.2), geometric=True)).anatomy
    assert a.proved
    assert (a.samples.ratio, a.samples.bound.low, a.samples.bound.high) == ("mean", 0.8, 1.2)
    assert a.samples.bound.beyond[0].shares == {"forward-kl": 1.0}
    assert [c.divided for c in a.credits] == [True]


def weighed(logp, ref_logp, mask):
    return token_mean(logp.exp() * (logp - ref_logp), mask)


def of_the_mean(logp, ref_logp, mask):
    return k3_of(completion_mean(logp - ref_logp, mask)).mean()


def of_bfloat16(logp, ref_logp, mask):
    return of_mask(0.5 * (logp.bfloat16() - ref_logp.bfloat16()).double() ** 2, mask).sum(-1).mean()


@pytest.mark.parametrize("loss", [weighed, of_the_mean, of_bfloat16])
def test_what_is_not_taken_apart_is_not_told_as_a_divergence(loss):
    result = audit(loss)
    a = result.anatomy
    assert (a.proved_fresh, result.scale) == (False, None)
    assert (result.verdict, result.verdict_off_policy) == ("unknown", "unknown")
    assert dict(report(a))["divergence"].startswith("not known: ")


DISTILLED = {
    "forward KL, KL(ref‖π)": lambda p, q: kl_div(p, q, log_target=True, reduction="none").sum(-1),
    "reverse KL, KL(π‖ref)": lambda p, q: kl_div(q, p, log_target=True, reduction="none").sum(-1),
    "Jensen-Shannon divergence": lambda p, q: jensen_shannon().over(p, q),
}


@pytest.mark.parametrize("temperature", [0.5, 2.0, 3.0])
@pytest.mark.parametrize("name", DISTILLED)
def test_a_divergence_at_the_temperature_by_which_the_logits_are_divided(name, temperature):
    def loss(logits, ref_logits, mask):
        p, q = ((z / temperature).log_softmax(-1) for z in (logits, ref_logits))
        return token_mean(DISTILLED[name](p, q) * temperature**2, mask)

    a = (result := audit(loss)).anatomy
    assert a.proved
    assert max(a.unexplained.values()) <= 1e-9
    assert a.to_dict()["temperature"] == temperature
    assert result.scale == pytest.approx(temperature**2 * (0.25 if name.startswith("Jensen") else 1))
    assert dict(report(a))["divergence"] == f"{name}, at temperature {temperature:g}"
    assert f"near ref, at temperature {temperature:g}, in this unit" in dict(report(a))["scale"]
    assert part_values(a)["divergence"].endswith(f" at temperature {temperature:g}")
    assert (result.verdict, result.verdict_off_policy) == ("unknown", "unknown")


def test_unlike_temperatures_are_no_divergence():
    def loss(logits, ref_logits, mask):
        p, q = (logits / 2).log_softmax(-1), ref_logits.log_softmax(-1)
        return token_mean((q.exp() * (q - p)).sum(-1), mask)

    a = audit(loss).anatomy
    assert (a.proved_fresh, a.temperature) == (False, 1.0)


def test_a_loss_that_is_not_proved_may_still_ignore_the_reference():
    result = audit(lambda logp, ref_logp: (logp - ref_logp) * (logp.detach().exp() < 0.6))
    assert not result.depends_on_reference
    assert str(result.advice).startswith("Regularises nothing: ref has no effect; its coefficient depends on")


def test_a_loss_of_odd_batches_sees_the_reference():
    assert audit(lambda logp, ref_logp: (logp - ref_logp) ** 2 * (len(logp) % 2)).depends_on_reference


def gated(logp, ref_logp, old_logp, mask):
    """A ratio decides which tokens count, and weighs none."""
    return token_mean(k3_of(logp - ref_logp) * ((logp - old_logp).detach().exp() < 1.2), mask)


def before(logp, ref_logp, old_logp, mask):
    ratio = of_mask(logp - old_logp, mask).detach()
    return token_mean((ratio.cumsum(-1) - ratio).exp() * k2_of(logp - ref_logp), mask)


def beside_a_constant(logp, ref_logp, old_logp, mask):
    return token_mean((logp - old_logp).detach().exp() * k2_of(logp - ref_logp) + logp, mask)


@pytest.mark.parametrize("loss", [gated, before, beside_a_constant])
def test_a_ratio_that_enters_in_another_way_is_not_proved_on_stale_samples(loss):
    result = audit(loss)
    assert (result.anatomy.proved_fresh, result.anatomy.proved) == (True, False)
    assert (result.verdict != "unknown", result.verdict_off_policy) == (True, "unknown")
    assert summary(result.anatomy, on_policy=False).startswith("not proved: ")


def test_an_exponential_of_the_whole_completion_is_not_compared_where_it_overflows():
    def loss(logp, ref_logp, mask):
        d = torch.where(mask, ref_logp - logp, 0).sum(-1)
        return (d.exp() - d - 1).mean()

    assert audit(loss).verdict == "forward-kl-sequence"


def test_a_coefficient_that_jumps_at_ref_is_a_step():
    a = audit(lambda logp, ref_logp, mask: token_mean(relu(logp - ref_logp), mask)).anatomy
    assert a.proved
    assert divergence(a).startswith("nothing but a step at l = 0")


def test_a_smooth_coefficient_has_no_step():
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


def test_a_reward_that_is_not_detached_is_an_entropy_bonus_of_whole_completions():
    def loss(logp, ref_logp, mask):
        return (of_mask(logp - ref_logp, mask).sum(-1) * of_mask(logp, mask).sum(-1)).mean()

    parts = audit(loss).anatomy
    assert (parts.shares, parts.horizon.kind) == ({"reverse-kl": 1.0}, "all")
    assert (parts.entropy, parts.entropy_of_whole, parts.constant) == ((1.0, 0.0), True, 0.0)
    assert parts.proved


def test_the_same_without_a_reference_is_that_bonus_alone():
    parts = audit(lambda logp, mask: (of_mask(logp, mask).sum(-1) ** 2).mean()).anatomy
    assert (parts.is_nothing, parts.entropy, parts.unit.name) == (True, (2.0, 0.0), "sum")
    assert parts.proved
