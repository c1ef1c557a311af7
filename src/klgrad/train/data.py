"""What a run is trained and evaluated on: built-in tasks, reasoning-gym by name, or a dataset of prompts."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, UnknownNameError
from .errors import DataError, SettingError
from .rewards import load_reward
from .tasks import ARITHMETIC, TASKS, evaluation_rows, tasks_of, training_rows
from .verify import correct, text_of

GYM = "reasoning-gym:"
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class EvaluationSet:
    """Rows with a `prompt`, and whether they are of the domain that is trained."""

    name: str
    domain: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Data:
    """Everything that a run reads, with the rewards that judge it."""

    train: Any
    evaluation: list[EvaluationSet]
    rewards: list[Callable[..., Any]]


def data_of(settings: Any, seed: int, *, conversational: bool) -> Data:
    """Build what `--task`, `--eval_task` and `--reward` ask for; a prompt is a chat if the model has a template."""
    names = _listed(settings.task)
    if len(names) == 1 and _is_dataset(names[0]):
        made = _from_dataset(settings, names[0])
    elif any(name.startswith(GYM) for name in names):
        made = _from_gym(settings, names, seed)
    else:
        made = _built_in(settings, names, seed)
    rows, sets, rewards = made
    if not rows:
        raise DataError("at least one prompt", f"none in {settings.task}", "give another dataset or `train_size`")
    if settings.reward is not None:
        rewards = [load_reward(name) for name in _listed(settings.reward)]
    sets = [EvaluationSet(s.name, s.domain, [_chat(row, conversational) for row in s.rows]) for s in sets if s.rows]
    return Data(_dataset([_chat(row, conversational) for row in rows]), sets, rewards)


def _listed(names: str) -> list[str]:
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise SettingError("at least one name", repr(names), f"{ARITHMETIC}, say")
    return found


def _chat(row: dict[str, Any], conversational: bool) -> dict[str, Any]:
    if conversational and isinstance(row["prompt"], str):
        return {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
    return row


def _dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


# Built in

Made = tuple[list[dict[str, Any]], list[EvaluationSet], list[Callable[..., Any]]]


def _built_in(settings: Any, names: list[str], seed: int) -> Made:
    trained = tasks_of(names)
    if settings.eval_task is not None:
        evaluated = tasks_of(_listed(settings.eval_task))
    else:
        evaluated = [*trained, *(task for task in TASKS.values() if task not in trained)]
    sets = [
        EvaluationSet(
            task.name,
            "in" if task in trained else "out",
            evaluation_rows(task, settings.eval_size, settings.digits, seed),
        )
        for task in evaluated
    ]
    return training_rows(trained, settings.train_size, settings.digits, seed), sets, [correct]


# reasoning-gym


def _from_gym(settings: Any, names: list[str], seed: int) -> Made:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingExtraError("reasoning-gym", "no such package", "pip install 'klgrad[gym]'")
    gym: Any = importlib.import_module("reasoning_gym")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    rows: list[dict[str, Any]] = []
    sets: list[EvaluationSet] = []
    scorers: dict[str, Any] = {}
    for name in (name.removeprefix(GYM) for name in names):
        if name not in known:
            raise UnknownNameError("task of reasoning-gym", name, known)
        scorers[name] = gym.create_dataset(name, seed=seed, size=settings.train_size + settings.eval_size)
        entries = [{"prompt": e["question"], "answer": str(e["answer"]), "task": name} for e in scorers[name]]
        for row, index in zip(entries, range(len(entries)), strict=True):
            row["entry"] = index
        rows += entries[: settings.train_size]
        sets.append(EvaluationSet(name, "in", entries[settings.train_size :]))

    def solved(completions: list[Any], task: list[str], entry: list[int], **_: Any) -> list[float]:
        """Score with the task's own verifier what stands between answer tags, or all of it."""
        answers = [_tagged(text_of(completion)) for completion in completions]
        found = zip(answers, task, entry, strict=True)
        return [float(scorers[t].score_answer(answer, scorers[t][i])) for answer, t, i in found]

    return rows, sets, [solved]


def _tagged(text: str) -> str:
    _, opened, rest = text.rpartition("<answer>")
    return (rest.partition("</answer>")[0] if opened else text).strip()


# A dataset of one's own


def _is_dataset(name: str) -> bool:
    return Path(name).suffix in FORMATS or ("/" in name and not name.startswith(GYM))


def _from_dataset(settings: Any, name: str) -> Made:
    rows = _rows_of(name)
    if settings.eval_task is not None:
        sets = [
            EvaluationSet(Path(n).stem, "out", _rows_of(n)[: settings.eval_size]) for n in _listed(settings.eval_task)
        ]
        return rows, sets, []
    held_out = min(settings.eval_size, len(rows) // 5)  # the last rows, never trained on
    sets = [EvaluationSet(Path(name).stem, "in", rows[len(rows) - held_out :])]
    return rows[: len(rows) - held_out], sets, []


def _rows_of(name: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    path = Path(name)
    if path.suffix in FORMATS and not path.is_file():
        raise DataError("an existing file of prompts", str(path), "check the path; it is relative to where you are")
    try:
        local = path.suffix in FORMATS
        found = (
            load_dataset(FORMATS[path.suffix], data_files=name, split="train")
            if local
            else load_dataset(name, split="train")
        )
    except Exception as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            "JSON, JSONL or Parquet with a `prompt` column, or a dataset of the hub",
            f"{name}: {detail}",
            "give a path that can be read; the hub needs a network",
        ) from error
    columns = list(found.column_names)
    if "prompt" not in columns:
        raise DataError(
            "a column `prompt`", f"{name} with {', '.join(columns) or 'none'}", "rename the prompts' column"
        )
    return [dict(row) for row in found]
