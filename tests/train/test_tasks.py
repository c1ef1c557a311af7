"""Questions whose answers are right, that repeat by seed, and of which the held-out ones are never trained on."""

import itertools
import json
import re
import sys
import types

import pytest

from klgrad.errors import MissingExtraError, UnknownNameError
from klgrad.train.data import data_of
from klgrad.train.errors import DataError, RewardError, SettingError
from klgrad.train.settings import RunConfig
from klgrad.train.tasks import TASKS, evaluation_rows, tasks_of, training_rows
from klgrad.train.verify import correct, integer_in

pytestmark = [pytest.mark.filterwarnings("ignore")]


def by_another_way(task, question):
    numbers = [int(x) for x in re.findall(r"\d+", question)]
    if task == "maximum":
        return sorted(numbers)[-1]
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
    data = data_of(RunConfig(train_size=10, eval_size=3), seed=0, conversational=True)
    assert {row["task"] for row in data.train} == {"addition", "subtraction"}
    assert [(s.name, s.domain, len(s.rows)) for s in data.evaluation] == [
        ("addition", "in", 3), ("subtraction", "in", 3), ("multiplication", "out", 3), ("maximum", "out", 3),
        ("word-problems", "out", 3),
    ]  # fmt: skip
    assert data.train[0]["prompt"][0]["role"] == "user"
    assert isinstance(data_of(RunConfig(train_size=1), 0, conversational=False).train[0]["prompt"], str)


def test_another_choice_of_tasks():
    data = data_of(RunConfig(task="maximum", eval_task="addition, maximum", eval_size=2), seed=0, conversational=False)
    assert {row["task"] for row in data.train} == {"maximum"}
    assert [(s.name, s.domain) for s in data.evaluation] == [("addition", "out"), ("maximum", "in")]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"task": "additon"}, UnknownNameError, "did you mean 'addition'"),
        ({"task": " , "}, SettingError, "at least one name"),
        ({"digits": 0}, SettingError, "1 to 9"),
        ({"train_size": 0}, DataError, "at least one prompt"),
        ({"task": "missing.jsonl"}, DataError, "an existing file"),
        ({"task": "nobody/nothing"}, DataError, "the hub needs a network"),
        ({"reward": "missing.py:f"}, RewardError, "an existing Python file"),
        ({"reward": "json:__doc__"}, RewardError, "a reward function"),
    ],
)
def test_what_cannot_be_used(settings, error, said):
    with pytest.raises(error, match=said):
        data_of(RunConfig(**settings), seed=0, conversational=False)


@pytest.fixture
def file(tmp_path):
    def write(rows, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    return write


def test_a_file_of_prompts_keeps_its_last_rows_for_evaluation(file):
    path = file([{"prompt": f"say {i}", "wanted": i} for i in range(20)])
    data = data_of(RunConfig(task=path, eval_size=4), seed=0, conversational=True)
    assert len(data.train) == 16
    assert [row["wanted"] for row in data.evaluation[0].rows] == [16, 17, 18, 19]
    assert data.train[3]["prompt"] == [{"role": "user", "content": "say 3"}]
    assert data.rewards == []


def test_parquet_too(tmp_path):
    from datasets import Dataset

    path = tmp_path / "p.parquet"
    Dataset.from_list([{"prompt": "a"}] * 3).to_parquet(str(path))
    assert len(data_of(RunConfig(task=str(path), eval_size=0), 0, conversational=False).train) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [('{"question": "x"}', "with question"), ('{"prompt": ', "JSON, JSONL or Parquet"), ("", "JSONL")],
)
def test_a_file_that_is_no_prompts(tmp_path, content, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=said):
        data_of(RunConfig(task=str(path)), seed=0, conversational=False)


def test_without_reasoning_gym_the_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"klgrad\[gym\]"):
        data_of(RunConfig(task="reasoning-gym:chain_sum"), seed=0, conversational=False)


def test_reasoning_gym_by_name(monkeypatch):
    """By a package of the same shape: the real one brings dozens of others."""

    class Sums(list):
        def score_answer(self, answer, entry):
            return 1.0 if answer == entry["answer"] else 0.01

    gym = types.ModuleType("reasoning_gym")
    gym.create_dataset = lambda name, seed, size: Sums(
        {"question": f"{i} + {seed}?", "answer": str(i + seed)} for i in range(size)
    )
    gym.factory = types.ModuleType("reasoning_gym.factory")
    gym.factory.DATASETS = {"chain_sum": None}
    gym.__spec__ = types.SimpleNamespace(name="reasoning_gym")
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", gym.factory)
    settings = RunConfig(task="reasoning-gym:chain_sum", train_size=3, eval_size=2)
    data = data_of(settings, seed=7, conversational=False)
    assert data.train["prompt"] == ["0 + 7?", "1 + 7?", "2 + 7?"]
    rows = [*data.train, *itertools.chain(*(s.rows for s in data.evaluation))]
    columns = {name: [row[name] for row in rows] for name in ("task", "entry")}
    texts = ["7", " 8 ", "I think <answer>9</answer>", "<answer> 1 </answer>", "11"]
    assert data.rewards[0](completions=texts, **columns) == [1.0, 1.0, 1.0, 0.01, 1.0]
    with pytest.raises(UnknownNameError, match="chain_sum"):
        data_of(RunConfig(task="reasoning-gym:chain_sums"), seed=0, conversational=False)
