"""The KL over k entries and a tail, by the sum over every token that may be sampled."""

from dataclasses import replace

import oracle
import pytest
import torch
from kernels.cases import compare_gradients, make
from oracle import gradient
from tolerances import EXACT, SINGLE

from klgrad import divergences
from klgrad.errors import KernelInputError
from klgrad.kernels import fused_statistics, head_kl, lumped_kl, sampled_tail_kl, top_entries

VOCABULARY, ROWS = 9, 4
GENERATOR = torch.Generator().manual_seed(0)
LOGITS, REF, SAMPLER = torch.randn(3, ROWS, VOCABULARY, generator=GENERATOR, dtype=torch.float64)
LOG_Q = REF.log_softmax(-1)
both = pytest.mark.parametrize("divergence", ["reverse", "forward"])
NAMES = [
    "reverse",
    "forward",
    "jensen-shannon",
    "jensen-shannon(0.1)",
    "hellinger",
    "chi-square",
    "alpha(0.3)",
    "huber(1)",
]
all_divergences = pytest.mark.parametrize("divergence", [*NAMES, "0.3 forward + 0.7 reverse"])
every_k = pytest.mark.parametrize("k", [1, 3, 8])


def divided(k):
    """The policy's log-probs with gradient, the reference's k best entries, and which tokens are among them."""
    z = LOGITS.clone().requires_grad_()
    ids = LOG_Q.topk(k).indices
    in_head = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool).scatter(1, ids, True)
    return z, z.log_softmax(-1), ids, in_head


GENERATORS = {**oracle.GENERATORS, "huber(1)": oracle.huber(1.0)}
GENERATORS["0.3 forward + 0.7 reverse"] = lambda u: 0.3 * GENERATORS["forward"](u) + 0.7 * GENERATORS["reverse"](u)


def centred(log_p, log_q, divergence):
    """The terms of the divergence by its definition, for each entry, with f(1) = f'(1) = 0."""
    return log_q.exp() * GENERATORS[divergence]((log_p - log_q).exp())


def part(log_p, log_q, divergence):
    """The same, but those of a KL without p - q, which sums to 0."""
    offset = {"reverse": -1.0, "forward": 1.0, "0.3 forward + 0.7 reverse": -0.4}.get(divergence, 0.0)
    return centred(log_p, log_q, divergence) - offset * (log_p.exp() - log_q.exp())


@all_divergences
@every_k
def test_the_lumped_kl_is_that_of_its_definition(k, divergence):
    z, log_p, ids, in_head = divided(k)
    found = lumped_kl(log_p.gather(1, ids), LOG_Q.gather(1, ids), divergence)
    tail = lambda log: torch.where(in_head, 0, log.exp()).sum(-1, keepdim=True).log()
    lumps = [torch.cat([log.gather(1, ids), tail(log)], -1) for log in (log_p, LOG_Q)]
    plain, full = part(lumps[0], lumps[1], divergence).sum(-1), part(log_p, LOG_Q, divergence).sum(-1)
    EXACT.check(found, plain)
    EXACT.check_vector(gradient(found, z), gradient(plain, z))
    assert (found >= 0).all()
    assert (found <= full + EXACT.atol).all()
    if k < VOCABULARY - 1:  # a tail of one is no lump
        assert (found < full).all()


@all_divergences
@every_k
def test_the_part_of_the_head_is_a_lower_bound_that_pulls_the_head_alone(k, divergence):
    z, log_p, ids, in_head = divided(k)
    inside = log_p.gather(1, ids), LOG_Q.gather(1, ids)
    found, plain = head_kl(*inside, divergence), torch.where(in_head, centred(log_p, LOG_Q, divergence), 0).sum(-1)
    EXACT.check(found, plain)
    EXACT.check_vector(gradient(found, z), gradient(plain, z))
    assert (found >= 0).all()
    assert (found <= lumped_kl(*inside, divergence) + EXACT.atol).all()
    agreed = log_p.detach().gather(1, ids)
    assert not gradient(head_kl(log_p.gather(1, ids), agreed, divergence), z).abs().max() > EXACT.atol


