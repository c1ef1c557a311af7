"""A dataset of prompts: a file, a folder or one of the hub, with a column `prompt`."""

import glob
from pathlib import Path
from typing import Any

from ..training_errors import DataError, SettingError
from .eval_sets import EvaluationSet, Made
from .held_out import distinct, key, split
from .rewards import TAKEN

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def is_dataset(name: str) -> bool:
    """Whether a task's name is a dataset: a known file suffix, or a slash, as in folders and names of the hub."""
    return Path(name).suffix in FORMATS or "/" in name


def from_dataset(settings: Any, names: list[str], evaluated: list[str] | None, seed: int) -> Made:
    """Read a dataset, and split it unless another one is given to evaluate on. Its rewards come from `--reward`."""
    if len(names) > 1:
        raise SettingError("one dataset to train on", ", ".join(names), "put the prompts into one file")
    (name,) = names
    evaluated = [name] if evaluated is None else evaluated
    rows, called = _rows_of(name, settings.dataset_config, settings.dataset_split), _short([name, *evaluated])
    eval_split = settings.dataset_eval_split or settings.dataset_split
    from_rows = [n for n in evaluated if _same(name, n) and (_is_file(n) or eval_split == settings.dataset_split)]
    trained, held_out = split(rows, settings.eval_size) if from_rows else (rows, [])
    prompts, sets = {key(row) for row in rows}, []
    for other in evaluated:
        kept = held_out
        if other not in from_rows:
            config = settings.dataset_config if _same(name, other) else None
            kept = distinct(_rows_of(other, config, eval_split), settings.eval_size)
        near = _same(name, other) or any(key(row) in prompts for row in kept)
        sets.append(EvaluationSet(called[other], "in" if near else "out", kept))
    return trained, sets, []


def _short(names: list[str]) -> dict[str, str]:
    """Names without folder and suffix, where these stay distinct."""
    stems = [Path(name).stem for name in dict.fromkeys(names)]
    return {n: Path(n).stem if stems.count(Path(n).stem) == 1 else n for n in names}


def _same(a: str, b: str) -> bool:
    return a == b or (Path(a).exists() and Path(a).resolve() == Path(b).resolve())


def _is_file(name: str) -> bool:
    return Path(name).suffix in FORMATS


def _rows_of(name: str, config: str | None, split_name: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    path = Path(name)
    if _is_file(name) and not path.is_file():
        raise DataError(
            "an existing file of prompts", str(path), "check the path; it is relative to the current folder"
        )
    try:
        found = (
            load_dataset(FORMATS[path.suffix], data_files=glob.escape(name), split="train")
            if _is_file(name)
            else load_dataset(name, config, split=split_name)
        )
    except Exception as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            "JSON, JSONL or Parquet with a `prompt` column, or a dataset of the hub",
            f"{name}: {detail}",
            "give a path that can be read; the hub needs a network, and perhaps `dataset_config` and `dataset_split`",
        ) from error
    columns = list(found.column_names)
    taken = [column for column in columns if column in TAKEN]
    if taken:
        raise DataError(
            f"columns with other names than {', '.join(TAKEN)}, which TRL passes to reward functions itself",
            f"{name} with {', '.join(taken)}",
            "rename the column",
        )
    if "prompt" not in columns:
        raise DataError(
            "a column `prompt`", f"{name} with {', '.join(columns) or 'none'}", "rename the column that has the prompts"
        )
    return [dict(row) for row in found]
