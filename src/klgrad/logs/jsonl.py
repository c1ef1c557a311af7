"""JSON lines: one object per completion, line by line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import columns
from .chunk import Chunk, Ragged, build
from .errors import LogError
from .groups import Groups

MOST_ROWS = 2**16
"""Rows of a chunk, however short they are."""

LONGEST_LINE = 2**28
"""Bytes: a longer one is no completion, and would not fit in bounded memory."""


def open_log(
    path: Path, chosen: dict[str, str], chunk_tokens: int
) -> tuple[dict[str, str], int, Callable[[], Iterator[Chunk]]]:
    """Columns (from the first line), number of bytes, and the reader."""
    with path.open("rb") as handle:
        first = next(_records(handle, path), None)
    if first is None:
        raise LogError("a log with rows in it", f"{path}, which has blank lines only", "write the log again")
    names = columns.assign(list(first[1]), chosen)
    return names, path.stat().st_size, lambda: _chunks(path, names, chunk_tokens)


def _records(handle: Any, path: Path) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Number of the line, its object, and the bytes up to its end."""
    done = number = 0
    while line := handle.readline(LONGEST_LINE):
        number += 1
        done += len(line)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = "cut off or " if not line.endswith(b"\n") else ""
            raise LogError(
                "one JSON object per line",
                f"line {number} of {path}, which is {what}no JSON ({error})",
                "write the file again, one `json.dumps(row)` per line",
            ) from error
        if not isinstance(record, dict):
            raise LogError(
                "one JSON object per line",
                f"{type(record).__name__} in line {number} of {path}",
                'write {"logp": [...], "ref_logp": [...]} per completion',
            )
        yield number, record, done


def _chunks(path: Path, names: dict[str, str], chunk_tokens: int) -> Iterator[Chunk]:
    groups = Groups()
    held: list[tuple[int, dict[str, Any]]] = []
    tokens = done = 0
    with path.open("rb") as handle:
        for number, record, done in _records(handle, path):
            row = {role: _entry(record, role, name, number) for role, name in names.items()}
            held.append((number, row))
            tokens += len(row["logp"])
            if tokens >= chunk_tokens or len(held) >= MOST_ROWS:
                yield _assemble(held, names, groups, done)
                held, tokens = [], 0
    if held:
        yield _assemble(held, names, groups, done)


def _entry(record: dict[str, Any], role: str, name: str, number: int) -> Any:
    if name not in record:
        raise LogError(
            f"`{name}` in every line, as in the first", f"line {number} without it", "leave the line out, or log it"
        )
    value = record[name]
    if role == "group":
        return value if isinstance(value, str | int) else json.dumps(value)
    if not isinstance(value, list):
        raise LogError(
            f"`{name}` as a list, one number per token",
            f"{type(value).__name__} in line {number}",
            f"log per-token values, or name another column with --column {role}=NAME",
        )
    try:
        # float32, as trainers compute: a log-prob of 1e-7 is rounding there, and an error in float64.
        numbers = torch.tensor(value, dtype=torch.float32)
        if numbers.ndim != 1:
            raise TypeError("lists in a list")
        return numbers
    except (TypeError, ValueError, RuntimeError) as error:
        token = next((i for i, x in enumerate(value) if not isinstance(x, int | float)), 0)
        raise LogError(
            f"a number per token in `{name}`",
            f"{json.dumps(value[token])[:40] if value else value} at line {number}, token {token}",
            "log a number for every token, and mask what is not to count",
        ) from error


def _assemble(held: list[tuple[int, dict[str, Any]]], names: dict[str, str], groups: Groups, done: int) -> Chunk:
    numbers = torch.tensor([number for number, _ in held])
    given = {}
    for role in names:
        if role != "group":
            lists = [row[role] for _, row in held]
            given[role] = Ragged(torch.cat(lists), torch.tensor([len(x) for x in lists]))
    group = groups.number(row["group"] for _, row in held) if "group" in names else None
    return build(numbers, "line", given, group, done, names)
