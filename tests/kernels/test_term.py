"""A KL term from hidden states: the expected gradient, summed over every outcome.

A tabular policy is a linear head: the hidden state is the one-hot of the prefix, the weight is the table of logits. So
the expected gradient to the *weight* must be that of the exact divergence.
"""

import pytest
import torch
from tolerances import EXACT

from klgrad import ImportanceWeighting, KLTerm
from klgrad.enumeration import autoregressive, every_group, target_gradients
from klgrad.kernels import Head, token_statistics

PROBLEM = autoregressive(2, 3, ends=True, seed=8, away_from_ref=1.0)
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


TERMS = {
    "facts 11 and 16: token": (KLTerm(level="token", estimator="exact"), 1, "reverse-kl-token-sampler"),
    "fact 12: sampled": (KLTerm(), 1, "reverse-kl-sequence"),
    "forward, token": (KLTerm(divergence="forward", level="token", estimator="exact"), 1, "forward-kl-token"),
    "fact 16: prefix": (KLTerm(level="token", estimator="exact", weighting=PREFIX), 1, "reverse-kl-token"),
    "fact 17: sequence": (KLTerm(estimator="exact", weighting=PREFIX), 1, "reverse-kl-sequence"),
    "leave-one-out": (KLTerm(estimator="exact", baseline="leave_one_out"), 2, "reverse-kl-sequence"),
    "leave-one-out, prefix": (
        KLTerm(estimator="exact", baseline="leave_one_out", weighting=PREFIX), 2, "reverse-kl-sequence"),
}  # fmt: skip
"""Term, completions in a group, and target; those without a ratio, but for the first, on their own samples."""


@pytest.mark.parametrize("name", TERMS)
def test_the_expected_gradient_of_a_term(name):
    term, size, target = TERMS[name]
    on_policy = term.weighting is None and not target.endswith("sampler")
    problem = PROBLEM.on_policy() if on_policy else PROBLEM
    group = torch.zeros(2, dtype=torch.long) if size == 2 else None
    found = loss_gradients(problem, term, *every_group(problem, size), group=group)
    EXACT.check_vector(found, target_gradients(problem)[target])


@pytest.mark.parametrize("discount", [0.5, 0.9])
def test_fact_13_a_discounted_term_by_its_definition(discount):
    """E[ Σ_t ∇KL_t + s_t Σ_{s>t} g^(s-t) KL_s ], from the scores and gradients of the problem."""
    problem = PROBLEM.on_policy()
    kl, steps = problem.at_tokens(problem.prefix_kl()), problem.space.length
    future = torch.zeros_like(kl)
    for t in range(steps):
        for s in range(t + 1, steps):
            future[:, t] += discount ** (s - t) * kl[:, s]
    truth = problem.probability @ (problem.kl_gradients + future[..., None] * problem.scores).sum(1)
    term = KLTerm(estimator="exact", discount=discount)
    EXACT.check_vector(loss_gradients(problem, term, *every_group(problem, 1)), truth)
