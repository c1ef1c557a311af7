"""The batched tabular engine against the sample-by-sample definition."""

import pytest
import torch
from tolerances import EXACT

from klgrad.core.credit import leave_one_out
from klgrad.core.estimators import k1, k2, k3
from klgrad.papers import Settings
from klgrad.papers.tang_munos import bandits, estimates, optima

SAMPLES = 6


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    problems = bandits.draw(3, generator)
    counts = bandits.count(problems.logp.exp(), SAMPLES, generator)
    return problems, counts


def test_counts_are_of_that_many_samples_and_follow_the_policy():
    generator = torch.Generator().manual_seed(1)
    p = torch.softmax(torch.randn(2, bandits.ARMS, generator=generator).double(), -1)
    counts = bandits.count(p, 200_000, generator)
    assert counts.sum(-1).tolist() == [200_000, 200_000]
    error = (p * (1 - p) / 200_000).sqrt()
    assert float(((counts / 200_000 - p) / error).abs().max()) < 5


def test_methods_share_their_luck_and_repeats_do_not():
    generator = torch.Generator().manual_seed(1)
    p = torch.full((2, 3, bandits.ARMS), 1 / bandits.ARMS).double()
    counts = bandits.count(p, 50, generator)
    assert torch.equal(counts[0], counts[1])
    assert not torch.equal(counts[0, 0], counts[0, 1])


LOSSES = {
    "k1-reward": lambda l, logp: l.detach() * logp,
    "k1-reward-leave-one-out": lambda l, logp: (
        (l.detach() - leave_one_out(l.detach(), torch.zeros(len(l), dtype=torch.long))) * logp
    ),
    "k2-loss": lambda l, logp: k2(l),
    "k1-loss": lambda l, logp: k1(l),
    "k3-loss": lambda l, logp: k3(l),
}


@pytest.mark.parametrize("method", LOSSES)
def test_a_gradient_from_counts_is_the_gradient_by_autograd(method, problem):
    problems, counts = problem
    p = problems.logp.exp()
    found = bandits.estimated_gradients([method], (problems.logp - problems.ref_logp)[None], counts[None], p[None])[0]
    for r in range(3):
        arms = torch.repeat_interleave(torch.arange(bandits.ARMS), counts[r].long())
        logits = problems.logits[r].clone().requires_grad_()
        logp = torch.log_softmax(logits, -1)[arms]
        loss = LOSSES[method](logp - problems.ref_logp[r, arms], logp).mean()
        EXACT.check(found[r], torch.autograd.grad(loss, logits)[0])


def test_the_exact_gradient_is_that_of_the_kl(problem):
    problems, counts = problem
    logits = problems.logits.clone().requires_grad_()
    kl = bandits.divergence(torch.log_softmax(logits, -1), problems.ref_logp).sum()
    (target,) = torch.autograd.grad(kl, logits)
    log_ratio, p = problems.logp - problems.ref_logp, problems.logp.exp()
    EXACT.check(bandits.exact_gradient(log_ratio, p), target)
    EXACT.check(bandits.estimated_gradients(["exact"], log_ratio[None], counts[None], p[None])[0], target)


@pytest.mark.parametrize("samples", [2, 4])
def test_the_exact_error_with_leave_one_out_is_that_over_every_group(samples):
    generator = torch.Generator().manual_seed(3)
    logp, ref_logp = torch.log_softmax(torch.randn(2, 1, 3, generator=generator).double(), -1)
    p, log_ratio = logp.exp(), logp - ref_logp
    target = bandits.exact_gradient(log_ratio, p)
    groups = torch.cartesian_prod(*[torch.arange(3)] * samples)
    counts = torch.nn.functional.one_hot(groups, 3).sum(1).double()
    many = lambda x: x.expand(1, len(groups), 3)
    method = "k1-reward-leave-one-out"
    found = bandits.estimated_gradients([method], many(log_ratio), counts[None], many(p))[0]
    error = (p[0][groups].prod(-1) * (found - target).square().sum(-1)).sum().sqrt()
    exact = estimates._root_errors([method], log_ratio, p, target)[method][estimates.SAMPLES.index(samples)]
    EXACT.check(exact[0], error)


def test_where_k3_as_a_loss_is_going_by_the_definition():
    """KL(π*_rev‖π*) over KL(ref‖π*) of the first problem, from the formulae of the two optima."""
    beta, problems = 0.7, bandits.draw(optima.ENOUGH, torch.Generator().manual_seed(1))
    ref, reward = problems.ref_logp[0].exp(), problems.reward[0]
    optimum = ref * (reward / beta).exp()
    optimum = optimum / optimum.sum()
    low, high = reward.max(), reward.max() + beta
    for _ in range(200):  # the multiplier at which β ref / (λ - r) sums to 1
        middle = (low + high) / 2
        low, high = (middle, high) if (beta * ref / (middle - reward)).sum() > 1 else (low, middle)
    forward = beta * ref / (high - reward)
    kl = lambda a, b: (a * (a / b).log()).sum()
    found = optima.optima_apart(Settings(seed=1), beta)
    EXACT.check(found[0], kl(forward, optimum) / kl(ref, optimum))
