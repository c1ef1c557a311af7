"""The records of the targets, held against the names and the definitions."""

from typing import get_args

import pytest
import torch

from klgrad.audit.batch import cases
from klgrad.audit.render.page import ICONS
from klgrad.enumeration import OBJECTIVES
from klgrad.targets import TARGETS, Role, TargetName, Verdict, signed

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


def test_every_role_has_a_look():
    assert set(ICONS) == set(get_args(Role)) == {target.role for target in TARGETS.values()}
    assert len(set(ICONS.values())) == len(ICONS)


@pytest.mark.parametrize("field", ["title", "does", "formula"])
def test_words_tell_the_targets_apart(field):
    words = [getattr(target, field) for target in TARGETS.values()]
    assert all(words)
    assert len(set(words)) == len(words)


def test_every_target_has_a_sentence_of_its_own():
    sentences = [target.sentence for target in TARGETS.values() if not target.climbed]
    assert all(sentences)
    assert len(set(sentences)) == len(sentences)


def test_every_target_with_a_gradient_has_an_objective():
    assert tuple(name for name, target in TARGETS.items() if target.has_gradient) == WITH_GRADIENT


def _simplest(name):
    return TARGETS[name].same_on_policy or name


def test_targets_that_coincide_on_policy_are_those_that_say_so():
    gradients = [case.targets for case in cases(on_policy=True)]
    for a in TO_REFERENCE:
        for b in TO_REFERENCE[: TO_REFERENCE.index(a)]:
            same = all(bool((g[a] - g[b]).norm() <= ROUNDING * g[a].norm()) for g in gradients)
            assert same == (_simplest(a) == _simplest(b)), (a, b)


def test_targets_at_the_sampler_have_no_gradient_on_policy():
    gradients = [case.targets for case in cases(on_policy=True)]
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
    for case in cases(on_policy=False):
        problem = case.problem
        moved = type(problem)(problem.space, problem.logits, problem.behavior_logits, problem.behavior_logits)
        for name, at_ref in pairs.items():
            here, there = OBJECTIVES[name](problem), OBJECTIVES[at_ref](moved)
            torch.testing.assert_close(here, there, rtol=ROUNDING, atol=0)


def test_the_forward_kl_to_the_sampler_is_minus_the_mean_score():
    """Fact 22: grad KL(μ‖π) = -E_μ[Σ_t s_t]."""
    for case in cases(on_policy=False):
        problem = case.problem
        score = torch.einsum("n,ntp->p", problem.probability, problem.scores)
        found = case.targets["forward-kl-sampler-sequence"][: len(score)]
        torch.testing.assert_close(found, -score, rtol=ROUNDING, atol=ROUNDING)
