"""How many rows of a Parquet file are decoded at a time, so that what they take is known before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .levels import longest_row
from .limits import LONGEST_PROMPT, LONGEST_ROW, MOST_BYTES, too_long_a_prompt, too_many_tokens

MOST_ROWS = 2**16
"""Rows of a batch, however short they are."""


def batches(pa: Any, path: Path, file: Any, names: dict[str, str], tokens: int) -> Iterator[tuple[list[int], int]]:
    """Row groups that are read together, and rows of a batch of about that many tokens, at most `LONGEST_ROW`.

    Small row groups are read together; a batch of them has no more entries than they have.
    """
    held, first, rows, values = file.metadata, 0, 0, 0
    together: list[int] = []
    for i in range(held.num_row_groups):
        group = held.row_group(i)
        most = max((group.column(j).num_values for j in range(group.num_columns)), default=0)
        if most > LONGEST_ROW:
            if together:
                yield together, _size(rows, values, tokens)
            yield [i], min(_size(group.num_rows, most, tokens), _most_rows(pa, path, file, names, i, first))
            together, rows, values = [], 0, 0
        else:
            if together and values + most > LONGEST_ROW:
                yield together, _size(rows, values, tokens)
                together, rows, values = [], 0, 0
            together, rows, values = [*together, i], rows + group.num_rows, values + most
        _check_prompts(group, names, first)
        first += group.num_rows
    if together:
        yield together, _size(rows, values, tokens)


def _size(rows: int, values: int, tokens: int) -> int:
    """Rows of about that many tokens, by their mean."""
    return max(1, min(MOST_ROWS, int(tokens / max(1.0, values / max(rows, 1)))))


def _most_rows(pa: Any, path: Path, file: Any, names: dict[str, str], i: int, first: int) -> int:
    """Rows of a large row group that are at most `LONGEST_ROW` entries together, whichever they are."""
    group, longest = file.metadata.row_group(i), 1
    with path.open("rb") as handle:
        for j in range(group.num_columns):
            chunk, level = group.column(j), file.schema.column(j).max_repetition_level
            name = next((name for name in names.values() if f"{chunk.path_in_schema}.".startswith(f"{name}.")), None)
            if name is None or not level or chunk.num_values <= longest:
                continue
            found = longest_row(handle, chunk, level, pa)
            if found.entries > LONGEST_ROW:
                raise too_many_tokens(name, found.entries, f"row {first + found.row}")
            longest = max(longest, found.entries)
    return LONGEST_ROW // longest


def _check_prompts(group: Any, names: dict[str, str], first: int) -> None:
    """Texts have their length in the column's size, but for those that are repeated, which are held once."""
    for j in range(group.num_columns):
        chunk = group.column(j)
        size = chunk.total_uncompressed_size
        if chunk.path_in_schema == names.get("group") and size > MOST_BYTES and size > LONGEST_PROMPT * group.num_rows:
            place = f"the {group.num_rows} rows from row {first} on, which is {size // group.num_rows:,} bytes each"
            raise too_long_a_prompt(names["group"], size, place)
