"""TRL's `DistillationTrainer` against divergences written down here, summed over every pair of completions."""

import itertools

import pytest
import torch
from some import first
from tolerances import EXACT

from klgrad.audit.batch import from_problem
from klgrad.audit.subject import Subject, evaluate, expected_gradient
from klgrad.enumeration import autoregressive, every_group
from klgrad.frameworks import FRAMEWORKS
from klgrad.frameworks.trl import distillation

pytestmark = [
    pytest.mark.skipif(FRAMEWORKS["trl"].installed is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # it warns of its own affairs
    pytest.mark.slow,
]

SMALL = autoregressive(3, 2, ends=True, seed=24, away_from_ref=1.0, off_policy=1.0)
EQUAL = autoregressive(3, 2, ends=False, seed=25, away_from_ref=1.0, off_policy=1.0)


def kl(p, q):
    return (p * (p.log() - q.log())).sum(-1)


def divergence(beta, logits, ref_logits):
    """KL(π‖ref) at β = 1 and KL(ref‖π) at β = 0; between them β KL(ref‖m) + (1-β) KL(π‖m), m = (1-β)π + β ref."""
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    if beta in (0.0, 1.0):
        return kl(p, q) if beta else kl(q, p)
    mixture = (1 - beta) * p + beta * q
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


def group_by_group(subject):
    return Subject(subject.name, "framework", subject.loss)


def expected(subject, problem):
    found = expected_gradient(group_by_group(subject), problem, 2, torch.zeros(len(problem.space)).double())
    return found.mean[: problem.logits.numel()]


def mean_over_pairs(problem, beta):
    """E of the gradient of the mean over the tokens of a pair, with both completions from the sampler."""
    logits = problem.logits.clone().requires_grad_()
    tokens = problem.at_tokens(divergence(beta, logits, problem.ref_logits)).sum(-1)
    lengths = problem.space.mask.sum(-1)
    pairs = [torch.tensor(pair) for pair in itertools.product(range(len(problem.space)), repeat=2)]
    losses = [problem.probability[pair].prod() * tokens[pair].sum() / lengths[pair].sum() for pair in pairs]
    (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), logits)
    return gradient.flatten()


@pytest.mark.parametrize("on_policy", first([False, True], 1))
@pytest.mark.parametrize("beta", [1.0, 0.5, 0.2, 0.0])
def test_the_exact_gradient_is_that_of_the_divergence_written_down(beta, on_policy):
    problem = SMALL.on_policy() if on_policy else SMALL
    EXACT.check_vector(expected(distillation(beta=beta), problem), mean_over_pairs(problem, beta))


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_at_equal_lengths_it_descends_the_divergence_with_the_visits_held_fixed(beta):
    """β = 0.5 has no record among the targets of the audit: it is the Jensen-Shannon divergence of each next token."""
    problem = EQUAL.on_policy()
    logits = problem.logits.clone().requires_grad_()
    visits = problem.prefix_probability(problem.logits)
    total = (visits * divergence(beta, logits, problem.ref_logits)).sum()
    (right,) = torch.autograd.grad(total, logits)
    EXACT.check_vector(expected(distillation(beta=beta), problem), right.flatten() / problem.space.mask.shape[1])


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_temperature_divides_the_logits_of_both_models(beta):
    members, _ = every_group(SMALL, 2)
    batch = from_problem(SMALL, members, torch.zeros(len(SMALL.space)).double())
    formula = (divergence(beta, batch.logits / 2, batch.ref_logits / 2) * batch.mask).sum() / batch.mask.sum()
    loss, found = evaluate(distillation(beta=beta, temperature=2.0).large(), batch)
    EXACT.check(loss, formula)
    EXACT.check_vector(found.logits, torch.autograd.grad(formula, batch.logits)[0])
    assert not any(bool(x.any()) for x in (found.logp, found.token_reverse_kl, found.token_forward_kl))


def test_reverse_kl_is_the_default():
    from trl import DistillationConfig

    assert DistillationConfig("nowhere", use_cpu=True, bf16=False).beta == 1.0
