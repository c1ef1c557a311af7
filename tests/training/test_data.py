"""Prompts, tasks and rewards."""

import asyncio
import json
import math
import re
import sys
import types
import warnings
from typing import Any

import pytest

from klgrad.errors import DataError, MissingExtraError, RewardError, SettingError, UnknownNameError
from klgrad.training import data
from klgrad.training.data import TASKS, checked_reward, data_of, evaluation_rows, load_reward, probe, training_rows
from klgrad.training.settings import RunConfig

pytestmark = [pytest.mark.filterwarnings("ignore")]


def loaded(seed=0, conversational=False, **settings):
    return data_of(RunConfig(**settings), seed, conversational=conversational)


def shape(data):
    """Name, domain and number of prompts of each evaluation set."""
    return [(each.name, each.domain, len(each.rows)) for each in data.evaluation]


# Questions whose answers are right, that repeat by seed, and of which the held-out ones are never trained on.


def by_another_way(task, question):
    numbers = [int(x) for x in re.findall(r"\d+", question)]
    task = task.removeprefix("mixed-")
    if task == "maximum":
        return sorted(numbers)[-1]
    if task == "three-summands":
        return sum(numbers)
    a, b = numbers
    if task == "word-problems":
        return a + b if "more" in question else a - b
    return {"addition": a + b, "subtraction": a - b, "multiplication": a * b}[task]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("digits", [1, 3])
def test_answers_are_right_and_not_negative(name, digits):
    for row in training_rows([TASKS[name]], 60, digits, seed=0) + evaluation_rows(TASKS[name], 10, digits, seed=0):
        assert int(row["answer"]) == by_another_way(name, row["prompt"]) >= 0


def test_rows_repeat_by_seed():
    tasks = data.tasks_of(["arithmetic"])
    assert training_rows(tasks, 20, 1, seed=5) == training_rows(tasks, 20, 1, seed=5)
    assert training_rows(tasks, 20, 1, seed=5) != training_rows(tasks, 20, 1, seed=6)
    assert [row["task"] for row in training_rows(tasks, 4, 1, 0)] == ["addition", "subtraction"] * 2


@pytest.mark.parametrize("name", TASKS)
def test_no_held_out_question_is_trained_on(name):
    """Whatever the seeds: one-digit additions are only a hundred."""
    trained = {row["prompt"] for seed in range(3) for row in training_rows([TASKS[name]], 500, 1, seed)}
    held_out = [row["prompt"] for row in evaluation_rows(TASKS[name], 64, 1, seed=9)]
    assert held_out
    assert len(set(held_out)) == len(held_out)
    assert not trained & set(held_out)


def test_mixed_numbers_have_every_count_of_digits_equally_often():
    rows = training_rows([TASKS["mixed-addition"]], 2000, 2, 0)
    numbers = [number for row in rows for number in re.findall(r"\d+", row["prompt"])]
    short = sum(len(number) == 1 for number in numbers) / len(numbers)
    assert abs(short - (1 + 0.1) / 2) < 0.03  # half of them below 10, and a tenth of the others; 3 standard errors
    assert {len(number) for number in numbers} == {1, 2}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("13", 13), ("7 + 6 = 13", 13), ("The answer is 13.", 13), ("13. Because 7 + 6", 6), ("-4", -4),
        ("\u22124", -4),
        ("1,234", 1234), ("#### 42", 42), ("\\boxed{8} of 9", 8), ("Answer: 5 (not 6)", 5), ("", None), ("none", None),
        ("3.5", None), ("w5", None), ("x = 9!", 9), ("12 apples", 12), ("The answer is 7 or the answer is 8", 8),
        ("$5", 5), ("(3)", 3), ("10-3", 3),
    ],
)  # fmt: skip
def test_the_number_that_is_meant(text, number):
    assert data.integer_in(text) == number


def test_the_reward_takes_chats_and_texts():
    chat = [{"role": "assistant", "content": "It is 5"}]
    assert data.correct(completions=[chat, "4", []], answer=["5", "5", "0"], extra=1) == [1.0, 0.0, 0.0]


def test_the_default_trains_in_the_domain_and_evaluates_both():
    made = loaded(train_size=10, eval_size=3, conversational=True)
    assert {row["task"] for row in made.train.to_list()} == {"addition", "subtraction"}
    domains = {"addition": "in", "subtraction": "in", "multiplication": "out", "maximum": "out", "word-problems": "out"}
    assert shape(made) == [(name, domain, 3) for name, domain in domains.items()]
    assert made.train[0]["prompt"][0]["role"] == "user"
    assert isinstance(loaded(train_size=1).train[0]["prompt"], str)


