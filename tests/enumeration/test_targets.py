"""The records of the targets, held against the names and the definitions."""

from typing import get_args

import pytest

from klgrad.audit.problems import cases
from klgrad.audit.render.roles import LOOKS
from klgrad.enumeration import OBJECTIVES
from klgrad.targets import TARGETS, WITH_GRADIENT, Role, Verdict


def test_every_verdict_has_a_record_and_no_other_name_has():
    assert tuple(TARGETS) == get_args(Verdict)
    assert all(name == target.name for name, target in TARGETS.items())


def test_every_role_has_a_look():
    assert set(LOOKS) == set(get_args(Role)) == {target.role for target in TARGETS.values()}
    for field in ("label", "icon", "style"):
        assert len({getattr(look, field) for look in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize("field", ["title", "short", "phrase", "sentence", "formula"])
def test_words_tell_the_targets_apart(field):
    words = [getattr(target, field) for target in TARGETS.values()]
    assert all(words)
    assert len(set(words)) == len(words)


def test_every_target_with_a_gradient_has_an_objective():
    assert tuple(OBJECTIVES) == WITH_GRADIENT == get_args(Verdict)[:-2]


def test_targets_that_coincide_on_policy_are_those_that_say_so():
    gradients = [case.targets for case in cases(on_policy=True)]
    for a in WITH_GRADIENT:
        for b in WITH_GRADIENT[: WITH_GRADIENT.index(a)]:
            same = all(bool((g[a] - g[b]).norm() <= 1e-9 * g[a].norm()) for g in gradients)  # float64 rounding
            assert same == (TARGETS[a].same_on_policy == b), (a, b)
