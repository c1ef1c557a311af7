"""Parses JSON lines one by one with the standard library, so that errors name the line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import columns
from .chunk import Ragged
from .log_errors import LogError


class Block(NamedTuple):
    """Whole lines: their bytes, the number of the first line, and the number of lines."""

    data: bytes
    first: int
    lines: int


Part = tuple[torch.Tensor, dict[str, Ragged], dict[str, list[object]]]
"""Numbers of the lines, their columns by role, and their values by role."""


def read_lines(block: Block, names: dict[str, str], path: Path) -> Part:
    """The rows of the block; an error names the first invalid line."""
    rows = [
        (line, {role: _entry(record, role, name, line) for role, name in names.items()})
        for line, record in records(block, path)
    ]
    given = {}
    for role in [role for role in names if role not in columns.PER_ROW] if rows else []:
        lists = [row[role] for _, row in rows]
        given[role] = Ragged(torch.cat(lists), torch.tensor([len(x) for x in lists]))
    per_row = {role: [row[role] for _, row in rows] for role in columns.PER_ROW if role in names}
    return torch.tensor([line for line, _ in rows], dtype=torch.int64), given, per_row


def records(block: Block, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the object of each line that is not blank."""
    lines = block.data.split(b"\n")
    for i, line in enumerate(lines):
        number = block.first + i
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = "cut off or " if i == len(lines) - 1 else ""  # no line break after it
            raise LogError(
                "one JSON object per line",
                f"line {number} of {path}, which is {what}not valid JSON ({error})",
                "write the file again, one `json.dumps(row)` per line",
            ) from error
        if not isinstance(record, dict):
            raise LogError(
                "one JSON object per line",
                f"{type(record).__name__} in line {number} of {path}",
                'write {"logp": [...], "ref_logp": [...]} per completion',
            )
        yield number, record


def _entry(record: dict[str, Any], role: str, name: str, number: int) -> Any:
    if name not in record:
        raise LogError(
            f"`{name}` in every line, as in the first",
            f"line {number} without it",
            "remove the line, or log the value",
        )
    value = record[name]
    if role in columns.PER_ROW:
        return value
    if not isinstance(value, list):
        raise LogError(
            f"`{name}` as a list, one number per token",
            f"{type(value).__name__} in line {number}",
            f"log per-token values, or {columns.another(role)}",
        )
    try:
        # float32, in which trainers compute: there a log-prob of 1e-7 is rounding; in float64 it would be an error.
        numbers = torch.tensor(value, dtype=torch.float32)
        if numbers.ndim != 1:
            raise TypeError("lists in a list")
        return numbers
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        token = next((i for i, x in enumerate(value) if not isinstance(x, float) and not _fits(x)), 0)
        raise LogError(
            f"a number per token in `{name}`",
            f"{json.dumps(value[token])[:40] if value else value} at line {number}, token {token}",
            "log a number for every token, and mask the tokens to ignore",
        ) from error


def _fits(x: object) -> bool:
    return isinstance(x, int) and abs(x) < 2**63
