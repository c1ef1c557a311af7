"""The comparison of figure 3: its steps are those of the tabular engine, and its shares are probabilities."""

import pytest
import torch
from tolerances import EXACT, SINGLE

from klgrad.papers.tang_munos import bandits, fig3_minimise
from klgrad.papers.tang_munos.fig3_minimise import EXPERIMENTS, K3, PROBLEMS_AT_A_TIME as EXPERIMENT, VANILLA

METHODS = ["k1-reward", "k3-loss"]


@pytest.mark.parametrize("samples", [1, 5])
def test_a_step_descends_the_gradient_of_the_engine(samples):
    generator = torch.Generator().manual_seed(0)
    problems = bandits.draw(4, generator, scale=1.5)
    logits = problems.logits.expand(2, -1, -1).clone()
    logits[K3] += torch.randn(logits[K3].shape, generator=generator, dtype=logits.dtype)
    logp, ref_logp = torch.log_softmax(logits, -1), problems.ref_logp.expand(2, -1, -1)
    arms = bandits.sample(logp.exp(), samples, generator)
    counts = torch.zeros_like(logits).scatter_add_(-1, arms, torch.ones(arms.shape, dtype=logits.dtype))
    gradient = bandits.estimated_gradients(METHODS, logp - ref_logp, counts, logp.exp())
    moved = logits.clone()
    fig3_minimise.descend(moved, logp.exp(), arms, ref_logp)
    EXACT.check(moved, logits - bandits.RATE * gradient)


def test_counts_are_of_the_sampled_arms():
    p = torch.softmax(torch.randn(3, bandits.ARMS, generator=torch.Generator().manual_seed(2)).double(), -1)
    arms, counts = (f(p, 7, torch.Generator().manual_seed(3)) for f in (bandits.sample, bandits.count))
    expected = torch.stack([torch.bincount(row, minlength=bandits.ARMS) for row in arms]).double()
    assert torch.equal(counts, expected)


def test_without_noise_k3_descends_the_forward_kl_and_vanilla_the_reverse(monkeypatch):
    monkeypatch.setattr(fig3_minimise, "STEPS", (1,))
    found = fig3_minimise.exact_descent(1.5, 3, 1, torch.Generator().manual_seed(0))
    problems = bandits.draw(3, torch.Generator().manual_seed(0), torch.float32, scale=1.5)
    forward = lambda logp: bandits.divergence(problems.ref_logp, logp)
    reverse = lambda logp: bandits.divergence(logp, problems.ref_logp)
    for method, objective in ((VANILLA, reverse), (K3, forward)):
        logits = problems.logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(torch.log_softmax(logits, -1)).sum(), logits)
        after = torch.log_softmax(problems.logits - bandits.RATE * gradient, -1)
        SINGLE.check(found[method, 0], reverse(problems.logp))
        SINGLE.check(found[method, 1], reverse(after))


def test_the_start_is_scaled_away_from_ref():
    near, far = (bandits.draw(5, torch.Generator().manual_seed(0), scale=scale) for scale in (1.0, 2.0))
    EXACT.check(near.ref_logp, far.ref_logp)
    away = lambda x: (x.logp - x.ref_logp) - (x.logp - x.ref_logp).mean(-1, keepdim=True)
    EXACT.check(away(far), 2 * away(near))


def test_many_problems_are_independent_blocks():
    found = fig3_minimise.sampled(2, 1.0, 2 * fig3_minimise.BLOCK, 2, torch.Generator().manual_seed(0))
    assert found.shape == (2, 3, 2 * fig3_minimise.BLOCK)  # the start, step 1 and step 2
    assert torch.equal(found[VANILLA, 0], found[K3, 0])
    assert len(set(found[K3, 2].tolist())) == found.shape[-1]


def test_the_share_of_experiments_with_a_heavy_tail():
    """One problem in a hundred far above, the others below: an experiment shows it if it has at least one of them."""
    difference = torch.full((2, 1000), -1.0, dtype=torch.float64)
    difference[0, :10] = 1e4
    share = fig3_minimise.share_of_experiments(difference, torch.Generator().manual_seed(0))
    expected = 1 - 0.99**EXPERIMENT
    error = (expected * (1 - expected) / EXPERIMENTS) ** 0.5
    assert abs(share[0].item() - expected) < 4 * error
    assert share[1].item() == 0


def test_runs_that_end_above_their_start_are_counted_and_left_out():
    start = torch.ones(100)
    vanilla, k3 = torch.full((100,), 0.5), torch.full((100,), 0.25)
    k3[:3] = 90.0
    found = fig3_minimise.compared(
        torch.stack([torch.stack([start, vanilla]), torch.stack([start, k3])]), torch.Generator().manual_seed(0)
    )
    assert found["thrown"] == pytest.approx(0.03)
    assert found["above on problems"] == pytest.approx(0.03)
    assert found["mean"][K3][0] > found["mean"][VANILLA][0]
    assert found["median"][K3][0] == 0.25
    assert found["difference without thrown"]["mean"] == pytest.approx(-0.25)
