"""The ground truth itself, held to finite differences, to hand counts and to closed forms."""

from typing import get_args

import pytest
import torch
from oracle import PROBLEMS, gradient_of_rows
from tolerances import DIFFERENCE, EXACT

from klgrad import zoo
from klgrad.audit.procedure import proof_cases
from klgrad.enumeration import (
    OBJECTIVES,
    CompletionSpace,
    autoregressive,
    every_group,
    population,
    target_gradients,
    with_rational_sampler,
)
from klgrad.errors import ProblemError
from klgrad.targets import TARGETS, TargetName, Verdict, signed

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


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_prefix_probability_is_the_mass_of_completions_through_it(problem):
    visits = torch.zeros(problem.space.prefixes, dtype=torch.float64)
    for n, p in enumerate(problem.probability):
        for t in range(problem.space.length):
            if problem.space.mask[n, t]:
                visits[problem.space.prefix[n, t]] += p
    EXACT.check(problem.prefix_probability(problem.behavior_logits), visits)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_scores_agree_with_autograd(problem):
    jacobian = torch.autograd.functional.jacobian(lambda x: problem.with_logits(x).logp, problem.logits)
    EXACT.check(problem.scores, jacobian.flatten(2))


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


# The records of the targets, held against the names and the definitions.


WITH_GRADIENT = tuple(OBJECTIVES)
TO_REFERENCE = tuple(name for name in WITH_GRADIENT if TARGETS[name].anchor == "ref")
ROUNDING = 1e-9
"""Relative: both sides are sums in float64."""


def test_every_verdict_has_a_record_and_no_other_name_has():
    assert tuple(TARGETS) == get_args(Verdict)
    assert all(name == target.name for name, target in TARGETS.items())


def test_every_target_can_be_descended_and_climbed():
    assert get_args(TargetName) == WITH_GRADIENT
    for name in WITH_GRADIENT:
        assert TARGETS[signed(name, climbs=False)].climbed is None
        assert TARGETS[signed(name, climbs=True)].climbed == name


@pytest.mark.parametrize("field", ["title", "does", "formula"])
def test_words_tell_the_targets_apart(field):
    words = [getattr(t, field) for t in TARGETS.values()]
    assert all(words)
    assert len(set(words)) == len(words)


def test_every_target_with_a_gradient_has_an_objective():
    assert tuple(name for name, target in TARGETS.items() if target.has_gradient) == WITH_GRADIENT


def _simplest(name):
    return TARGETS[name].same_on_policy or name


def test_targets_that_coincide_on_policy_are_those_that_say_so():
    gradients = [case.targets for case in proof_cases(True)]
    for a in TO_REFERENCE:
        for b in TO_REFERENCE[: TO_REFERENCE.index(a)]:
            same = all(bool((g[a] - g[b]).norm() <= ROUNDING * g[a].norm()) for g in gradients)
            assert same == (_simplest(a) == _simplest(b)), (a, b)


def test_targets_at_the_sampler_have_no_gradient_on_policy():
    gradients = [case.targets for case in proof_cases(True)]
    for name in set(WITH_GRADIENT) - set(TO_REFERENCE):
        assert TARGETS[name].anchor == "sampler"
        assert all(float(g[name].norm()) <= ROUNDING for g in gradients), name


def test_the_targets_at_the_sampler_are_those_at_ref_with_the_sampler_in_its_place():
    """Off-policy, on every problem, from a problem whose reference is the sampler."""
    pairs = {
        "forward-kl-sampler-sequence": "forward-kl-sequence",
        "reverse-kl-sampler-sequence": "reverse-kl-sequence",
        "reverse-kl-sampler-token-sampler": "reverse-kl-token-sampler",
    }
    for case in proof_cases(False):
        problem = case.problem
        moved = type(problem)(problem.space, problem.logits, problem.behavior_logits, problem.behavior_logits)
        for name, at_ref in pairs.items():
            here, there = OBJECTIVES[name](problem), OBJECTIVES[at_ref](moved)
            torch.testing.assert_close(here, there, rtol=ROUNDING, atol=0)


def test_the_forward_kl_to_the_sampler_is_minus_the_mean_score():
    """Fact 22: grad KL(μ‖π) = -E_μ[Σ_t s_t]."""
    for case in proof_cases(False):
        problem = case.problem
        score = torch.einsum("n,ntp->p", problem.probability, problem.scores)
        found = case.targets["forward-kl-sampler-sequence"][: len(score)]
        torch.testing.assert_close(found, -score, rtol=ROUNDING, atol=ROUNDING)


# A batch with the proportions of the distribution: its groups, and the loss in the limit of large batches.


PARTS = 4
PROBLEM = autoregressive(3, 2, ends=True, seed=5, away_from_ref=1.0, off_policy=1.0)
ON, OFF = (with_rational_sampler(PROBLEM, PARTS, on_policy=on) for on in (True, False))


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
    found = gradient_of_rows(ON, population(ON, 2, PARTS), zoo.get("k2-loss-token-mean"), on_policy=True)
    length = ON.probability @ ON.space.mask.sum(-1).double()
    EXACT.check_vector(found, target_gradients(ON)["reverse-kl-token"] / length)


@pytest.mark.parametrize("name", ["k1-reward-leave-one-out", "k1-reward-group-std", "stopped-ratio-k2-loss"])
@pytest.mark.parametrize("problem", [ON, OFF], ids=["on-policy", "off-policy"])
def test_without_a_statistic_of_the_batch_it_is_the_expectation_over_groups(name, problem):
    loss = zoo.get(name)
    groups, probability = every_group(problem, 2)
    each = torch.stack([gradient_of_rows(problem, group, loss, on_policy=False) for group in groups])
    found = gradient_of_rows(problem, population(problem, 2, PARTS), loss, on_policy=False)
    EXACT.check_vector(found, probability @ each)


def test_what_is_refused():
    with pytest.raises(ProblemError, match="one for each token"):
        with_rational_sampler(PROBLEM, 2, on_policy=True)
    with pytest.raises(ProblemError, match="multiples of 1/4"):
        population(PROBLEM, 1, PARTS)
