"""Built-in tasks: arithmetic questions with answers that can be checked."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import UnknownNameError
from ..training_errors import SettingError
from .held_out import HELD_OUT, text_hash

TRIES = 200
"""Draws for each question that is wanted; after these a small task is taken to have no more."""
ASK = "Reply with just the number."
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps")

Question = tuple[str, int]


Number = Callable[[], int]


@dataclass(frozen=True)
class Task:
    """A kind of question.

    Attributes:
        name: how to ask for it.
        use: `train` and `evaluate` say what it is for by default; `named` is used only where it is named.
        draw: makes a question out of random choices and random numbers.
        mixed: numbers have 1 to `digits` digits, each count equally likely, instead of being below 10^`digits`.
    """

    name: str
    use: Literal["train", "evaluate", "named"]
    draw: Callable[[random.Random, Number], Question]
    mixed: bool = False

    def question(self, rng: random.Random, digits: int) -> Question:
        """Draw one."""
        if self.mixed:
            return self.draw(rng, lambda: rng.randrange(10 ** rng.randint(1, digits)))
        return self.draw(rng, lambda: rng.randrange(10**digits))


def _addition(rng: random.Random, number: Number) -> Question:
    a, b = number(), number()
    return f"Compute {a} + {b}. {ASK}", a + b


def _subtraction(rng: random.Random, number: Number) -> Question:
    b, a = sorted((number(), number()))
    return f"Compute {a} - {b}. {ASK}", a - b


def _multiplication(rng: random.Random, number: Number) -> Question:
    a, b = number(), number()
    return f"Compute {a} * {b}. {ASK}", a * b


def _three_summands(rng: random.Random, number: Number) -> Question:
    a, b, c = number(), number(), number()
    return f"Compute {a} + {b} + {c}. {ASK}", a + b + c


def _maximum(rng: random.Random, number: Number) -> Question:
    numbers = [number() for _ in range(3)]
    return f"Which is the largest of {', '.join(map(str, numbers))}? {ASK}", max(numbers)


def _word_problem(rng: random.Random, number: Number) -> Question:
    b, a = sorted((number(), number()))
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < 0.5:
        return f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have? {ASK}", a + b
    return f"{name} has {a} {thing} and gives away {b}. How many {thing} does {name} have left? {ASK}", a - b


TASKS = {
    task.name: task
    for task in (
        Task("addition", "train", _addition),
        Task("subtraction", "train", _subtraction),
        Task("multiplication", "evaluate", _multiplication),
        Task("maximum", "evaluate", _maximum),
        Task("word-problems", "evaluate", _word_problem),
        Task("mixed-addition", "named", _addition, mixed=True),
        Task("mixed-subtraction", "named", _subtraction, mixed=True),
        Task("mixed-three-summands", "named", _three_summands, mixed=True),
        Task("mixed-word-problems", "named", _word_problem, mixed=True),
    )
}
ARITHMETIC = "arithmetic"
"""The tasks that are trained by default, and evaluated together with those that are for evaluation."""


def tasks_of(names: list[str]) -> list[Task]:
    """Look tasks up by name. `arithmetic` stands for those that are trained by default."""
    found: list[Task] = []
    for name in names:
        if name == ARITHMETIC:
            found += [task for task in TASKS.values() if task.use == "train"]
        elif name in TASKS:
            found.append(TASKS[name])
        else:
            raise UnknownNameError("task", name, [*TASKS, ARITHMETIC, "reasoning-gym:NAME", "FILE.jsonl"])
    return found


def training_rows(tasks: list[Task], size: int, digits: int, seed: int) -> list[dict[str, Any]]:
    """Draw `size` questions that are not held out, from the tasks in turn. Questions of small tasks repeat."""
    _check_digits(digits)
    streams = [_questions(task, digits, seed, held_out=False) for task in tasks]
    return [_row(tasks[i % len(tasks)], next(streams[i % len(tasks)])) for i in range(size)]


def evaluation_rows(task: Task, size: int, digits: int, seed: int) -> list[dict[str, Any]]:
    """Draw up to `size` different held-out questions."""
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
        question = task.question(rng, digits)
        if (text_hash(question[0]) % HELD_OUT == 0) == held_out:
            yield question


def _row(task: Task, question: Question) -> dict[str, Any]:
    return {"prompt": question[0], "answer": str(question[1]), "task": task.name}


def _check_digits(digits: int) -> None:
    if not 1 <= digits <= 9:
        raise SettingError("`digits` from 1 to 9", str(digits), "1 is what the embedded model can learn on a CPU")
