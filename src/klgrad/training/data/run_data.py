"""The data of a run, from its settings: built-in tasks, reasoning-gym by name, or a dataset of prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..training_errors import DataError, SettingError
from .eval_sets import EvaluationSet, Made
from .gym import GYM, from_gym
from .held_out import without
from .prompts import from_dataset, is_dataset
from .rewards import Reward, correct, load_reward, name_of
from .tasks import ARITHMETIC, TASKS, evaluation_rows, tasks_of, training_rows


@dataclass(frozen=True)
class Data:
    """Training prompts, evaluation sets, and the reward functions for both."""

    train: Any
    evaluation: list[EvaluationSet]
    rewards: list[Callable[..., Any]]


def data_of(settings: Any, seed: int, *, conversational: bool) -> Data:
    """Load what `--task`, `--eval_task` and `--reward` name.

    Args:
        settings: a `RunConfig`.
        seed: for tasks that are generated.
        conversational: whether to turn prompts into chats, for a model that has a chat template.

    Returns:
        The data. No training row has a prompt of an evaluation set.
    """
    names, evaluated = _names(settings)
    make = {"dataset": from_dataset, "reasoning-gym": from_gym, "built-in": _built_in}[_kind(names)]
    rows, sets, rewards = make(settings, names, evaluated, seed)
    rows = without(rows, [row for each in sets for row in each.rows])
    if not rows:
        raise DataError(
            "at least one prompt that is not evaluated on",
            f"none in {settings.task}",
            "give another dataset, another `eval_task`, or a larger `train_size`",
        )
    if settings.reward is not None:
        rewards = [load_reward(name) for name in _listed(settings.reward)]
        _check_names(rewards)
    sets = [EvaluationSet(s.name, s.domain, [_chat(row, conversational) for row in s.rows]) for s in sets if s.rows]
    return Data(_dataset([_chat(row, conversational) for row in rows]), sets, rewards)


def _check_names(rewards: list[Reward]) -> None:
    """Refuse two reward functions of one name: TRL logs their mean as one value, and each has a weight of its own."""
    names = [name_of(reward) for reward in rewards]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SettingError(
            "reward functions of different names, under which their means are logged",
            f"several named {', '.join(map(repr, repeated))}",
            "rename one of the functions, or leave out one that is given twice",
        )


def reward_count(settings: Any) -> int:
    """The number of reward functions, without importing them."""
    if settings.reward is not None:
        return len(_listed(settings.reward))
    return 0 if _kind(_names(settings)[0]) == "dataset" else 1


def _names(settings: Any) -> tuple[list[str], list[str] | None]:
    """Names to train on, and to evaluate on if `eval_task` is given, without repetition; all of one kind."""
    names = _listed(settings.task)
    if settings.eval_task is None:
        return names, None
    evaluated = list(dict.fromkeys(_listed(settings.eval_task)))
    if _kind(evaluated) != _kind(names):
        raise SettingError(
            f"an `eval_task` of the same kind as `task`, {_kind(names)}: one verifier judges both",
            f"{settings.eval_task}, {_kind(evaluated)}",
            "leave it out for held-out prompts of the task, or write a dataset of prompts for both",
        )
    return names, evaluated


def _kind(names: list[str]) -> str:
    kinds = {"reasoning-gym" if n.startswith(GYM) else "dataset" if is_dataset(n) else "built-in" for n in names}
    if len(kinds) > 1:
        raise SettingError("names of one kind", ", ".join(names), "built-in tasks, reasoning-gym or a dataset")
    return kinds.pop()


def _listed(names: str) -> list[str]:
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise SettingError("at least one name", repr(names), f"for example {ARITHMETIC}")
    return found


def _chat(row: dict[str, Any], conversational: bool) -> dict[str, Any]:
    if conversational and isinstance(row["prompt"], str):
        return {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
    return row


def _dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def _built_in(settings: Any, names: list[str], evaluated_names: list[str] | None, seed: int) -> Made:
    trained = tasks_of(names)
    if evaluated_names is not None:
        evaluated = tasks_of(evaluated_names)
    else:
        evaluated = [*trained, *(t for t in TASKS.values() if t not in trained and t.use != "named")]
    sets = [
        EvaluationSet(
            task.name,
            "in" if task in trained else "out",
            evaluation_rows(task, settings.eval_size, settings.digits, seed),
        )
        for task in dict.fromkeys(evaluated)
    ]
    return training_rows(trained, settings.train_size, settings.digits, seed), sets, [correct]
