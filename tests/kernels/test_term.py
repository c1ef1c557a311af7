"""A KL term from hidden states: the expected gradient, summed over every outcome.

A tabular policy is a linear head: the hidden state is the one-hot of the prefix, the weight is the table of logits. So
the expected gradient to the *weight* must be that of the exact divergence.
"""

import pytest
import torch
from oracle import SEQUENCES
from tolerances import EXACT

from klgrad import ImportanceWeighting, KLTerm
from klgrad.enumeration import autoregressive, every_group, target_gradients
from klgrad.kernels import Head, token_statistics

SMALL = autoregressive(2, 3, ends=True, seed=8, away_from_ref=1.0)
PREFIX = ImportanceWeighting("prefix", bound=None)


def loss_gradients(problem, term, rows, probability, group=None):
    """E[∇loss] to the policy's weight: the weighted sum over batches of completions `rows` (M, size)."""
    weight = problem.logits.T.contiguous().requires_grad_()  # (V, P)
    total = torch.zeros_like(weight)
    for members, chance in zip(rows, probability, strict=True):
        hidden = torch.eye(problem.space.prefixes, dtype=torch.float64)[problem.space.prefix[members]]
        mask = problem.space.mask[members]
        found = token_statistics(
            hidden, Head(weight), problem.space.tokens[members], hidden, Head(problem.ref_logits.T), mask=mask
        )
        rollout = found.rollout(mask, behavior_logp=problem.behavior_logp[members], group=group)
        total += chance * torch.autograd.grad(term(rollout).loss, weight)[0]
    return total.T.flatten()


def alone(problem, term):
    """Over every completion, each as a separate batch."""
    return loss_gradients(problem, term, torch.arange(len(problem.space))[:, None], problem.probability)


ON_POLICY = {
    "fact 11: token": (KLTerm(level="token", estimator="exact"), "reverse-kl-token"),
    "fact 12: sequence": (KLTerm(estimator="exact"), "reverse-kl-sequence"),
    "fact 12: sampled": (KLTerm(), "reverse-kl-sequence"),
    "fact 13: discount 0": (KLTerm(estimator="exact", discount=0.0), "reverse-kl-token"),
    "forward, token": (KLTerm(divergence="forward", level="token", estimator="exact"), "forward-kl-token"),
}


@pytest.mark.parametrize("fact", ON_POLICY)
@pytest.mark.parametrize("problem", [p.on_policy() for p in SEQUENCES.values()], ids=SEQUENCES)
def test_terms_on_policy(problem, fact):
    term, target = ON_POLICY[fact]
    EXACT.check_vector(alone(problem, term), target_gradients(problem)[target])


@pytest.mark.parametrize("discount", [0.5, 0.9])
def test_fact_13_a_discounted_term_by_its_definition(discount):
    """E[ Σ_t ∇KL_t + s_t Σ_{s>t} g^(s-t) KL_s ], from the scores and gradients of the problem."""
    problem = SMALL.on_policy()
    kl, steps = problem.at_tokens(problem.prefix_kl()), problem.space.length
    future = torch.zeros_like(kl)
    for t in range(steps):
        for s in range(t + 1, steps):
            future[:, t] += discount ** (s - t) * kl[:, s]
    truth = problem.probability @ (problem.kl_gradients + future[..., None] * problem.scores).sum(1)
    EXACT.check_vector(alone(problem, KLTerm(estimator="exact", discount=discount)), truth)


OFF_POLICY = {
    "fact 16: token": (KLTerm(level="token", estimator="exact", weighting=PREFIX), "reverse-kl-token"),
    "fact 16: on the sampler's prefixes": (KLTerm(level="token", estimator="exact"), "reverse-kl-token-sampler"),
    "fact 17: sequence": (KLTerm(estimator="exact", weighting=PREFIX), "reverse-kl-sequence"),
    "fact 17: whole ratio": (
        KLTerm(estimator="exact", weighting=ImportanceWeighting("sequence", bound=None)),
        "reverse-kl-sequence",
    ),
}


@pytest.mark.parametrize("fact", OFF_POLICY)
@pytest.mark.parametrize("problem", SEQUENCES.values(), ids=SEQUENCES)
def test_terms_off_policy(problem, fact):
    term, target = OFF_POLICY[fact]
    EXACT.check_vector(alone(problem, term), target_gradients(problem)[target])


@pytest.mark.parametrize("sampler", [None, PREFIX], ids=["on-policy", "off-policy"])
def test_leave_one_out_over_every_group(sampler):
    problem = SMALL.on_policy() if sampler is None else SMALL
    members, probability = every_group(problem, 2)
    term = KLTerm(estimator="exact", baseline="leave_one_out", weighting=sampler)
    found = loss_gradients(problem, term, members, probability, group=torch.zeros(2, dtype=torch.long))
    EXACT.check_vector(found, target_gradients(problem)["reverse-kl-sequence"])
