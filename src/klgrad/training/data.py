"""Prompts to train and evaluate on, the tasks that come with this package, and the rewards that score completions."""

import asyncio
import glob
import importlib
import inspect
import itertools
import json
import math
import random
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..audit.subject import find
from ..errors import DataError, LossImportError, MissingExtraError, RewardError, SettingError, UnknownNameError
from ..support import Json
from .settings import RunConfig

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainerState

# Prompts to evaluate on.


@dataclass(frozen=True)
class EvaluationSet:
    """Rows with a `prompt`. `domain` is `in` for the tasks that are trained on and `out` for others."""

    name: str
    domain: str
    rows: list[Json]


Reward = Callable[..., Any]
"""Called by keyword, as TRL does: a number for each completion, or a coroutine of them."""

Completion = str | list[Json]
"""A text, or the messages of a chat."""

Sources = tuple[list[Json], list[EvaluationSet], list[Reward]]
"""Rows to train on, sets to evaluate on, and the rewards that judge both."""


# Reward functions as TRL calls them: loaded by name, called once before training, checked for finite numbers.
#
# `correct` is the reward of the built-in arithmetic tasks.

LEFT_OUT = ("prompt", "completion", "completion_ids")
"""Columns of a dataset that TRL does not pass to reward functions."""

BOXED = re.compile(r"\\boxed\{\s*(-?\d[\d,]*)")
MARKED = re.compile(r"(?:####|answer\s*(?:is|:|=))\s*\$?(-?\d[\d,]*)", re.IGNORECASE)
WHOLE = re.compile(r"(?<![\w.])-?\d[\d,]*(?!\.?\d)")
"""An integer that is not a part of a word or of a decimal number."""


def text_of(completion: Completion) -> str:
    """The text of a completion: a string, or the content of the last message of a chat."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def integer_in(text: str) -> int | None:
    """The last boxed integer of a text, else the last one announced as the answer, else the last one, else None.

    Example:
        >>> integer_in("7 + 5 = 12, so the answer is 12.")
        12
    """
    for pattern in (BOXED, MARKED, WHOLE):
        if integers := pattern.findall(text.replace("\u2212", "-")):
            return int(integers[-1].replace(",", ""))
    return None


def correct(completions: list[Completion], answer: list[str], **_: object) -> list[float]:
    """Reward 1 for the right integer and 0 otherwise.

    Example:
        >>> correct(completions=["It is 5", "4"], answer=["5", "5"])
        [1.0, 0.0]
    """
    return [float(integer_in(text_of(c)) == int(a)) for c, a in zip(completions, answer, strict=True)]


def load_reward(spec: str) -> Reward:
    """Import `package.module:function` or `path/to/file.py:function`."""
    try:
        reward = find(spec)
    except LossImportError as error:
        raise RewardError(error.expected, error.received, error.remedy) from error
    if not callable(reward):
        raise RewardError("a reward function", f"{spec}, a {type(reward).__name__}", "name a function")
    return reward


def checked_reward(reward: Reward) -> Reward:
    """Wrap a reward function: a NaN, an infinity or a wrong count is an error that names the function."""
    name = name_of(reward)

    async def deferred(**named: Any) -> list[float | None]:
        return _numbers(name, await reward(**named), named["completions"])

    def immediate(**named: Any) -> list[float | None]:
        return _numbers(name, reward(**named), named["completions"])

    wrapped = deferred if inspect.iscoroutinefunction(reward) else immediate
    wrapped.__name__ = name  # TRL logs `rewards/<name>/mean`; an object with a __call__ may have no name
    return wrapped


def name_of(reward: Reward) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


def values_of(reward: Reward, arguments: Json) -> list[float | None]:
    """Call a reward function outside of TRL's own loop, and wait for it if it is asynchronous."""
    values = reward(**arguments)
    return asyncio.run(values) if inspect.iscoroutine(values) else values


def _numbers(name: str, values: Iterable[float | None], completions: list[Completion]) -> list[float | None]:
    """Convert to floats; None, which means "not applicable" in TRL, is kept."""
    numbers = [None if value is None else float(value) for value in values]
    if len(numbers) != len(completions):
        remedy = "return one number per completion, in their order"
        raise RewardError(f"{len(completions)} rewards of {name!r}", f"{len(numbers)}", remedy)
    for value, completion in zip(numbers, completions, strict=True):
        if value is not None and not math.isfinite(value):
            received = f"{value} for {str(completion)[:80]!r}"
            raise RewardError(f"a finite reward of {name!r}", received, "return 0, or None to leave it out")
    return numbers


def probe(rewards: list[Reward], row: Json) -> None:
    """Call each function once on a made-up completion of a real prompt, to find errors before training."""
    from transformers import TrainerState

    completion = "0" if isinstance(row["prompt"], str) else [{"role": "assistant", "content": "0"}]
    for reward in rewards:
        values_of(checked_reward(reward), arguments([row], [completion], [[0]], TrainerState()))


