"""Questions with an answer that can be checked: arithmetic, in the domain that is trained and out of it."""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UnknownNameError
from .training_errors import SettingError

HELD_OUT = 5
"""One question of so many is kept for evaluation and never trained on."""
TRIES = 200
"""Questions drawn for each that is wanted, before a small task is taken to have no more."""
ASK = "Reply with just the number."
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps")

Question = tuple[str, int]


@dataclass(frozen=True)
class Task:
    """A name, whether it is trained or only evaluated by default, and how a question is drawn."""

    name: str
    domain: Literal["in", "out"]
    draw: Callable[[random.Random, int], Question]


def _pair(rng: random.Random, digits: int) -> tuple[int, int]:
    return rng.randrange(10**digits), rng.randrange(10**digits)


def _addition(rng: random.Random, digits: int) -> Question:
    a, b = _pair(rng, digits)
    return f"Compute {a} + {b}. {ASK}", a + b


def _subtraction(rng: random.Random, digits: int) -> Question:
    b, a = sorted(_pair(rng, digits))
    return f"Compute {a} - {b}. {ASK}", a - b


def _multiplication(rng: random.Random, digits: int) -> Question:
    a, b = _pair(rng, digits)
    return f"Compute {a} * {b}. {ASK}", a * b


def _maximum(rng: random.Random, digits: int) -> Question:
    numbers = [rng.randrange(10**digits) for _ in range(3)]
    return f"Which is the largest of {', '.join(map(str, numbers))}? {ASK}", max(numbers)


def _word_problem(rng: random.Random, digits: int) -> Question:
    b, a = sorted(_pair(rng, digits))
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < 0.5:
        return f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have? {ASK}", a + b
    return f"{name} has {a} {thing} and gives away {b}. How many {thing} does {name} have left? {ASK}", a - b


TASKS = {
    task.name: task
    for task in (
        Task("addition", "in", _addition),
        Task("subtraction", "in", _subtraction),
        Task("multiplication", "out", _multiplication),
        Task("maximum", "out", _maximum),
        Task("word-problems", "out", _word_problem),
    )
}
ARITHMETIC = "arithmetic"
"""All of them: those in the domain trained and evaluated, the others evaluated."""


def tasks_of(names: list[str]) -> list[Task]:
    """By name; `arithmetic` stands for those that are trained by default."""
    found: list[Task] = []
    for name in names:
        if name == ARITHMETIC:
            found += [task for task in TASKS.values() if task.domain == "in"]
        elif name in TASKS:
            found.append(TASKS[name])
        else:
            raise UnknownNameError("task", name, [*TASKS, ARITHMETIC, "reasoning-gym:NAME", "FILE.jsonl"])
    return found


def training_rows(tasks: list[Task], size: int, digits: int, seed: int) -> list[dict[str, Any]]:
    """`size` questions, task by task in turn, none of them held out; small tasks repeat theirs."""
    _check_digits(digits)
    streams = [_questions(task, digits, seed, held_out=False) for task in tasks]
    return [_row(tasks[i % len(tasks)], next(streams[i % len(tasks)])) for i in range(size)]


def evaluation_rows(task: Task, size: int, digits: int, seed: int) -> list[dict[str, Any]]:
    """Up to `size` different held-out questions."""
    _check_digits(digits)
    stream, found = _questions(task, digits, seed, held_out=True), {}
    for _ in range(size * TRIES):
        question = next(stream)
        found.setdefault(question[0], question)
        if len(found) == size:
            break
    return [_row(task, question) for question in found.values()]


def _questions(task: Task, digits: int, seed: int, *, held_out: bool) -> Iterator[Question]:
    rng = random.Random(f"{task.name} {digits} {seed} {held_out}")  # a string seeds the same on every machine
    while True:
        question = task.draw(rng, digits)
        if (zlib.crc32(question[0].encode()) % HELD_OUT == 0) == held_out:
            yield question


def _row(task: Task, question: Question) -> dict[str, Any]:
    return {"prompt": question[0], "answer": str(question[1]), "task": task.name}


def _check_digits(digits: int) -> None:
    if not 1 <= digits <= 9:
        raise SettingError("`digits` from 1 to 9", str(digits), "1 is what the embedded model can learn on a CPU")