def test_a_divergence_of_ones_own():
    mine = divergences.from_slope("cubic", lambda x: x + x**3)
    z, log_p, value, slope, _ = mean_over_tokens(3, mine, on_policy=True)
    full = mine.over(log_p, LOG_Q)
    EXACT.check(value, full)
    EXACT.check_vector(slope, gradient(full, z))


@both
def test_the_lumped_kl_is_the_full_one_where_the_tails_proportions_agree(divergence):
    z, log_p, ids, in_head = divided(3)
    other = torch.where(in_head, log_p + torch.linspace(-1, 1, VOCABULARY).double(), log_p + 0.4).log_softmax(-1)
    found = lumped_kl(log_p.gather(1, ids), other.detach().gather(1, ids), divergence)
    full = part(log_p, other.detach(), divergence).sum(-1)
    EXACT.check(found, full)
    EXACT.check_vector(gradient(found, z), gradient(full, z))


def mean_over_tokens(k, divergence, on_policy):
    """The expectation of `sampled_tail_kl` and its gradient over every token y, and the smallest single value."""
    z, log_p, ids, in_head = divided(k)
    log_mu = log_p.detach() if on_policy else SAMPLER.log_softmax(-1)
    value, slope, worst = 0, 0, torch.inf
    for y in range(VOCABULARY):
        ratio = None if on_policy else (log_p - log_mu)[:, y].exp()
        given = (log_p.gather(1, ids), LOG_Q.gather(1, ids), log_p[:, y], LOG_Q[:, y], in_head[:, y])
        one = sampled_tail_kl(*given, ratio=ratio, divergence=divergence)
        chance = log_mu[:, y].exp()
        value, slope = value + chance * one.detach(), slope + gradient(chance * one, z)
        worst = min(worst, float(one.detach().min()))
    return z, log_p, value, slope, worst


@all_divergences
@every_k
@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "another sampler"])
def test_head_and_sampled_tail_are_unbiased_in_value_and_in_gradient(k, divergence, on_policy):
    z, log_p, value, slope, worst = mean_over_tokens(k, divergence, on_policy)
    full = part(log_p, LOG_Q, divergence).sum(-1)
    EXACT.check(value, full)
    EXACT.check_vector(slope, gradient(full, z))
    assert worst >= 0


@both
@every_k
def test_without_its_tail_the_gradient_lacks_that_of_the_tails_part(k, divergence):
    z, log_p, _, in_head = divided(k)
    terms = part(log_p, LOG_Q, divergence)
    lost = gradient(terms.sum(-1), z) - gradient(torch.where(in_head, terms, 0), z)
    EXACT.check_vector(lost, gradient(torch.where(in_head, 0, terms), z))
    assert lost.norm() > 0.01


@every_k
def test_a_score_for_the_tail_beside_a_differentiated_head_adds_the_gradient_of_the_heads_mass(k):
    """The gradient of Σ_K p Δ contains ∇Σ_K p, which only a differentiated tail cancels, for any reference."""
    z, log_p, _, in_head = divided(k)
    delta, p = (log_p - LOG_Q).detach(), log_p.detach().exp()
    naive = gradient(torch.where(in_head, part(log_p, LOG_Q, "reverse"), 0), z)
    for y in range(VOCABULARY):
        scored = torch.where(in_head[:, y], 0, delta[:, y]) * log_p[:, y]
        naive = naive + gradient(p[:, y] * scored, z)
    excess = naive - gradient(part(log_p, LOG_Q, "reverse"), z)
    EXACT.check_vector(excess, gradient(torch.where(in_head, log_p.exp(), 0), z))
    assert excess.norm() > 0.01


