"""Facts 22 and 23: on samples of μ a score without a ratio is a gradient of KL(μ‖π); every completion summed."""

import pytest
import torch
from oracle import ON_SEQUENCES, SEQUENCES, SMALL, differentiated, mean_gradient, mean_gradient_over_groups, whole_space
from tolerances import EXACT

from klgrad import Clip, Mask, Truncate, zoo as cells
from klgrad.core.estimators import k1
from klgrad.core.importance import prefix_ratio, token_ratio
from klgrad.enumeration import autoregressive


def towards_the_sampler(problem):
    """∇KL(μ‖π) of completions, from its definition, with μ held fixed."""
    mu = problem.behavior_logp.sum(-1)
    return differentiated(problem, lambda p: (mu.exp() * (mu - p.logp.sum(-1))).sum())


@ON_SEQUENCES
def test_fact_22_k1_as_loss_climbs_the_kl_of_the_sampler_to_the_policy(problem):
    slope = k1.slope(whole_space(problem).log_ratio)
    EXACT.check_vector(mean_gradient(problem, slope), -towards_the_sampler(problem))
    assert towards_the_sampler(problem).norm() > 0.01  # so that the comparison is not one of zeros


def test_fact_22_so_does_the_loss_itself_over_every_group():
    found = mean_gradient_over_groups(SMALL, 2, cells.get("k1-loss"), on_policy=False)
    EXACT.check_vector(found, -towards_the_sampler(SMALL))


@ON_SEQUENCES
def test_fact_22_on_policy_it_is_nothing_and_ref_has_no_part_in_it(problem):
    on_policy = problem.on_policy()
    for found in (mean_gradient(on_policy, torch.ones_like(problem.logp)), towards_the_sampler(on_policy)):
        EXACT.check_vector(found, 0 * found)


def update(problem, advantage, weight):
    """What ascending E_μ[Σ_t weight_t A log π(y_t)] adds to θ, the weight held fixed."""
    return mean_gradient(problem, advantage * weight)


@ON_SEQUENCES
@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_fact_23_a_constant_advantage_without_ratios_distils_the_sampler_or_flees_it(problem, advantage):
    found = update(problem, advantage, torch.ones_like(problem.logp))
    EXACT.check_vector(found, -advantage * towards_the_sampler(problem))
    assert (found @ towards_the_sampler(problem) < 0) == (advantage > 0)


@ON_SEQUENCES
def test_fact_23_token_and_prefix_ratios_remove_it(problem):
    for ratio in (token_ratio, prefix_ratio):
        found = update(problem, 0.7, ratio(whole_space(problem)))
        EXACT.check_vector(found, 0 * found)


@ON_SEQUENCES
@pytest.mark.parametrize("bound", [Truncate(1.1), Clip(0.9, 1.1), Mask(0.5, 1.5)], ids=str)
def test_fact_23_a_bounded_ratio_removes_it_in_part(problem, bound):
    bare = update(problem, 0.7, torch.ones_like(problem.logp))
    ratio = token_ratio(whole_space(problem))
    left = update(problem, 0.7, bound(ratio))
    if torch.equal(bound(ratio), ratio):  # nothing is outside the bound
        EXACT.check_vector(left, 0 * bare)
        return
    assert left.norm() > 0.01 * bare.norm()
    if not isinstance(bound, Mask):  # a mask can leave more than it removes: it drops one side of a balance
        assert left.norm() < bare.norm()


def test_fact_23_advantages_that_cancel_over_prompts_do_not_cancel_for_any_of_them():
    """Two prompts with advantages A and -A: the sum over both is the difference of two gradients, not zero."""
    one, other = SEQUENCES["fixed"], autoregressive(3, 3, ends=False, seed=14, away_from_ref=1.0)
    sides = [update(p, a, torch.ones_like(p.logp)) for p, a in ((one, 0.7), (other, -0.7))]
    EXACT.check_vector(torch.stack(sides).sum(0), -0.7 * (towards_the_sampler(one) - towards_the_sampler(other)))
    assert min(side.norm() for side in (*sides, torch.stack(sides).sum(0))) > 0.1
    again = [update(p, a, torch.ones_like(p.logp)) for p, a in ((one, 0.7), (one, -0.7))]
    EXACT.check_vector(torch.stack(again).sum(0), 0 * again[0])  # one prompt with both signs
