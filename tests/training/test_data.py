"""Prompts, tasks and rewards."""

import asyncio
import json
import math
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from klgrad.errors import DataError, MissingExtraError, RewardError, SettingError, UnknownNameError
from klgrad.training.data import (
    TASKS,
    checked_reward,
    correct,
    data_of,
    evaluation_rows,
    integer_in,
    load_reward,
    probe,
    tasks_of,
    training_rows,
)
from klgrad.training.settings import RunConfig

pytestmark = [pytest.mark.filterwarnings("ignore")]


def loaded(settings, seed=0, conversational=False):
    return data_of(settings, seed, conversational=conversational)


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
    tasks = tasks_of(["arithmetic"])
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
    numbers = [
        n for row in training_rows([TASKS["mixed-addition"]], 2000, 2, 0) for n in re.findall(r"\d+", row["prompt"])
    ]
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
    assert integer_in(text) == number


def test_the_reward_takes_chats_and_texts():
    chat = [{"role": "assistant", "content": "It is 5"}]
    assert correct(completions=[chat, "4", []], answer=["5", "5", "0"], extra=1) == [1.0, 0.0, 0.0]


def test_the_default_trains_in_the_domain_and_evaluates_both():
    data = loaded(RunConfig(train_size=10, eval_size=3), conversational=True)
    assert {row["task"] for row in data.train.to_list()} == {"addition", "subtraction"}
    assert [(s.name, s.domain, len(s.rows)) for s in data.evaluation] == [
        ("addition", "in", 3), ("subtraction", "in", 3), ("multiplication", "out", 3), ("maximum", "out", 3),
        ("word-problems", "out", 3),
    ]  # fmt: skip
    assert data.train[0]["prompt"][0]["role"] == "user"
    assert isinstance(loaded(RunConfig(train_size=1)).train[0]["prompt"], str)


def test_another_choice_of_tasks():
    data = loaded(RunConfig(task="maximum", eval_task="addition, maximum", eval_size=2))
    assert {row["task"] for row in data.train.to_list()} == {"maximum"}
    assert [(s.name, s.domain) for s in data.evaluation] == [("addition", "out"), ("maximum", "in")]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"task": "additon"}, UnknownNameError, "did you mean 'addition'"),
        ({"task": " , "}, SettingError, "at least one name"),
        ({"digits": 0}, SettingError, "`digits` >= 1"),
        ({"task": "addition,reasoning-gym:x"}, SettingError, "one reward judges both"),
        ({"task": "addition", "eval_task": "my.jsonl"}, SettingError, "one reward judges both"),
        ({"task": "a.jsonl,b.jsonl"}, SettingError, "one dataset"),
        ({"reward": "missing.py:f"}, RewardError, "an existing Python file"),
        ({"reward": "json:__doc__"}, RewardError, "a reward function"),
    ],
)
def test_what_cannot_be_used(settings, error, said):
    with pytest.raises(error, match=said):
        loaded(RunConfig(**settings))


@pytest.mark.filterwarnings("ignore:2 of 2 training rows")
def test_prompts_that_are_all_evaluated_on_leave_none_to_train_on(tmp_path):
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for name in names:
        Path(name).write_text('{"prompt": "1 + 1"}\n{"prompt": "1 + 2"}\n')
    with pytest.raises(DataError, match="at least one prompt"):
        loaded(RunConfig(task=names[0], eval_task=names[1]))


