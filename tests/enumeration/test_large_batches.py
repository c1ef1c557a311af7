"""A batch with the proportions of the distribution: its groups, and the loss in the limit of large batches."""

import pytest
import torch
from tolerances import EXACT

from klgrad import Rollout, zoo
from klgrad.enumeration import autoregressive, every_group, population, target_gradients, with_rational_sampler
from klgrad.errors import ProblemError

PARTS = 4
PROBLEM = autoregressive(3, 2, ends=True, seed=5, away_from_ref=1.0, off_policy=1.0)
ON, OFF = (with_rational_sampler(PROBLEM, PARTS, on_policy=on) for on in (True, False))


def gradient_of_groups(problem, members, loss):
    """One call of the loss on all groups, differentiated by the logits of π."""
    logits = problem.logits.clone().requires_grad_()
    rows = members.flatten()
    moved = problem.with_logits(logits)
    rollout = Rollout(
        moved.logp[rows],
        problem.ref_logp[rows],
        problem.space.mask[rows],
        behavior_logp=problem.behavior_logp[rows],
        group=torch.arange(len(members)).repeat_interleave(members.shape[1]),
    )
    (gradient,) = torch.autograd.grad(loss(rollout), logits)
    return gradient.flatten()


def test_the_sampler_has_multiples_of_the_fraction_and_every_token():
    counts = torch.softmax(ON.behavior_logits, -1) * PARTS
    EXACT.check(counts, counts.round())
    assert int(counts.round().min()) >= 1
    moved = (torch.softmax(ON.behavior_logits, -1) - torch.softmax(PROBLEM.behavior_logits, -1)).abs().max()
    assert float(moved) < 2 / PARTS  # rounded, and not replaced
    assert torch.equal(ON.logits, ON.behavior_logits)
    assert torch.equal(OFF.logits, PROBLEM.logits)


@pytest.mark.parametrize("size", [1, 2])
def test_every_group_is_there_as_often_as_it_is_likely(size):
    members = population(OFF, size, PARTS)
    groups, probability = every_group(OFF, size)
    counted = torch.stack([(members == group).all(-1).double().mean() for group in groups])
    EXACT.check(counted, probability)


def test_a_token_mean_is_in_the_limit_the_summed_gradient_over_the_mean_length():
    found = gradient_of_groups(ON, population(ON, 2, PARTS), zoo.get("k2-loss-token-mean"))
    length = ON.probability @ ON.space.mask.sum(-1).double()
    EXACT.check_vector(found, target_gradients(ON)["reverse-kl-token"] / length)


@pytest.mark.parametrize("name", ["k1-reward-leave-one-out", "k1-reward-group-std", "stopped-ratio-k2-loss"])
@pytest.mark.parametrize("problem", [ON, OFF], ids=["on-policy", "off-policy"])
def test_without_a_statistic_of_the_batch_it_is_the_expectation_over_groups(name, problem):
    loss = zoo.get(name)
    groups, probability = every_group(problem, 2)
    each = torch.stack([gradient_of_groups(problem, group[None], loss) for group in groups])
    EXACT.check_vector(gradient_of_groups(problem, population(problem, 2, PARTS), loss), probability @ each)


def test_what_is_refused():
    with pytest.raises(ProblemError, match="one for each token"):
        with_rational_sampler(PROBLEM, 2, on_policy=True)
    with pytest.raises(ProblemError, match="multiples of 1/4"):
        population(PROBLEM, 1, PARTS)
    with pytest.raises(ProblemError, match="at most 100000 rows"):
        population(ON, 5, PARTS)
