"""Top-k distillation on another sampler's completions, by the sum over all of them."""

import itertools

import pytest
import torch
from tolerances import EXACT

from klgrad import ImportanceWeighting, KLTerm, Rollout
from klgrad.kernels import TokenStatistics, TopEntries
from klgrad.trl.config import TRLObjective, fields_of
from klgrad.trl.scorer import with_top_k_kl

WORDS, LENGTH, K = 4, 2, 2
STATES = 1 + WORDS  # before the first word, and after each


def tables():
    generator = torch.Generator().manual_seed(3)
    z, ref, sampler = torch.randn(3, STATES, WORDS, generator=generator, dtype=torch.float64)
    return z.requires_grad_(), z.log_softmax(-1), ref.log_softmax(-1), sampler.log_softmax(-1)


def completions():
    words = torch.tensor(list(itertools.product(range(WORDS), repeat=LENGTH)))
    return words, torch.stack([torch.zeros(len(words), dtype=torch.long), words[:, 0] + 1], 1)


def of(table, words, states):
    return table[states, words]


def expected(term, tail="sampled"):
    """The mean, over everything that the sampler may say, of the gradient of the term."""
    z, log_p, log_q, log_mu = tables()
    words, states = completions()
    ids = log_q.topk(K).indices[states]
    gathered = lambda table: table[states].gather(2, ids)
    best = TopEntries(ids, gathered(log_q), of(log_q, words, states), (ids == words[..., None]).any(-1))
    found = TokenStatistics(of(log_p, words, states), torch.zeros(()), None, None, None, gathered(log_p))
    mask, behavior = torch.ones_like(words), of(log_mu, words, states)
    fields = {name.removeprefix("kl_"): value for name, value in fields_of(term).items()}
    objective = TRLObjective(**{"ratio_bound": "none", **fields}, reduction="sequence", top_k=K, tail=tail)
    assert (objective.term, objective.bound) == (term, None)
    found = with_top_k_kl(found, best, objective, mask, behavior)
    rollout = Rollout(
        found.logp,
        found.ref_logp,
        mask,
        behavior_logp=behavior,
        token_reverse_kl=found.reverse_kl,
        token_forward_kl=found.forward_kl,
    )
    chance = behavior.sum(-1).exp()
    EXACT.check(chance.sum(), 1.0)
    return torch.autograd.grad((chance[:, None] * term(rollout).per_token).sum(), z)[0]


def sequence_kl():
    z, log_p, log_q, _ = tables()
    words, states = completions()
    p, q = of(log_p, words, states).sum(-1), of(log_q, words, states).sum(-1)
    return torch.autograd.grad((p.exp() * (p - q)).sum(), z)[0]


def kl_where_the_sampler_goes(divergence):
    z, log_p, log_q, log_mu = tables()
    visits = torch.cat([torch.ones(1), log_mu[0].exp()])
    a, b = (log_p, log_q) if divergence == "reverse" else (log_q, log_p)
    return torch.autograd.grad((visits * (a.exp() * (a - b)).sum(-1)).sum(), z)[0]


@pytest.mark.parametrize("ratio", ["prefix", "sequence"])
def test_the_sequence_kl(ratio):
    EXACT.check_vector(expected(KLTerm(estimator="exact", weighting=ImportanceWeighting(ratio, None))), sequence_kl())


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_the_token_kl_where_the_sampler_goes(divergence):
    term = KLTerm(divergence=divergence, level="token", estimator="exact")  # only the tail needs a ratio
    EXACT.check_vector(expected(term), kl_where_the_sampler_goes(divergence))


def test_one_lump_is_another_divergence():
    """A smaller one: its gradient is told apart, so the tests above would see the tail missing."""
    term = KLTerm(level="token", estimator="exact")
    full = kl_where_the_sampler_goes("reverse")
    assert (expected(term, "lump") - full).norm() > 0.05 * full.norm()
