"""The optima of the regularised problem, and where each KL term takes a policy."""

import pytest
import torch
from tolerances import EXACT, Tol

from klgrad import forward_optimum, reverse_optimum
from klgrad.core.estimators import k3
from klgrad.errors import MeaningError

REF = torch.log_softmax(torch.tensor([0.2, -1.0, 0.7, 0.0, 1.5]).double(), -1)
REWARD = torch.tensor([1.0, 0.3, -0.5, 1.0, 0.0]).double()
CONVERGED = Tol(1e-6, 1e-8, "gradient descent stopped after a fixed number of steps")


def descend(coefficient, beta, steps=4000, rate=0.5):
    """Exact policy-gradient ascent on E[r] minus β times what the coefficient descends."""
    logits = REF.clone()
    for _ in range(steps):
        p = torch.softmax(logits, -1)
        weight = REWARD - beta * coefficient(p.log() - REF)
        logits = logits + rate * p * (weight - (p * weight).sum())
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("beta", [0.05, 0.5, 5.0])
def test_both_optima_are_distributions_where_the_gradient_vanishes(beta):
    for optimum, divergence in (
        (reverse_optimum, lambda p, lp: (p * (lp - REF)).sum()),
        (forward_optimum, lambda p, lp: (REF.exp() * (REF - lp)).sum()),
    ):
        logp = optimum(REF, REWARD, beta)
        EXACT.check(logp.exp().sum(), 1.0)
        logits = logp.clone().requires_grad_()
        lp = torch.log_softmax(logits, -1)
        objective = (lp.exp() * REWARD).sum() - beta * divergence(lp.exp(), lp)
        (gradient,) = torch.autograd.grad(objective, logits)
        EXACT.check(gradient, torch.zeros_like(gradient))


def test_k1_in_reward_converges_to_pi_star_and_k3_as_loss_to_pi_star_rev():
    beta = 0.5
    star, star_rev = reverse_optimum(REF, REWARD, beta), forward_optimum(REF, REWARD, beta)
    CONVERGED.check(descend(lambda l: l, beta).exp(), star.exp())
    CONVERGED.check(descend(k3.slope, beta).exp(), star_rev.exp())
    assert (star.exp() - star_rev.exp()).abs().max() > 0.01


def test_both_optima_take_batches_and_extreme_betas():
    refs, rewards = REF.expand(3, 5), torch.stack([REWARD, -REWARD, 0 * REWARD])
    for optimum in (reverse_optimum, forward_optimum):
        for beta in (1e-6, 1e6):
            found = optimum(refs, rewards, beta)
            EXACT.check(found.exp().sum(-1), torch.ones(3))
        EXACT.check(optimum(refs, rewards, 1.0)[2], REF)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_best_may_be_very_rare_under_ref(dtype):
    """Two outcomes, reward 1 and 0: π(worse) = β (1 - ref(best)) / (1 + slack), and the best has the rest."""
    found = forward_optimum(torch.tensor([-110.0, 0.0], dtype=dtype), torch.tensor([1.0, 0.0], dtype=dtype), 0.1)
    assert found.exp().tolist() == pytest.approx([0.9, 0.1], rel=1e-5)


def test_forward_needs_a_reference_with_full_support():
    with pytest.raises(MeaningError, match="some probability"):
        forward_optimum(torch.tensor([float("-inf"), 0.0]), torch.tensor([1.0, 0.0]), 0.1)


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan")])
def test_beta_must_be_positive(beta):
    with pytest.raises(MeaningError, match="beta > 0"):
        reverse_optimum(REF, REWARD, beta)
