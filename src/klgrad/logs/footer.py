"""Reads the row groups of a Parquet file from its footer.

pyarrow can do this too, but it ends the whole process if a damaged footer contradicts itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .thrift import UnreadableError, number, read_struct

CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
"""Compressions by their number in the format; the numbers left out are obsolete."""


@dataclass(frozen=True)
class Column:
    """A column of a row group.

    Attributes:
        path: the names of the column and its parents, joined by dots.
        values: number of entries; an empty list counts as one.
        size: bytes before compression.
        start: position of its first page in the file.
        codec: number of the compression.
    """

    path: str
    values: int
    size: int
    start: int
    codec: int

    def is_of(self, name: str) -> bool:
        """Whether this is the column `name`, or a part of it."""
        return f"{self.path}.".startswith(f"{name}.")


@dataclass(frozen=True)
class RowGroup:
    """A row group: the number of its rows, and its columns; nested types have several."""

    rows: int
    columns: list[Column]


def row_groups(path: Path) -> list[RowGroup]:
    """All row groups, in the order of the file."""
    with path.open("rb") as handle:
        handle.seek(-8, 2)
        size = int.from_bytes(handle.read(4), "little")
        handle.seek(-8 - size, 2)
        footer, _ = read_struct(handle.read(size), 0)
    try:
        return [RowGroup(number(group, 3), [_column(each[3]) for each in group[1]]) for group in footer.get(4, [])]
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableError("a footer without required fields") from error


def _column(fields: dict[int, Any]) -> Column:
    path = b".".join(fields[3]).decode("utf-8", "replace")
    data = number(fields, 9)
    start = min(data, number(fields, 11, 0) or data)  # a dictionary comes before the data
    return Column(path, number(fields, 5), number(fields, 6), start, number(fields, 4))
