"""Which prompts are kept for evaluation. The choice depends on their text alone, so none is also trained on."""

import json
import warnings
import zlib
from typing import Any

Row = dict[str, Any]
HELD_OUT = 5
"""At most one prompt in this many is kept for evaluation."""


def text_hash(text: str) -> int:
    """A hash that is the same on every machine and in every process."""
    return zlib.crc32(text.encode())


def key(row: Row) -> str:
    """The prompt as text: rows with equal keys have the same prompt."""
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
    """Split into rows to train on and up to `size` different prompts to evaluate on, those with the smallest hashes.

    It does not depend on the order of the rows or on a seed. At most one in `part` different prompts is held out.
    """
    keys = sorted({key(row) for row in rows}, key=lambda text: (text_hash(text), text))
    kept = set(keys[: min(size, len(keys) // part)])
    held_out = distinct([row for row in rows if key(row) in kept], len(kept))
    return [row for row in rows if key(row) not in kept], held_out


def without(rows: list[Row], evaluated: list[Row]) -> list[Row]:
    """Drop the rows whose prompts are evaluated on, and warn about how many these are."""
    known = {key(row) for row in evaluated}
    found = [row for row in rows if key(row) not in known]
    if len(found) < len(rows):
        warnings.warn(
            f"{len(rows) - len(found)} of {len(rows)} training rows "
            "have prompts that are evaluated on and are left out",
            stacklevel=2,
        )
    return found