def test_another_choice_of_tasks():
    made = loaded(task="maximum", eval_task="addition, maximum", eval_size=2)
    assert {row["task"] for row in made.train.to_list()} == {"maximum"}
    assert shape(made) == [("addition", "out", 2), ("maximum", "in", 2)]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"task": "additon"}, UnknownNameError, "did you mean 'addition'"),
        ({"task": " , "}, SettingError, "at least one name"),
        ({"digits": 0}, SettingError, "`digits` >= 1"),
        ({"task": "addition,reasoning-gym:x"}, SettingError, "one reward judges both"),
        ({"task": "addition", "eval_task": "my.jsonl"}, SettingError, "one reward judges both"),
        ({"task": "a.jsonl,b.jsonl"}, SettingError, "one dataset"),
        ({"task": "reasoning-gym:chain_sum"}, MissingExtraError, r"klgrad\[gym\]"),  # which is not installed
        ({"reward": "missing.py:f"}, RewardError, "an existing Python file"),
        ({"reward": "json:__doc__"}, RewardError, "a reward function"),
    ],
)
def test_what_cannot_be_used(settings, error, said):
    with pytest.raises(error, match=said):
        loaded(**settings)


def test_two_rewards_of_one_name_are_refused(tmp_path):
    """TRL would log the mean of both under this name."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def score(completions, **_): ...\ndef other(completions, **_): ...")

    def rewards(*names):
        given = ",".join(f"{tmp_path}/{name}" for name in names)
        return loaded(reward=given, train_size=1, eval_size=1).rewards

    with pytest.raises(SettingError, match=r"received several named 'score'; remedy: rename one of the functions"):
        rewards("a.py:score", "a.py:other", "b.py:score")
    assert [reward.__name__ for reward in rewards("a.py:score", "b.py:other")] == ["score", "other"]


def numbered(*numbers):
    return [{"prompt": str(i)} for i in numbers]


def test_a_file_of_prompts_keeps_some_for_evaluation(jsonl):
    """Also one whose name looks like a pattern."""
    path = jsonl([{"prompt": f"say {i}", "wanted": i} for i in range(20)], "[x]p.jsonl")
    made = loaded(task=path, eval_size=4, conversational=True)
    assert shape(made) == [(path, "in", 4)]
    asked = [row["prompt"][0]["content"] for row in (*made.train.to_list(), *made.evaluation[0].rows)]
    assert sorted(asked) == sorted(f"say {i}" for i in range(20))
    assert made.rewards == []


def prompts(rows):
    return {json.dumps(row["prompt"]) for row in rows}


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_is_asked_twice_is_on_one_side(jsonl, chat):
    """Whatever the order of the rows; and held out once."""
    said = [[{"role": "user", "content": str(i)}] if chat else str(i) for i in range(20)]
    rows = [{"prompt": said[i % 20], "n": i} for i in range(60)]
    found = []
    for order in (rows, rows[::-1]):
        with warnings.catch_warnings(action="error"):  # none had to be left out
            made = loaded(task=jsonl(order), eval_size=4)
        held_out = made.evaluation[0].rows
        assert len(held_out) == len(prompts(held_out)) == 4
        assert not prompts(made.train) & prompts(held_out)
        assert len(made.train) == 60 - 3 * 4
        found.append(prompts(held_out))
    assert found[0] == found[1]


def test_evaluating_on_what_is_trained_on_holds_some_out(jsonl, tmp_path):
    path = jsonl(numbered(*range(20)))
    for same in (path, f"{tmp_path}/../{tmp_path.name}/prompts.jsonl"):
        made = loaded(task=path, eval_task=same, eval_size=4)
        assert shape(made) == [(same, "in", 4)]
        assert not prompts(made.train) & prompts(made.evaluation[0].rows)


def test_other_files_are_out_of_the_domain_unless_they_share_prompts(jsonl):
    path = jsonl(numbered(*range(20)))
    other = jsonl([{"prompt": f"other {i}"} for i in range(9)], "a/test.jsonl")
    shared = jsonl(numbered(3, 4, 99), "b/test.jsonl")
    made = loaded(task=path, eval_task=f"{other},{shared}", eval_size=5)
    assert shape(made) == [(other, "out", 5), (shared, "in", 3)]
    assert prompts(made.train) == {json.dumps(str(i)) for i in range(20) if i not in (3, 4)}
    with pytest.warns(UserWarning, match="2 of 20 training rows have prompts that are evaluated on"):
        loaded(task=path, eval_task=shared)
    with pytest.raises(DataError, match="at least one prompt that is not evaluated on"):
        loaded(task=path, eval_task=jsonl(numbered(*range(20)), "b/copy.jsonl"))


def test_configuration_and_split_of_a_dataset(monkeypatch):
    import datasets

    asked = []

    def load(*given, split):
        asked.append((*given, split))
        return datasets.Dataset.from_list([{"prompt": f"{split} {i}"} for i in range(10)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    splits = {"dataset_config": "main", "dataset_split": "training", "dataset_eval_split": "test"}
    made = loaded(task="some/where", **splits, eval_size=4)
    assert asked == [("some/where", "main", "training"), ("some/where", "main", "test")]
    assert shape(made) == [("some/where", "in", 4)]
    assert len(made.train) == 10


def test_a_file_without_prompts(jsonl):
    with pytest.raises(DataError, match=r"a column `prompt`; received .* with question"):
        loaded(task=jsonl([{"question": "x"}]))


class Sums(list):
    """A task of reasoning-gym: entries, and their verifier."""

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.01


def test_reasoning_gym_by_name(monkeypatch):
    """By a package of the same shape: the real one brings dozens of others."""
    made = lambda name, seed, size: Sums(
        {"question": f"{name} {i} + {seed}", "answer": str(i + seed)} for i in range(size)
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=made))
    settings = {"task": "reasoning-gym:sum", "train_size": 8, "eval_size": 2, "seed": 7}
    made = loaded(**settings)
    rows: list[Any] = sorted([*made.train, *made.evaluation[0].rows], key=lambda row: row["entry"])
    assert shape(made) == [("reasoning-gym:sum", "in", 2)]
    assert [row["prompt"] for row in rows] == [f"sum {i} + 7" for i in range(10)]
    columns = {name: [row[name] for row in rows[:4]] for name in ("task", "entry")}
    texts = ["7", " 8 ", "I think <answer>9</answer>", "<answer> 1 </answer>"]
    assert made.rewards[0](completions=texts, **columns) == [1.0, 1.0, 1.0, 0.01]
    sets = loaded(**settings, eval_task="reasoning-gym:other, reasoning-gym:sum").evaluation
    assert {(s.name, s.domain, s.rows[0]["prompt"].split()[0]) for s in sets} == {
        ("reasoning-gym:sum", "in", "sum"), ("reasoning-gym:other", "out", "other"),
    }  # fmt: skip


# Rewards that are no numbers are found before training; the error names the function.


ROW = {"prompt": "2 + 3", "answer": "5"}


def fine(completions, answer, **_):
    return [1, None][: len(completions)]


async def later(completions, **_):
    return [math.nan]


BAD = {
    "1 rewards of 'bad'; received 2": lambda completions, **_: [1.0, 2.0],
    "nan for": lambda completions, **_: [math.nan],
    "inf for": lambda completions, **_: [math.inf],
    "'bad'; received nan": later,
}


@pytest.mark.parametrize("said", BAD)
def test_a_probe_finds_it(said, monkeypatch):
    monkeypatch.setattr(BAD[said], "__name__", "bad")
    with pytest.raises(RewardError, match=said):
        probe([fine, BAD[said]], ROW)


def test_columns_that_trl_leaves_out_are_left_out_here_too():
    """As TRL does: `completion` and `completion_ids` of a dataset never reach a reward function."""
    seen = {}

    def reward(completions, completion_ids, **columns):
        seen.update(columns, ids=completion_ids)
        return [1.0]

    probe([reward], {**ROW, "completion": "old", "completion_ids": [7, 8]})
    assert seen["ids"] == [[0]]
    assert set(seen) == {"ids", "answer", "prompts", "trainer_state", "log_extra", "log_metric"}


def test_a_right_reward_passes_through():
    async def good(completions, **_):
        return [0.5]

    probe([fine], ROW)
    assert checked_reward(fine)(completions=["a", "b"], answer=["5", "5"]) == [1.0, None]
    assert asyncio.run(checked_reward(good)(completions=["a"])) == [0.5]


def test_by_name(tmp_path):
    (tmp_path / "mine.py").write_text("def judge(completions, **_): return [2.0] * len(completions)")
    assert load_reward(f"{tmp_path}/mine.py:judge")(completions=["x"]) == [2.0]
    with pytest.raises(RewardError, match="add the part after"):
        load_reward("mine")
