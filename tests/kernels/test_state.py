"""Sums over parts of the vocabulary merge into those of the whole, for any parts in any order."""

import pytest
import torch
from hypothesis import given, strategies as st
from tolerances import EXACT, NEAR_KL, SINGLE

from klgrad.kernels import state


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
    pairs = (
        [state.merge(states[:, :half]), state.merge(states[:, half:])] if half < len(parts) else [state.merge(states)]
    )
    twice = state.merge(torch.stack(pairs, 1))
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
