"""Sums over parts of the vocabulary merge into those of the whole; near the reference, far from it, with bans."""

import pytest
import torch
from hypothesis import given, strategies as st
from kernels.cases import compare, make, weighted_sum
from tolerances import EXACT, FAR, NEAR_KL, SINGLE
from torch import inf as INF

from klgrad.kernels import Head, from_logits, fused_statistics, state, token_statistics


@st.composite
def problems(draw, near: bool):
    """Logits (N, V) of both, where some entries may be banned, and a partition of the vocabulary in any order."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    vocabulary = draw(st.integers(1, 40))
    noise = lambda: torch.randn(3, vocabulary, generator=generator, dtype=torch.float64)
    z = draw(st.sampled_from([0.1, 1.0, 10.0])) * noise()
    z_ref = z + draw(st.sampled_from([1e-4, 1e-3] if near else [1e-6, 0.1, 3.0])) * noise()
    z_ref = z_ref + draw(st.sampled_from([0.0, 7.0]))
    if draw(st.booleans()):
        z_ref = z_ref.flip(-1) if not near else z_ref
    bans = draw(st.sampled_from(["none", "both"] if near else ["none", "both", "policy", "reference"]))
    hit = torch.rand(3, vocabulary, generator=generator) < 0.3
    hit[:, 0] = False  # somebody has to be allowed
    if bans in ("both", "policy"):
        z = z.masked_fill(hit, state.LOWEST)
    if bans in ("both", "reference"):
        z_ref = z_ref.masked_fill(hit, state.LOWEST)
    order = torch.randperm(vocabulary, generator=generator)
    parts = draw(st.integers(1, vocabulary))
    cuts = sorted(draw(st.lists(st.integers(1, vocabulary), min_size=parts - 1, max_size=parts - 1, unique=True)))
    return z, z_ref, [p for p in torch.tensor_split(order, cuts) if len(p)]


def of_parts(z, z_ref, parts):
    one = lambda part: state.of_logits(z[:, part], None if z_ref is None else z_ref[:, part])[2]
    return torch.stack([one(part) for part in parts], 1)


def check_finished(found, expected, tolerance):
    for name, x in found._asdict().items():
        infinite = getattr(expected, name).isinf()
        assert torch.equal(x.isinf(), infinite), name
        tolerance.check(x[~infinite], getattr(expected, name)[~infinite])


@pytest.mark.slow
@given(problems(near=False))
def test_any_partition_in_any_order_merges_to_the_whole(problem):
    z, z_ref, parts = problem
    whole, merged = state.of_logits(z, z_ref)[2], state.merge(of_parts(z, z_ref, parts))
    sums = state.State(*whole)
    infinite = {"sum_p_delta": sums.banned_mass > 0, "reverse": sums.banned_mass > 0}
    infinite |= {"ref_sum_p_delta": sums.ref_banned_mass > 0, "forward": sums.ref_banned_mass > 0}
    for name, x, y in zip(state.State._fields, merged, whole, strict=True):
        means_nothing = infinite.get(name, torch.zeros_like(x, dtype=torch.bool))
        EXACT.check(x[~means_nothing], y[~means_nothing])
    check_finished(state.finish(merged), state.finish(whole), EXACT)


@pytest.mark.slow
@given(problems(near=False))
def test_merging_parts_of_parts_is_the_same(problem):
    z, z_ref, parts = problem
    states = of_parts(z, z_ref, parts)
    half = max(1, len(parts) // 2)
    halves = (states[:, :half], states[:, half:]) if half < len(parts) else (states,)
    twice = state.merge(torch.stack([state.merge(half) for half in halves], 1))
    check_finished(state.finish(twice), state.finish(state.merge(states)), EXACT)


@pytest.mark.slow
@given(problems(near=False))
def test_the_policy_alone(problem):
    z, z_ref, parts = problem
    alone = state.finish(state.merge(of_parts(z, None, parts)))
    both = state.finish(state.merge(of_parts(z, z_ref, parts)))
    assert torch.equal(alone.logsumexp, both.logsumexp)
    assert torch.equal(alone.entropy, both.entropy)


@pytest.mark.slow
@given(problems(near=True))
def test_a_small_kl_survives_merging_in_single_precision(problem):
    """The expected value is the definition, in float64, of the same float32 logits."""
    z, z_ref, parts = problem
    z, z_ref = z.float(), z_ref.float()
    log_p, log_q = z.double().log_softmax(-1), z_ref.double().log_softmax(-1)
    truth = (log_p.exp() * (log_p - log_q)).sum(-1), (log_q.exp() * (log_q - log_p)).sum(-1)
    found = state.finish(state.merge(of_parts(z, z_ref, parts)))
    for x, y in zip((found.reverse_kl, found.forward_kl), truth, strict=True):
        assert (x >= 0).all()
        large = y > 1e-9
        NEAR_KL.check(x[large], y[large])
    SINGLE.check(found.logsumexp, z.double().logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_bregman_terms_are_smooth_where_the_series_ends(dtype):
    edge = state.NEAR[dtype]
    d = torch.linspace(0.9 * edge, 1.1 * edge, 101, dtype=torch.float64)
    a = torch.zeros_like(d)
    truth = torch.exp(-d) - 1 + d
    found, mirrored = state.bregman_terms(d.to(dtype) * 0, -d.to(dtype)), state.bregman_terms(a.to(dtype), d.to(dtype))
    tolerance = EXACT if dtype == torch.float64 else SINGLE
    tolerance.check(found[0], truth)
    tolerance.check(mirrored[0], torch.exp(d) - 1 - d)


# Precision of the statistics.


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", ["one tile", "many tiles"])
@pytest.mark.parametrize(("step", "size_of_kl"), [(1.4e-3, 1e-6), (1.4e-4, 1e-8)])
def test_a_small_kl_is_right_in_single_precision(step, size_of_kl, tiles, request):
    """Heads that differ by a little; plain float32 log-softmax has no correct digit there."""
    if tiles == "many tiles":
        request.getfixturevalue("small_tiles")
    hidden, weight = normal(32, 24, dtype=torch.float32), normal(700, 24, seed=1, dtype=torch.float32) / 24**0.5
    other = weight + step * normal(700, 24, seed=2, dtype=torch.float32) / 24**0.5
    targets = torch.zeros(32, dtype=torch.long)
    found = token_statistics(hidden, Head(weight), targets, hidden, Head(other))
    wide = [x.double() for x in (hidden, weight, hidden, other)]
    truth = fused_statistics.reference_statistics(wide[0], Head(wide[1]), targets, wide[2], Head(wide[3]))
    plain = fused_statistics.reference_statistics(hidden, Head(weight), targets, hidden, Head(other))
    assert size_of_kl / 3 < truth.reverse_kl.mean() < 3 * size_of_kl
    for name in ("reverse_kl", "forward_kl"):
        NEAR_KL.check(getattr(found, name), getattr(truth, name))
        off = (getattr(plain, name) - getattr(truth, name)).abs() / getattr(truth, name)
        assert off.max() > 10 * NEAR_KL.rtol, "the plain formula would do: this test shows nothing"


@pytest.mark.parametrize("spread", [1.0, 5.0, 20.0])
def test_a_large_kl_is_right_in_single_precision(spread):
    z, z_ref = spread * normal(2, 16, 3000, dtype=torch.float32)
    targets = torch.arange(16)
    found = from_logits(z, targets, z_ref)
    assert spread < 20 or found.reverse_kl.mean() > 50
    compare(found, fused_statistics.statistics_of_logits(z.double(), targets, z_ref.double()), SINGLE)


def test_a_peaked_policy_against_a_flat_reference():
    """With aligned maxima, the reference's sum is as large as the vocabulary, which costs digits."""
    flat = 0.01 * normal(4, 30000, dtype=torch.float32)
    peaked = flat.clone()
    peaked[:, 7] += 25
    for z, z_ref in ((peaked, flat), (flat, peaked)):
        targets = torch.full((4,), 7)
        found = from_logits(z, targets, z_ref)
        truth = fused_statistics.statistics_of_logits(z.double(), targets, z_ref.double())
        for name in ("reverse_kl", "forward_kl"):
            FAR.check(getattr(found, name), getattr(truth, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_the_same_hidden_states_and_head_have_kl_zero_exactly(dtype):
    case = make(dtype=dtype, bias=True).require_grad()
    found = token_statistics(case.hidden, case.head, case.targets, case.hidden, case.head)
    assert (found.reverse_kl == 0).all()
    assert (found.forward_kl == 0).all()
    SINGLE.check(found.logp, found.ref_logp)
    gradients = torch.autograd.grad((found.reverse_kl + found.forward_kl).sum(), case.leaves)
    assert all(g.abs().max() < 1e-5 for g in gradients)


@pytest.mark.parametrize("offset", ["none", "every entry", "one entry"])
def test_no_kl_is_negative(offset):
    """For any size of the difference: rounding gives a small positive number or 0."""
    for i, step in enumerate(10.0 ** torch.arange(-8, 2)):
        z = normal(64, 500, seed=i, dtype=torch.float32)
        z_ref = z + step * normal(64, 500, seed=i + 100, dtype=torch.float32)
        if offset != "none":
            z_ref[:, : 500 if offset == "every entry" else 1] += 5 * normal(64, 1, seed=i, dtype=torch.float32)
        found = from_logits(z, torch.zeros(64, dtype=torch.long), z_ref)
        assert found.reverse_kl.min() >= 0
        assert found.forward_kl.min() >= 0


def banned(row_of_policy, row_of_ref, likelihood=0.0, dtype=torch.float64):
    """Logits over 6 entries; either model may ban the last one."""
    z, z_ref = normal(2, 4, 6, seed=5).to(dtype)
    z_ref = z + 0.1 * z_ref
    z[:, 5] = row_of_policy if row_of_policy else likelihood
    z_ref[:, 5] = row_of_ref if row_of_ref else likelihood
    return z, z_ref


TARGETS = torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize("lowest", [-INF, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_an_entry_that_both_ban_has_no_effect(dtype, lowest):
    z, z_ref = banned(lowest, lowest, dtype=dtype)
    z, cut = z.requires_grad_(), z[:, :5].detach().clone().requires_grad_()
    found, without = from_logits(z, TARGETS, z_ref), from_logits(cut, TARGETS, z_ref[:, :5])
    compare(found, without, EXACT if dtype == torch.float64 else SINGLE)
    gradient, truth = (torch.autograd.grad(weighted_sum(x), y)[0] for x, y in ((found, z), (without, cut)))
    SINGLE.check_vector(gradient[:, :5], truth)
    assert (gradient[:, 5] == 0).all()


@pytest.mark.parametrize("likelihood", [0.0, -5.0, -20.0, -60.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("who", ["reference", "policy"])
def test_an_entry_that_one_bans_makes_one_kl_infinite_and_leaves_the_other_right(who, dtype, likelihood):
    """However unlikely the entry is under the other model."""
    z, z_ref = banned(-INF, 0, likelihood, dtype) if who == "policy" else banned(0, -INF, likelihood, dtype)
    z.requires_grad_()
    found = from_logits(z, TARGETS, z_ref)
    infinite, finite = ("reverse_kl", "forward_kl") if who == "reference" else ("forward_kl", "reverse_kl")
    assert (getattr(found, infinite) == INF).all()
    wide = z.detach().double().requires_grad_()
    over = lambda logits, bans: logits[:, :5].log_softmax(-1) if bans else logits.log_softmax(-1)[:, :5]
    log_p, log_q = over(wide, who == "policy"), over(z_ref.double(), who == "reference")
    truth = (log_p.exp() * (log_p - log_q) if who == "policy" else log_q.exp() * (log_q - log_p)).sum(-1)
    tolerance = EXACT if dtype == torch.float64 else SINGLE
    tolerance.check(getattr(found, finite), truth)
    tolerance.check(found.ref_logp, log_q.gather(1, TARGETS[:, None])[:, 0])
    (gradient,) = torch.autograd.grad(getattr(found, finite).sum(), z, retain_graph=True)
    tolerance.check_vector(gradient, torch.autograd.grad(truth.sum(), wide)[0])
    (others,) = torch.autograd.grad((found.logp + found.entropy).sum(), z)
    assert others.isfinite().all()


def test_a_token_that_the_reference_bans_has_log_prob_minus_infinity():
    z, z_ref = banned(0, -INF)
    found = from_logits(z, torch.full((4,), 5), z_ref)
    assert (found.ref_logp == -INF).all()
    assert found.logp.isfinite().all()