def arguments(rows: list[Json], completions: list[Completion], ids: list[list[int]], state: "TrainerState") -> Json:
    """The keyword arguments with which TRL calls a reward function: its own, and the dataset's columns."""
    return {
        **{name: [row[name] for row in rows] for name in rows[0] if name not in LEFT_OUT},
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": ids,
        "trainer_state": state,
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }


# Which prompts are kept for evaluation. The choice depends on their text alone, so none is also trained on.

HELD_OUT = 5
"""At most one prompt in this many is kept for evaluation."""


def text_hash(text: str) -> int:
    """A hash that is the same on every machine and in every process."""
    return zlib.crc32(text.encode())


def key(row: Json) -> str:
    """The prompt as text: rows with equal keys have the same prompt."""
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


def distinct(rows: list[Json], size: int) -> list[Json]:
    """The first rows of up to `size` different prompts."""
    first: dict[str, Json] = {}
    for row in rows:
        first.setdefault(key(row), row)
    return list(first.values())[:size]


def split(rows: list[Json], size: int) -> tuple[list[Json], list[Json]]:
    """Split into rows to train on and up to `size` different prompts to evaluate on, those with the smallest hashes.

    It does not depend on the order of the rows or on a seed. At most one in `HELD_OUT` different prompts is held out.
    """
    keys = sorted({key(row) for row in rows}, key=lambda text: (text_hash(text), text))
    kept = set(keys[: min(size, len(keys) // HELD_OUT)])
    held_out = distinct([row for row in rows if key(row) in kept], len(kept))
    return [row for row in rows if key(row) not in kept], held_out


def without(rows: list[Json], evaluated: list[Json]) -> list[Json]:
    """Drop the rows whose prompts are evaluated on, and warn about how many these are."""
    known = {key(row) for row in evaluated}
    rest = [row for row in rows if key(row) not in known]
    if len(rest) < len(rows):
        count = f"{len(rows) - len(rest)} of {len(rows)} training rows"
        warnings.warn(f"{count} have prompts that are evaluated on and are left out", stacklevel=2)
    return rest


# A dataset of prompts: a file, a folder or one of the hub, with a column `prompt`.

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def is_dataset(name: str) -> bool:
    """Whether a task's name is a dataset: a known file suffix, or a slash, as in folders and names of the hub."""
    return _is_file(name) or "/" in name


def _from_dataset(settings: RunConfig, names: list[str], evaluated: list[str] | None, seed: int) -> Sources:
    """Read a dataset, and split it unless another one is given to evaluate on. Its rewards come from `--reward`."""
    if len(names) > 1:
        raise SettingError("one dataset to train on", ", ".join(names), "put the prompts into one file")
    (name,) = names
    eval_split = settings.dataset_eval_split or settings.dataset_split
    rows = trained = _rows_of(name, settings.dataset_config, settings.dataset_split)
    prompts, sets = {key(row) for row in rows}, []
    for other in evaluated or [name]:
        same = _same(name, other)
        if same and (_is_file(other) or eval_split == settings.dataset_split):
            trained, held_out = split(rows, settings.eval_size)
        else:
            config = settings.dataset_config if same else None
            held_out = distinct(_rows_of(other, config, eval_split), settings.eval_size)
        near = same or any(key(row) in prompts for row in held_out)
        sets.append(EvaluationSet(other, "in" if near else "out", held_out))
    return trained, sets, []


def _same(a: str, b: str) -> bool:
    return a == b or (Path(a).exists() and Path(a).resolve() == Path(b).resolve())


def _is_file(name: str) -> bool:
    return Path(name).suffix in FORMATS


def _rows_of(name: str, config: str | None, split_name: str) -> list[Json]:
    from datasets import load_dataset

    if _is_file(name):
        dataset = load_dataset(FORMATS[Path(name).suffix], data_files=glob.escape(name), split="train")
    else:
        dataset = load_dataset(name, config, split=split_name)
    if "prompt" not in dataset.column_names:
        received = f"{name} with {', '.join(dataset.column_names) or 'none'}"
        raise DataError("a column `prompt`", received, "rename the column that has the prompts")
    return [dict(row) for row in dataset]


# Tasks of reasoning-gym by name, each scored by its own verifier.

GYM = "reasoning-gym:"


def _from_gym(settings: RunConfig, names: list[str], evaluated: list[str] | None, seed: int) -> Sources:
    """Generate questions, and hold some of each task out; tasks that are only in `evaluated` are out of domain."""
    try:
        gym: Any = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise MissingExtraError("reasoning-gym", "no such package", "pip install 'klgrad[gym]'") from error
    size, wanted = settings.train_size + settings.eval_size, evaluated or names
    tasks = {n: gym.create_dataset(n.removeprefix(GYM), seed=seed, size=size) for n in dict.fromkeys(names + wanted)}
    rows, sets = list[Json](), list[EvaluationSet]()
    for name, entries in tasks.items():
        made = [{"prompt": e["question"], "task": name, "entry": i} for i, e in enumerate(entries)]
        trained, held_out = split(made, settings.eval_size)
        if name in names:
            rows += trained
        if name in wanted:
            sets.append(EvaluationSet(name, "in" if name in names else "out", held_out))

    def solved(completions: list[Completion], task: list[str], entry: list[int], **_: object) -> list[float]:
        """Score the text between answer tags, or all of it, with the task's verifier."""
        texts = (text_of(each).rpartition("<answer>")[2].partition("</answer>")[0].strip() for each in completions)
        return [float(tasks[n].score_answer(x, tasks[n][i])) for x, n, i in zip(texts, task, entry, strict=True)]

    return rows, sets, [solved]


# Built-in tasks: arithmetic questions with answers that can be checked.

TRIES = 200
"""Draws for each question that is wanted; after these a small task is taken to have no more."""
ASK = "Reply with just the number."
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps")

Question = tuple[str, int]
Number = Callable[[], int]
Draw = Callable[[random.Random, Number], Question]


@dataclass(frozen=True)
class ArithmeticTask:
    """A kind of question.

    Attributes:
        name: how to ask for it.
        use: `train` and `evaluate` say what it is for by default; `named` is used only where it is named.
        draw: makes a question out of random choices and random numbers.
        mixed: numbers have 1 to `digits` digits, each count equally likely, instead of being below 10^`digits`.
    """

    name: str
    use: Literal["train", "evaluate", "named"]
    draw: Draw
    mixed: bool = False

    def question(self, rng: random.Random, digits: int) -> Question:
        if self.mixed:
            return self.draw(rng, lambda: rng.randrange(10 ** rng.randint(1, digits)))
        return self.draw(rng, lambda: rng.randrange(10**digits))


def _computation(sign: str, result: Callable[[list[int]], int], count: int = 2) -> Draw:
    """A sum, difference or product of `count` numbers; of a difference the larger one comes first."""

    def draw(rng: random.Random, number: Number) -> Question:
        numbers = [number() for _ in range(count)]
        if sign == "-":
            numbers.sort(reverse=True)
        return f"Compute {f' {sign} '.join(map(str, numbers))}. {ASK}", result(numbers)

    return draw


def _maximum(rng: random.Random, number: Number) -> Question:
    numbers = [number() for _ in range(3)]
    return f"Which is the largest of {', '.join(map(str, numbers))}? {ASK}", max(numbers)


def _word_problem(rng: random.Random, number: Number) -> Question:
    b, a = sorted((number(), number()))
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < 0.5:
        return f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have? {ASK}", a + b
    return f"{name} has {a} {thing} and gives away {b}. How many {thing} does {name} have left? {ASK}", a - b


ADDITION, SUBTRACTION = _computation("+", sum), _computation("-", lambda numbers: numbers[0] - numbers[1])
TASKS = {
    task.name: task
    for task in (
        ArithmeticTask("addition", "train", ADDITION),
        ArithmeticTask("subtraction", "train", SUBTRACTION),
        ArithmeticTask("multiplication", "evaluate", _computation("*", math.prod)),
        ArithmeticTask("maximum", "evaluate", _maximum),
        ArithmeticTask("word-problems", "evaluate", _word_problem),
        ArithmeticTask("mixed-addition", "named", ADDITION, mixed=True),
        ArithmeticTask("mixed-subtraction", "named", SUBTRACTION, mixed=True),
        ArithmeticTask("mixed-three-summands", "named", _computation("+", sum, count=3), mixed=True),
        ArithmeticTask("mixed-word-problems", "named", _word_problem, mixed=True),
    )
}
ARITHMETIC = "arithmetic"
"""The tasks that are trained by default, and evaluated together with those that are for evaluation."""


def tasks_of(names: list[str]) -> list[ArithmeticTask]:
    """Look tasks up by name. `arithmetic` stands for those that are trained by default."""
    tasks: list[ArithmeticTask] = []
    for name in names:
        if name == ARITHMETIC:
            tasks += [task for task in TASKS.values() if task.use == "train"]
        elif name in TASKS:
            tasks.append(TASKS[name])
        else:
            raise UnknownNameError("task", name, [*TASKS, ARITHMETIC, "reasoning-gym:NAME", "FILE.jsonl"])
    return tasks


def training_rows(tasks: list[ArithmeticTask], size: int, digits: int, seed: int) -> list[Json]:
    """Draw `size` questions that are not held out, from the tasks in turn. Questions of small tasks repeat."""
    streams = [_questions(task, digits, seed, held_out=False) for task in tasks]
    return [_row(tasks[i % len(tasks)], next(streams[i % len(tasks)])) for i in range(size)]


def evaluation_rows(task: ArithmeticTask, size: int, digits: int, seed: int) -> list[Json]:
    """Draw up to `size` different held-out questions."""
    stream, questions = _questions(task, digits, seed, held_out=True), {}
    for question in itertools.islice(stream, size * TRIES):
        questions.setdefault(question[0], question)
        if len(questions) == size:
            break
    return [_row(task, question) for question in questions.values()]


def _questions(task: ArithmeticTask, digits: int, seed: int, *, held_out: bool) -> Iterator[Question]:
    rng = random.Random(f"{task.name} {digits} {seed} {held_out}")  # a string seeds the same on every machine
    while True:
        question = task.question(rng, digits)
        if (text_hash(question[0]) % HELD_OUT == 0) == held_out:
            yield question


def _row(task: ArithmeticTask, question: Question) -> Json:
    return {"prompt": question[0], "answer": str(question[1]), "task": task.name}


# The data of a run, from its settings: built-in tasks, reasoning-gym by name, or a dataset of prompts.


@dataclass(frozen=True)
class Data:
    """Training prompts, evaluation sets, and the reward functions for both."""

    train: "Dataset"
    evaluation: list[EvaluationSet]
    rewards: list[Reward]


def data_of(settings: RunConfig, seed: int, *, conversational: bool) -> Data:
    """Load what `--task`, `--eval_task` and `--reward` name. No training row has a prompt of an evaluation set.

    If it is `conversational`, prompts become chats, for a model that has a chat template.
    """
    from datasets import Dataset

    names, evaluated = _names(settings)
    rows, sets, rewards = _kind(names[0])(settings, names, evaluated, seed)
    rows = without(rows, [row for task in sets for row in task.rows])
    if not rows:
        remedy = "give another dataset, another `eval_task`, or a larger `train_size`"
        raise DataError("at least one prompt that is not evaluated on", f"none in {settings.task}", remedy)
    if settings.reward is not None:
        rewards = [load_reward(name) for name in _listed(settings.reward)]
        counts = Counter(map(name_of, rewards))
        if repeated := sorted(name for name in counts if counts[name] > 1):
            raise SettingError(
                "reward functions of different names, under which their means are logged",
                f"several named {', '.join(map(repr, repeated))}",
                "rename one of the functions, or leave out one that is given twice",
            )

    def chat(row: Json) -> Json:
        if conversational and isinstance(row["prompt"], str):
            return {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        return row

    sets = [EvaluationSet(task.name, task.domain, list(map(chat, task.rows))) for task in sets if task.rows]
    return Data(Dataset.from_list(list(map(chat, rows))), sets, rewards)


def has_reward(settings: RunConfig) -> bool:
    return settings.reward is not None or _kind(_names(settings)[0][0]) is not _from_dataset


def _names(settings: RunConfig) -> tuple[list[str], list[str] | None]:
    """Names to train on, and to evaluate on if `eval_task` is given, without repetition; all of one kind."""
    names = _listed(settings.task)
    evaluated = None if settings.eval_task is None else list(dict.fromkeys(_listed(settings.eval_task)))
    if len({_kind(name) for name in (*names, *(evaluated or []))}) > 1:
        raise SettingError(
            "built-in tasks, tasks of reasoning-gym, or datasets for `task` and `eval_task`: one reward judges both",
            ", ".join([*names, *(evaluated or [])]),
            "leave `eval_task` out for held-out prompts of the task, or write datasets of prompts for both",
        )
    return names, evaluated


def _kind(name: str) -> Callable[[RunConfig, list[str], list[str] | None, int], Sources]:
    return _from_gym if name.startswith(GYM) else _from_dataset if is_dataset(name) else _built_in


def _listed(names: str) -> list[str]:
    parts = [name.strip() for name in names.split(",") if name.strip()]
    if not parts:
        raise SettingError("at least one name", repr(names), f"for example {ARITHMETIC}")
    return parts


def _built_in(settings: RunConfig, names: list[str], evaluated: list[str] | None, seed: int) -> Sources:
    trained = tasks_of(names)
    evaluable = [task for task in TASKS.values() if task.use != "named"]
    tasks = dict.fromkeys([*trained, *evaluable] if evaluated is None else tasks_of(evaluated))
    size, digits = settings.eval_size, settings.digits
    sets = [
        EvaluationSet(task.name, "in" if task in trained else "out", evaluation_rows(task, size, digits, seed))
        for task in tasks
    ]
    return training_rows(trained, settings.train_size, digits, seed), sets, [correct]
