"""Every coefficient has its divergence: f'(u) on the token's own score, f(u)/u on the scores before it."""

import math

import pytest
import torch
from oracle import PROBLEMS, SEQUENCES, mean_gradient
from tolerances import EXACT, OPTIMUM

from klgrad.core import credit, divergences as d

GENERATORS = {
    # f(u), written independently of the slope and the excess of the package.
    "reverse": (d.REVERSE_KL, lambda u: u * u.log() - u + 1),
    "forward": (d.FORWARD_KL, lambda u: u - 1 - u.log()),
    "chi-square": (d.CHI_SQUARE, lambda u: (u - 1) ** 2 / 2),
    "hellinger": (d.HELLINGER, lambda u: 2 * (u.sqrt() - 1) ** 2),
    "total variation": (d.TOTAL_VARIATION, lambda u: (u - 1).abs()),
    "alpha -1": (d.alpha(-1.0), lambda u: ((u - 1) - (1 - 1 / u)) / 2),
    "alpha 1.5": (d.alpha(1.5), lambda u: (u - 1 - (u**1.5 - 1) / 1.5) / -0.5),
    "jensen-shannon": (
        d.jensen_shannon(),
        lambda u: (u * (2 * u / (1 + u)).log() + (2 / (1 + u)).log()) / 2,
    ),
    "jensen-shannon 0.1": (
        d.jensen_shannon(0.1),
        lambda u: 0.9 * u * (u / (0.1 + 0.9 * u)).log() - 0.1 * (0.1 + 0.9 * u).log(),
    ),
    "huber": (
        d.huber(0.7),
        lambda u: torch.where(
            u.log().abs() <= 0.7,
            u * u.log() - u + 1,
            torch.where(u > 1, 0.7 * u - math.exp(0.7) + 1, 1 - math.exp(-0.7) - 0.7 * u),
        ),
    ),
}  # fmt: skip


def token_divergences(problem, generator):
    """(P,) D_f at each prefix, by its definition over the whole vocabulary."""
    logp, ref_logp = problem.logits.log_softmax(-1), problem.ref_logits.log_softmax(-1)
    return (ref_logp.exp() * generator((logp - ref_logp).exp())).sum(-1)


def gradient(problem, value):
    """By the logits, of a function of the problem."""
    logits = problem.logits.clone().requires_grad_()
    (found,) = torch.autograd.grad(value(problem.with_logits(logits)), logits)
    return found.flatten()


@pytest.fixture(params=GENERATORS)
def generated(request):
    return GENERATORS[request.param]


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_coefficient_descends_the_divergence_whose_slope_it_is(name, generated):
    divergence, generator = generated
    problem = PROBLEMS[name].on_policy()
    found = mean_gradient(problem, divergence.slope(problem.logp - problem.ref_logp) * problem.space.mask)
    visits = problem.prefix_probability(problem.logits).detach()
    expected = gradient(problem, lambda p: (visits * token_divergences(p, generator)).sum())
    EXACT.check_vector(found, expected)


@pytest.mark.parametrize("name", SEQUENCES)
def test_looking_ahead_is_the_excess_of_later_tokens(name, generated):
    divergence, generator = generated
    problem, mask = SEQUENCES[name].on_policy(), SEQUENCES[name].space.mask
    log_ratio = torch.where(mask, problem.logp - problem.ref_logp, 0)
    coefficient = divergence.slope(log_ratio) + credit.future(divergence.excess(log_ratio) * mask, mask, 1.0)
    visited = lambda p: p.at_tokens(token_divergences(p, generator)).sum(-1)
    expected = gradient(problem, lambda p: (p.logp.sum(-1).exp() * visited(p)).sum())
    EXACT.check_vector(mean_gradient(problem, coefficient * mask), expected)


@pytest.mark.parametrize("name", SEQUENCES)
def test_between_completions_it_is_the_slope_of_the_sum(name, generated):
    divergence, generator = generated
    problem, mask = SEQUENCES[name].on_policy(), SEQUENCES[name].space.mask
    ref = problem.ref_logp.sum(-1)
    expected = gradient(problem, lambda p: (ref.exp() * generator((p.logp.sum(-1) - ref).exp())).sum())
    found = mean_gradient(problem, divergence.slope((problem.logp.sum(-1) - ref)[:, None]) * mask)
    EXACT.check_vector(found, expected)


def test_the_excess_is_an_unbiased_estimate_that_is_never_negative(generated):
    divergence, generator = generated
    problem = PROBLEMS["bandit"]
    log_ratio = problem.logits.log_softmax(-1) - problem.ref_logits.log_softmax(-1)
    EXACT.check(
        (problem.logits.softmax(-1) * divergence.excess(log_ratio)).sum(-1), token_divergences(problem, generator)
    )
    wide = torch.linspace(-20, 20, 401, dtype=torch.float64)
    assert bool((divergence.excess(wide) >= -1e-12).all())


def test_near_ref_it_is_its_scale_times_the_kl(generated):
    divergence, _ = generated
    step = torch.tensor([-1e-5, 1e-5], dtype=torch.float64)
    low, high = divergence.slope(step)
    rise = float(high - low) / 2e-5
    assert rise > 1e4 if divergence.scale == math.inf else rise == pytest.approx(divergence.scale, rel=1e-6)


CONVEX = [name for name in GENERATORS if name not in ("total variation",)]


@pytest.mark.parametrize("name", CONVEX)
def test_nothing_is_better_than_the_optimum(name):
    """The gradient of the regularised objective vanishes there along the simplex, but where π has lost an outcome."""
    divergence, generator = GENERATORS[name]
    ref = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    reward, beta = torch.tensor([1.0, 0.0, 0.3, -0.2], dtype=torch.float64), 1.5
    pi = d.optimum(divergence, ref.log(), reward, beta).exp()
    EXACT.check(pi.sum(), 1.0)
    moved = pi.clone().requires_grad_()
    value = (moved * reward).sum() - beta * (ref * generator(moved / ref)).sum()
    (rise,) = torch.autograd.grad(value, moved)
    OPTIMUM.check(rise - rise.mean(), torch.zeros(4))


def test_the_optima_of_the_two_kls_are_the_closed_forms():
    from klgrad import forward_optimum, reverse_optimum

    ref = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    reward = torch.tensor([1.0, 0.0, 0.3, -0.2], dtype=torch.float64)
    OPTIMUM.check(d.optimum(d.REVERSE_KL, ref, reward, 0.5), reverse_optimum(ref, reward, 0.5))
    OPTIMUM.check(d.optimum(d.FORWARD_KL, ref, reward, 0.5), forward_optimum(ref, reward, 0.5))


def test_a_slope_that_is_bounded_below_drops_outcomes():
    ref = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    pi = d.optimum(d.CHI_SQUARE, ref, torch.tensor([10.0, 0.0], dtype=torch.float64), 1.0).exp()
    EXACT.check(pi, torch.tensor([1.0, 0.0]))
