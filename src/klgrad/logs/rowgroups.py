"""Plans how many rows of a Parquet file are decoded at once, so that their memory is known in advance."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .columns import PER_ROW
from .footer import RowGroup, row_groups
from .levels import longest_row
from .limits import LONGEST_PROMPT, LONGEST_ROW, MOST_BYTES, too_long_a_prompt, too_many_tokens

MOST_ROWS = 2**16
"""Largest number of rows of a batch, however short they are."""


def batches(pa: Any, path: Path, schema: Any, names: dict[str, str], tokens: int) -> Iterator[tuple[list[int], int]]:
    """Plan the batches of a file.

    Small row groups are read together, up to `LONGEST_ROW` entries.

    Args:
        pa: the module pyarrow.
        path: the file.
        schema: its Parquet schema.
        names: role to column name.
        tokens: the approximate number of tokens of a batch.

    Returns:
        Pairs: the row groups that are read together, and the number of rows of a batch of them.
    """
    first = rows = values = 0
    together: list[int] = []
    for i, group in enumerate(row_groups(path)):
        _check_prompts(group, names, first)
        most = max((column.values for column in group.columns), default=0)
        if together and values + most > LONGEST_ROW:
            yield together, _size(rows, values, tokens)
            together, rows, values = [], 0, 0
        if most > LONGEST_ROW:
            yield [i], min(_size(group.rows, most, tokens), _most_rows(pa, path, schema, names, group, first))
        else:
            together, rows, values = [*together, i], rows + group.rows, values + most
        first += group.rows
    if together:
        yield together, _size(rows, values, tokens)


def _size(rows: int, values: int, tokens: int) -> int:
    """The number of rows with about `tokens` tokens, by the mean length."""
    return max(1, min(MOST_ROWS, int(tokens / max(1.0, values / max(rows, 1)))))


def _most_rows(pa: Any, path: Path, schema: Any, names: dict[str, str], group: RowGroup, first: int) -> int:
    """The number of rows of a large row group that have together at most `LONGEST_ROW` entries in every case."""
    longest = 1
    with path.open("rb") as handle:
        for j, column in enumerate(group.columns[: len(schema)]):
            level = schema.column(j).max_repetition_level
            name = next((name for name in names.values() if column.is_of(name)), None)
            if name is None or not level or column.values <= longest:
                continue
            found = longest_row(handle, column, level, pa)
            if found.entries > LONGEST_ROW:
                raise too_many_tokens(name, found.entries, f"row {first + found.row}")
            longest = max(longest, found.entries)
    return LONGEST_ROW // longest


def _check_prompts(group: RowGroup, names: dict[str, str], first: int) -> None:
    """Refuse long prompts by the size of their column, in which a repeated text counts once."""
    for name in [names[role] for role in PER_ROW if role in names]:
        size = sum(column.size for column in group.columns if column.path == name)
        if size > MOST_BYTES and size > LONGEST_PROMPT * group.rows:
            each = f"on average {size // max(group.rows, 1):,} bytes per row"
            raise too_long_a_prompt(name, size, f"the {group.rows} rows from row {first} on, {each}")
