"""The error of a reward function names the function, and comes before training if possible."""

import asyncio
import math

import pytest

from klgrad.errors import RewardError
from klgrad.training.data import checked, load_reward, probe

ROW = {"prompt": "2 + 3", "answer": "5"}


def fine(completions, answer, **_):
    return [1, None][: len(completions)]


def too_many(completions, **_):
    return [1.0, 2.0]


def not_a_number(completions, **_):
    return [math.nan]


def infinite(completions, **_):
    return [math.inf]


def raising(completions, **_):
    return [1 / 0]


def texts(completions, **_):
    return ["good"]


def wants_more(completions, gold, **_):
    return [1.0]


async def later(completions, **_):
    return [math.nan]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (too_many, "1 rewards of 'too_many'; received 2"),
        (not_a_number, "nan for"),
        (infinite, "inf for"),
        (raising, "'raising'; received ZeroDivisionError"),
        (texts, "'texts'; received ValueError"),
        (wants_more, "missing 1 required positional argument: 'gold'"),
        (later, "'later'; received nan"),
    ],
)
def test_a_probe_finds_it(reward, said):
    with pytest.raises(RewardError, match=said):
        probe([fine, reward], ROW)


def test_columns_that_trl_leaves_out_are_left_out_here_too():
    """As TRL does: `completion` and `completion_ids` of a dataset never reach a reward function."""
    seen = {}

    def reward(completions, completion_ids, **columns):
        seen.update(columns, ids=completion_ids)
        return [1.0]

    probe([reward], {**ROW, "completion": "old", "completion_ids": [7, 8]})
    assert seen["ids"] == [[0]]
    assert set(seen) == {"ids", "answer", "prompts", "trainer_state", "log_extra", "log_metric"}


def test_what_is_fine_passes_through():
    probe([fine], ROW)
    reward = checked(fine)
    assert reward.__name__ == "fine"
    assert reward(completions=["a", "b"], answer=["5", "5"]) == [1.0, None]


def test_a_coroutine_stays_one():
    async def good(completions, **_):
        return [0.5]

    assert asyncio.run(checked(good)(completions=["a"])) == [0.5]


def test_by_name(tmp_path):
    (tmp_path / "mine.py").write_text("def judge(completions, **_): return [2.0] * len(completions)")
    assert load_reward(f"{tmp_path}/mine.py:judge")(completions=["x"]) == [2.0]
    with pytest.raises(RewardError, match="add the part after"):
        load_reward("mine")
