"""Which prompts are kept for evaluation: chosen by what they say, so that none is on both sides."""

import json
import warnings
import zlib
from typing import Any

Row = dict[str, Any]
HELD_OUT = 5
"""One prompt of so many, at most, is kept for evaluation."""


def key(row: Row) -> str:
    """Two rows of one key ask the same."""
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


def distinct(rows: list[Row], size: int) -> list[Row]:
    """The first rows of up to `size` different prompts."""
    found: dict[str, Row] = {}
    for row in rows:
        if len(found) == size:
            break
        found.setdefault(key(row), row)
    return list(found.values())


def split(rows: list[Row], size: int, part: int = HELD_OUT) -> tuple[list[Row], list[Row]]:
    """What is trained on, and up to `size` different prompts that are not: those of the smallest hashes.

    Neither the order of the rows nor a seed has a say, and of `part` different prompts at most one is held out.
    """
    keys = sorted({key(row) for row in rows}, key=lambda text: (zlib.crc32(text.encode()), text))
    kept = set(keys[: min(size, len(keys) // part)])
    held_out = distinct([row for row in rows if key(row) in kept], len(kept))
    return [row for row in rows if key(row) not in kept], held_out


def without(rows: list[Row], evaluated: list[Row]) -> list[Row]:
    """Rows whose prompts are not evaluated on, with a word on how many are lost by that."""
    known = {key(row) for row in evaluated}
    found = [row for row in rows if key(row) not in known]
    if len(found) < len(rows):
        warnings.warn(
            f"{len(rows) - len(found)} of {len(rows)} training rows ask what an evaluation asks, and are left out",
            stacklevel=2,
        )
    return found
