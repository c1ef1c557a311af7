"""The ground truth itself: held to finite differences and to hand counts, not to autograd alone."""

import pytest
import torch
from oracle import PROBLEMS
from tolerances import DIFFERENCE, EXACT

from klgrad.enumeration import OBJECTIVES, CompletionSpace, every_group, target_gradients
from klgrad.errors import ProblemError

STEP = 1e-5


def test_completions_of_a_space_without_end_token_are_all_words():
    space = CompletionSpace(3, 2, ends=False)
    assert len(space) == 9
    assert space.prefixes == 4
    assert {tuple(row) for row in space.tokens.tolist()} == {(a, b) for a in range(3) for b in range(3)}
    assert bool(space.mask.all())


def test_end_token_stops_a_completion_and_is_part_of_it():
    space = CompletionSpace(2, 3, ends=True)
    words = [tuple(row[m].tolist()) for row, m in zip(space.tokens, space.mask, strict=True)]
    assert words == [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_probabilities_sum_to_one(problem):
    EXACT.check(problem.probability.sum(), 1.0)
    EXACT.check(problem.on_policy().probability.sum(), 1.0)
    EXACT.check(every_group(problem, 2)[1].sum(), 1.0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_without_order_stands_for_all_of_its_orders(size):
    problem = PROBLEMS["bandit"]
    sums = dict.fromkeys(map(tuple, every_group(problem, size, ordered=False)[0].tolist()), 0.0)
    for members, probability in zip(*every_group(problem, size), strict=True):
        sums[tuple(sorted(members.tolist()))] += float(probability)
    EXACT.check(every_group(problem, size, ordered=False)[1], torch.tensor([*sums.values()], dtype=torch.float64))


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_prefix_probability_is_the_mass_of_completions_through_it(problem):
    visits = torch.zeros(problem.space.prefixes, dtype=torch.float64)
    for n, p in enumerate(problem.probability):
        for t in range(problem.space.length):
            if problem.space.mask[n, t]:
                visits[problem.space.prefix[n, t]] += p
    EXACT.check(problem.prefix_probability(problem.behavior_logits), visits)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_scores_and_kl_gradients_agree_with_autograd(problem):
    for per_token, analytic in (
        (lambda p: p.logp, problem.scores),
        (lambda p: p.at_tokens(p.prefix_kl()), problem.kl_gradients),
        (lambda p: p.at_tokens(p.prefix_forward_kl()), problem.forward_kl_gradients),
    ):
        jacobian = torch.autograd.functional.jacobian(lambda x, f=per_token: f(problem.with_logits(x)), problem.logits)
        EXACT.check(analytic, jacobian.flatten(2))


@pytest.mark.parametrize("target", ["reverse-kl-sequence", "forward-kl-sequence", "squared-sequence"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_sequence_targets_agree_with_finite_differences(problem, target):
    found = target_gradients(problem)[target]
    for i in range(0, problem.logits.numel(), 5):
        bump = torch.zeros_like(problem.logits).view(-1)
        bump[i] = STEP
        up, down = (
            OBJECTIVES[target](problem.with_logits(problem.logits + s * bump.view_as(problem.logits))) for s in (1, -1)
        )
        DIFFERENCE.check(found[i], (up - down) / (2 * STEP))


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_token_targets_differ_from_sequence_targets_only_beyond_one_token(problem):
    found = target_gradients(problem.on_policy())
    same = torch.allclose(found["reverse-kl-token"], found["reverse-kl-sequence"], rtol=1e-9)
    assert same == (problem.space.length == 1)


def test_too_large_a_space_says_so():
    with pytest.raises(ProblemError, match=r"5 tokens \^ length 12 = 244140625"):
        CompletionSpace(5, 12, ends=True)
