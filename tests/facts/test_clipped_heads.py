"""The off-policy forms of Liu et al.: a coefficient under PPO's min-clip, in the advantage or in a head of its own."""

import pytest
import torch
from tolerances import EXACT

from klgrad.core.estimators import k2, k3

EPSILON, BETA = 0.2, 0.5
generator = torch.Generator().manual_seed(1)
OLD, REF, REWARD, AWAY = torch.randn(4, 6, generator=generator, dtype=torch.float64)
REF = REF.log_softmax(0)
SLOPES = {"k2": k2.slope, "k3": k3.slope}
slopes = pytest.mark.parametrize("slope", SLOPES.values(), ids=SLOPES)


def surrogate(ratio, advantage):
    """min(ρA, clip(ρ, 1 - ε, 1 + ε) A)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)


def gradients(logits, slope):
    """By the logits, every outcome summed under the old policy: one head, two heads, and without a clip."""
    logits = logits.clone().requires_grad_()
    logp, old = logits.log_softmax(0), OLD.log_softmax(0)
    ratio, coefficient = (logp - old).exp(), slope((logp - REF).detach())
    losses = (
        surrogate(ratio, REWARD - BETA * coefficient),
        surrogate(ratio, REWARD) + surrogate(ratio, -BETA * coefficient),
        ratio * (REWARD - BETA * coefficient),
    )
    return [torch.autograd.grad(old.exp() @ each, logits, retain_graph=True)[0] for each in losses]


def regularised(logits, slope):
    """∇E_π[r] less β times the gradient that the coefficient has on fresh samples."""
    logits = logits.clone().requires_grad_()
    logp = logits.log_softmax(0)
    kl = logp.exp() @ (logp - REF) if slope == k2.slope else REF.exp() @ (REF - logp)
    return torch.autograd.grad(logp.exp() @ REWARD - BETA * kl, logits)[0]


@slopes
@pytest.mark.parametrize("away", [0.0, 0.05])
def test_inside_the_clip_both_forms_are_exact_off_policy(slope, away):
    logits = OLD + away * AWAY
    ratio = (logits.log_softmax(0) - OLD.log_softmax(0)).exp()
    assert ((ratio - 1).abs() < EPSILON).all()
    for found in gradients(logits, slope):
        EXACT.check_vector(found, regularised(logits, slope))


@slopes
def test_outside_the_clip_both_are_biased_and_differ(slope):
    logits = OLD + AWAY
    one, two, unclipped = gradients(logits, slope)
    target = regularised(logits, slope)
    EXACT.check_vector(unclipped, target)
    for found in (one, two):
        assert (found - target).norm() > 0.05 * target.norm()
    assert (one - two).norm() > 0.05 * target.norm()


def test_the_clip_drops_an_outcome_by_the_sign_of_its_advantage():
    """The weight of a score is ρA, or 0 where the ratio has left the band in the direction of the advantage."""
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.5, 1.5], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)
    (slope,) = torch.autograd.grad(surrogate(ratio, advantage).sum(), ratio)
    EXACT.check_vector(slope * (ratio != 1), torch.tensor([1.0, 0, 0, 0, 0, -1.0], dtype=torch.float64))