def test_two_rewards_of_one_name_are_refused(tmp_path):
    """TRL would log the mean of both under this name."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def score(completions, **_): ...\ndef other(completions, **_): ...")

    def rewards(*names):
        given = ",".join(f"{tmp_path}/{name}" for name in names)
        return loaded(RunConfig(reward=given, train_size=1, eval_size=1)).rewards

    with pytest.raises(SettingError, match=r"received several named 'score'; remedy: rename one of the functions"):
        rewards("a.py:score", "a.py:other", "b.py:score")
    assert [reward.__name__ for reward in rewards("a.py:score", "b.py:other")] == ["score", "other"]


@pytest.fixture
def file(tmp_path):
    def write(rows, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    return write


def test_a_file_of_prompts_keeps_some_for_evaluation(file):
    path = file([{"prompt": f"say {i}", "wanted": i} for i in range(20)])
    data = loaded(RunConfig(task=path, eval_size=4), conversational=True)
    (held_out,) = data.evaluation
    assert (held_out.name, held_out.domain, len(held_out.rows), len(data.train)) == (path, "in", 4, 16)
    asked = [row["prompt"] for row in (*data.train.to_list(), *held_out.rows)]
    assert sorted(x[0]["content"] for x in asked) == sorted(f"say {i}" for i in range(20))
    assert data.rewards == []


def test_a_file_whose_name_looks_like_a_pattern(file):
    path = file([{"prompt": str(i)} for i in range(5)], "[x]p.jsonl")
    assert len(loaded(RunConfig(task=path, eval_size=0)).train) == 5


def prompts(rows):
    return {json.dumps(row["prompt"]) for row in rows}


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_is_asked_twice_is_on_one_side(file, chat):
    """Whatever the order of the rows; and held out once."""
    said = [[{"role": "user", "content": str(i)}] if chat else str(i) for i in range(20)]
    rows = [{"prompt": said[i % 20], "n": i} for i in range(60)]
    found = []
    for order in (rows, rows[::-1]):
        with warnings.catch_warnings(action="error"):  # none had to be left out
            data = loaded(RunConfig(task=file(order), eval_size=4))
        held_out = data.evaluation[0].rows
        assert len(held_out) == len(prompts(held_out)) == 4
        assert not prompts(data.train) & prompts(held_out)
        assert len(data.train) == 60 - 3 * 4
        found.append(prompts(held_out))
    assert found[0] == found[1]


def test_evaluating_on_what_is_trained_on_holds_some_out(file, tmp_path):
    path = file([{"prompt": str(i)} for i in range(20)])
    for same in (path, f"{tmp_path}/../{tmp_path.name}/prompts.jsonl"):
        data = loaded(RunConfig(task=path, eval_task=same, eval_size=4))
        assert [(each.domain, len(each.rows)) for each in data.evaluation] == [("in", 4)]
        assert not prompts(data.train) & prompts(data.evaluation[0].rows)


def test_other_files_are_out_of_the_domain_unless_they_share_prompts(file, tmp_path):
    path = file([{"prompt": str(i)} for i in range(20)])
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    other = file([{"prompt": f"other {i}"} for i in range(9)], "a/test.jsonl")
    shared = file([{"prompt": str(i)} for i in (3, 4, 99)], "b/test.jsonl")
    data = loaded(RunConfig(task=path, eval_task=f"{other},{shared}", eval_size=5))
    assert [(each.name, each.domain, len(each.rows)) for each in data.evaluation] == [
        (other, "out", 5), (shared, "in", 3),
    ]  # fmt: skip
    assert prompts(data.train) == {json.dumps(str(i)) for i in range(20) if i not in (3, 4)}
    with pytest.warns(UserWarning, match="2 of 20 training rows have prompts that are evaluated on"):
        loaded(RunConfig(task=path, eval_task=shared))
    all_of_it = file([{"prompt": str(i)} for i in range(20)], "b/copy.jsonl")
    with pytest.raises(DataError, match="that is not evaluated on"):
        loaded(RunConfig(task=path, eval_task=all_of_it))


def test_configuration_and_split_of_a_dataset(monkeypatch):
    import datasets

    asked = []

    def load(*given, split):
        asked.append((*given, split))
        return datasets.Dataset.from_list([{"prompt": f"{split} {i}"} for i in range(10)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    given = {"task": "some/where", "dataset_config": "main", "dataset_split": "training"}
    data = loaded(RunConfig(**given, dataset_eval_split="test", eval_size=4))
    assert asked == [("some/where", "main", "training"), ("some/where", "main", "test")]
    assert [(each.name, each.domain, len(each.rows)) for each in data.evaluation] == [("some/where", "in", 4)]
    assert len(data.train) == 10


def test_a_file_without_prompts(file):
    with pytest.raises(DataError, match=r"a column `prompt`; received .* with question"):
        loaded(RunConfig(task=file([{"question": "x"}])))


def test_without_reasoning_gym_the_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"klgrad\[gym\]"):
        loaded(RunConfig(task="reasoning-gym:chain_sum"))


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
    settings = RunConfig(task="reasoning-gym:sum", train_size=8, eval_size=2)
    data = data_of(settings, seed=7, conversational=False)
    (held_out,) = data.evaluation
    rows: list[Any] = sorted([*data.train, *held_out.rows], key=lambda row: row["entry"])
    assert (held_out.name, held_out.domain, len(data.train)) == ("reasoning-gym:sum", "in", 8)
    assert [row["prompt"] for row in rows] == [f"sum {i} + 7" for i in range(10)]
    columns = {name: [row[name] for row in rows[:4]] for name in ("task", "entry")}
    texts = ["7", " 8 ", "I think <answer>9</answer>", "<answer> 1 </answer>"]
    assert data.rewards[0](completions=texts, **columns) == [1.0, 1.0, 1.0, 0.01]
    settings.eval_task = "reasoning-gym:other, reasoning-gym:sum"
    sets = data_of(settings, seed=7, conversational=False).evaluation
    assert {s.name: (s.domain, s.rows[0]["prompt"].split()[0]) for s in sets} == {
        "reasoning-gym:sum": ("in", "sum"),
        "reasoning-gym:other": ("out", "other"),
    }


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
