"""Fact 21: the squared sequence log-ratio beside a reward, on samples of μ, every completion summed."""

import pytest
import torch
from oracle import differentiated, mean_gradient, whole_space
from tolerances import EXACT, Tol

from klgrad import Rollout, consistency_loss, reverse_optimum, squared_sequence
from klgrad.enumeration import autoregressive

BETA = 0.5
AWAY = {"mean reward": (0.005, 1.0), "true gradient": (0.1, 1.0)}
"""Nats from π* on these problems: 0.008 to 0.78 with a mean-reward baseline, 0.11 to 0.70 beside the true gradient."""

STATIONARY = Tol(0.0, 1e-7, "a gradient of size 1 that a quasi-Newton method brought to 0 in float64")
NEAR_OPTIMUM = Tol(0.0, 1e-9, "a KL where a gradient of size 1 was brought to 1e-7 in float64")
PROBLEMS = [autoregressive(3, 3, ends=True, seed=seed, away_from_ref=1.0) for seed in range(4)]
problems = pytest.mark.parametrize("problem", PROBLEMS, ids=range(len(PROBLEMS)))


def reward_of(problem):
    return torch.randn(len(problem.space), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def log_optimum(problem):
    """(N,) log π*(y) with π* ∝ ref exp(r/β)."""
    return reverse_optimum(problem.ref_logp.sum(-1), reward_of(problem), BETA)


def at_the_optimum(problem):
    """The same problem with π = π*, by its next-token probabilities: the mass of what goes on with each token."""
    mass = torch.zeros_like(problem.logits)
    where = problem.space.mask
    through = log_optimum(problem).exp()[:, None].expand_as(problem.space.tokens)
    mass.index_put_((problem.space.prefix[where], problem.space.tokens[where]), through[where], accumulate=True)
    found = problem.with_logits(mass.log())
    EXACT.check(found.logp.sum(-1), log_optimum(problem))
    return found


def regularised_gradient(problem, baseline):
    """E_μ[(r - v) Σ_t s_t] - β ∇squared_sequence: an unweighted policy gradient beside the regulariser, ascending."""
    coefficient = squared_sequence(whole_space(problem)).coefficient
    return mean_gradient(problem, (reward_of(problem) - baseline)[:, None] - BETA * coefficient)


def gap(problem):
    """(N,) r - β Σ_t l_t."""
    return reward_of(problem) - BETA * (problem.logp - problem.ref_logp).sum(-1)


BASELINES = {
    "centred together": lambda p: p.probability @ gap(p),
    "beta log Z": lambda p: BETA * (p.ref_logp.sum(-1) + reward_of(p) / BETA).logsumexp(0),
    "mean reward": lambda p: p.probability @ reward_of(p),
    "none": lambda p: 0.0,
}


@problems
def test_fact_21_the_optimum_is_stationary_if_reward_and_log_ratio_are_centred_together(problem):
    star = at_the_optimum(problem)
    for name in ("centred together", "beta log Z"):
        found = regularised_gradient(star, BASELINES[name](star))
        EXACT.check_vector(found, 0 * found)


@problems
@pytest.mark.parametrize("name", ["mean reward", "none"])
def test_fact_21_it_is_not_with_a_baseline_of_the_reward_alone(problem, name):
    star = at_the_optimum(problem)
    assert regularised_gradient(star, BASELINES[name](star)).norm() > 0.01


@problems
def test_fact_21_nor_beside_the_true_gradient_of_the_reward(problem):
    star = at_the_optimum(problem)
    of_reward = mean_gradient(star.on_policy(), reward_of(star)[:, None].expand_as(star.logp))
    pull = mean_gradient(star, squared_sequence(whole_space(star)).coefficient)
    assert (of_reward - BETA * pull).norm() > 0.01


@problems
def test_fact_21_on_policy_every_baseline_will_do(problem):
    """There the mean score is zero, and the squared log-ratio is the reverse KL: nothing is wrong but for staleness."""
    star = at_the_optimum(problem).on_policy()
    for baseline in BASELINES.values():
        found = regularised_gradient(star, baseline(star))
        EXACT.check_vector(found, 0 * found)


def stationary_point(problem, objective, start=None):
    """Where an objective that is differentiated through π's logits alone has no gradient, from π* or from a start."""
    logits = (at_the_optimum(problem).logits if start is None else start).clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [logits], max_iter=2000, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        loss = -objective(problem.with_logits(logits))
        loss.backward()
        return loss

    optimiser.step(closure)
    assert logits.grad is not None
    STATIONARY.check(logits.grad, torch.zeros_like(logits))
    return problem.with_logits(logits.detach())


def kl_to_the_optimum(problem):
    logp = problem.logp.sum(-1)
    return float((logp.exp() * (logp - log_optimum(problem))).sum())


def squared(problem):
    return problem.probability @ (problem.logp - problem.ref_logp).sum(-1).square() / 2


OBJECTIVES = {
    "centred together": lambda p: -(p.probability @ (gap(p) - p.probability @ gap(p)).square()) / 2 / BETA,
    "mean reward": lambda p: (
        p.probability @ ((reward_of(p) - p.probability @ reward_of(p)) * p.logp.sum(-1)) - BETA * squared(p)
    ),
    "true gradient": lambda p: p.logp.sum(-1).exp() @ reward_of(p) - BETA * squared(p),
}
"""Whose gradients are those above, with μ held fixed."""


@problems
def test_fact_21_where_each_ends(problem):
    """At π* if centred together, else far from it."""
    away = {name: kl_to_the_optimum(stationary_point(problem, f)) for name, f in OBJECTIVES.items()}
    EXACT.check(away.pop("centred together"), 0.0)
    for name, (least, most) in AWAY.items():
        assert least < away[name] < most


@problems
def test_fact_21_the_consistency_loss_is_the_centred_form(problem):
    """Its expected gradient over groups is that of half the variance, which is -β times the centred one."""
    expected = differentiated(problem, OBJECTIVES["centred together"])
    EXACT.check_vector(regularised_gradient(problem, BASELINES["centred together"](problem)), expected)
    star = at_the_optimum(problem)
    rollout = Rollout(star.logp, star.ref_logp, star.space.mask, group=torch.zeros(len(star.space), dtype=torch.long))
    EXACT.check(consistency_loss(rollout, reward_of(star), BETA), 0.0)


@problems
@pytest.mark.parametrize("start", range(3))
def test_fact_21_centred_together_the_optimum_is_the_only_stationary_point(problem, start):
    """From far and random starts, and under the μ of each problem, no other one is found."""
    generator = torch.Generator().manual_seed(start)
    logits = 3 * torch.randn(problem.logits.shape, generator=generator, dtype=torch.float64)
    found = stationary_point(problem, OBJECTIVES["centred together"], start=logits)
    NEAR_OPTIMUM.check(kl_to_the_optimum(found), 0.0)


@problems
def test_fact_21_the_optimum_is_unique_among_all_distributions(problem):
    """By the logits of whole completions it is a quadratic form, with a flat direction for the constant only."""
    reward, ref, mu = reward_of(problem), problem.ref_logp.sum(-1), problem.probability

    def half_variance(logits):
        each = reward - BETA * (logits.log_softmax(0) - ref)
        return mu @ (each - mu @ each).square() / 2

    for logits in (torch.zeros_like(ref), torch.linspace(-3, 3, len(ref), dtype=torch.float64)):
        hessian = torch.autograd.functional.hessian(half_variance, logits)
        values = torch.linalg.eigvalsh(hessian)
        EXACT.check(values[0], 0.0)
        assert values[1] > 1e-8
        EXACT.check_vector(hessian @ torch.ones_like(ref), torch.zeros_like(ref))


@problems
def test_the_squared_log_ratio_alone_is_zero_at_ref_and_nowhere_else(problem):
    """Under any μ with support everywhere: it is a sum of squares of the log-ratios of all completions."""
    assert (problem.probability > 0).all()
    ref = problem.with_logits(problem.ref_logits)
    EXACT.check(squared(ref), 0.0)
    assert squared(problem) > 0.01