@pytest.mark.parametrize("k", [3, 6])
def test_renormalising_the_head_drops_both_the_tail_and_the_price_of_the_heads_mass(k):
    """By the chain rule KL = P·KL(head) + (1-P)·KL(tail) + KL of the masses; the head's share of ∇ is P ∇KL(head)."""
    z, log_p, ids, in_head = divided(k)
    inside = [log.gather(1, ids) for log in (log_p, LOG_Q)]
    outside = [log[~in_head].view(ROWS, -1) for log in (log_p, LOG_Q)]
    kl = lambda pair: part(pair[0].log_softmax(-1), pair[1].log_softmax(-1), "reverse").sum(-1)
    mass, ref_mass = (log.exp().sum(-1) for log in inside)
    of_masses = mass * (mass / ref_mass).log() + (1 - mass) * ((1 - mass) / (1 - ref_mass)).log()
    truth = gradient(part(log_p, LOG_Q, "reverse"), z)
    renormalised = gradient(mass.detach() * kl(inside), z)
    dropped = gradient(kl(inside).detach() * mass, z) + gradient((1 - mass) * kl(outside), z) + gradient(of_masses, z)
    EXACT.check_vector(truth - renormalised, dropped)
    assert dropped.norm() > 0.01


@both
def test_from_a_teachers_stored_top_k_and_without_logits(divergence):
    """`entries_logp` of `token_statistics` have gradients with respect to hidden states and head."""
    case, wide = make((6,), 40, entries=0), make((6,), 40, entries=0)
    stored = fused_statistics.logits(case.ref_hidden, case.ref_head).log_softmax(-1).topk(5)
    in_head = (stored.indices == case.targets[:, None]).any(-1)
    in_head[0] = True  # as a mask may say, for all that the formula cares

    def losses(logp, token_logp):
        lump = lumped_kl(logp, stored.values, divergence)
        given = (logp, stored.values, token_logp, token_logp.detach() - 0.3, in_head)
        return (lump + 2 * sampled_tail_kl(*given, divergence=divergence)).sum()

    found = replace(case, entries=stored.indices).require_grad().statistics()
    log_p = fused_statistics.logits(wide.require_grad().hidden, wide.head).log_softmax(-1)
    expected = losses(log_p.gather(1, stored.indices), log_p.gather(1, wide.targets[:, None])[:, 0])
    total = losses(found.entries_logp, found.logp)
    EXACT.check(total, expected)
    compare_gradients(total, case.leaves, expected, wide.leaves, EXACT)


def test_half_precision_is_lifted():
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16)
    assert lumped_kl(logp, logp - 0.5).dtype == torch.float32
    SINGLE.check(lumped_kl(logp, logp - 0.5), lumped_kl(logp.double(), logp.double() - 0.5))


def test_a_banned_entry_makes_one_direction_infinite():
    allowed, banned = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -torch.inf]])
    inf = float("inf")
    assert float(lumped_kl(allowed, banned)) == float(lumped_kl(banned, allowed, "forward")) == inf
    for finite in (lumped_kl(banned, allowed), lumped_kl(allowed, banned, "forward"), lumped_kl(banned, banned)):
        assert 0 <= float(finite) < inf


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_top_entries_are_those_of_all_logits(masked, budget):
    case = make(vocabulary=23, bias=True, policy={"temperature": 0.7, "softcap": 3.0})
    head = case.head
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1]) if masked else None
    live = slice(None) if mask is None else mask == 1
    logits = head.transform.apply(case.hidden @ head.weight.T + head.bias)
    full = logits.detach().log_softmax(-1)
    found = top_entries(case.hidden, head, case.targets, 4, mask=mask, budget=budget)
    best = full.topk(4)
    assert torch.equal(found.ids[live], best.indices[live])
    EXACT.check(found.logp[live], best.values[live])
    EXACT.check(found.token_logp[live], full.gather(1, case.targets[:, None])[live, 0])
    assert torch.equal(found.has_token[live], (best.indices == case.targets[:, None]).any(-1)[live])
    assert not found.logp.requires_grad
    assert all(len(set(row)) == 4 for row in found.ids.tolist())


@pytest.mark.parametrize("k", [0, 23])
def test_as_many_entries_as_there_are_is_no_top(k):
    case = make(vocabulary=23)
    with pytest.raises(KernelInputError, match="k from 1 to 22"):
        top_entries(case.hidden, case.head, case.targets, k)
