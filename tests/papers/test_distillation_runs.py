"""Which run of an arm is its best: the choice that the studies and the runners of distillation share."""

import pytest

from klgrad.papers.runs import nearest


def ends(*runs):
    """Last evaluations, each of an arm with a seed, a KL and a rate, which is its place."""
    return [
        {"arm": arm, "seed": seed, "kl_per_token": kl, "learning_rate": str(i)}
        for i, (arm, seed, kl) in enumerate(runs)
    ]


def chosen(*runs):
    return {arm: row["learning_rate"] for arm, row in nearest(ends(*runs), lambda row: row["arm"]).items()}


def test_the_nearest_run_of_each_arm():
    assert chosen(("a", "0", "0.9"), ("b", "0", "10.0"), ("a", "0", "0.8"), ("b", "0", "9.0")) == {"a": "2", "b": "3"}
    assert chosen(("a", "0", "0.8"), ("a", "0", "0.9")) == {"a": "0"}


@pytest.mark.parametrize("kl", ["nan", "inf", "-inf"])
def test_a_student_that_diverged_is_not_the_nearest(kl):
    assert chosen(("a", "0", kl), ("a", "0", "0.9"), ("a", "0", kl), ("b", "0", kl)) == {"a": "1"}


def test_runs_of_other_seeds_do_not_choose():
    assert chosen(("a", "1", "0.1"), ("a", "0", "0.9"), ("a", "2", "0.2"), ("b", "1", "0.1")) == {"a": "1"}
