"""Logs in Parquet, read in parts of bounded size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ..errors import LogError, MissingExtraError
from . import columns
from .columns import (
    LONGEST_PROMPT,
    LONGEST_ROW,
    MOST_BYTES,
    PER_ROW,
    Chunk,
    Known,
    Ragged,
    build,
    per_row,
    too_long_a_prompt,
    too_many_tokens,
)

# Reads Thrift's compact protocol, which Parquet uses for its footer and the headers of its pages.

DEEPEST = 8
"""Largest depth of nested structs; Parquet uses five."""


class UnreadableError(ValueError):
    """The bytes do not follow the format."""


def read_struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The fields of a struct by their numbers, and the position of its end."""
    found: dict[int, Any] = {}
    field = 0
    while True:
        kind, at = _byte(data, at)
        if not kind:
            return found, at
        if kind >> 4:
            field += kind >> 4
        else:
            field, at = _integer(data, at)
        found[field], at = _value(data, at, kind & 15, depth)


def number(found: dict[int, Any], field: int, missing: int | None = None) -> int:
    """A field that must be a size, a count or a position in a file."""
    value = found.get(field, missing)
    if not isinstance(value, int) or not 0 <= value < 2**62:
        raise UnreadableError(f"{value!r} instead of a size or a count")
    return value


def struct(found: dict[int, Any], field: int) -> dict[int, Any] | None:
    """A field that must be a struct; None if it is missing."""
    value = found.get(field)
    if value is not None and not isinstance(value, dict):
        raise UnreadableError("a number instead of a struct")
    return value


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return _byte(data, at)
    if kind in (4, 5, 6):
        return _integer(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = read_varint(data, at)
        return data[at : at + size], at + size
    if kind == 9 and depth < DEEPEST:
        return _list(data, at, depth + 1)
    if kind == 12 and depth < DEEPEST:
        return read_struct(data, at, depth + 1)
    raise UnreadableError(f"a field of type {kind}")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    head, at = _byte(data, at)
    size, kind = head >> 4, head & 15
    if size == 15:
        size, at = read_varint(data, at)
    found: list[Any] = []
    for _ in range(size):
        # In a list a boolean has a byte of its own.
        value, at = _byte(data, at) if kind in (1, 2) else _value(data, at, kind, depth)
        found.append(value)
    return found, at


def _byte(data: bytes, at: int) -> tuple[int, int]:
    if at >= len(data):
        raise UnreadableError("bytes that end too soon")
    return data[at], at + 1


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned integer, and the position of its end."""
    found = shift = 0
    while True:
        byte, at = _byte(data, at)
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
        if shift > 63:
            raise UnreadableError("a number of more than 64 bits")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    found, at = read_varint(data, at)
    return (found >> 1) ^ -(found & 1), at


# Reads the row groups of a Parquet file from its footer.
#
# pyarrow can do this too, but it ends the whole process if a damaged footer contradicts itself.

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


# Finds the longest list of a Parquet column from its repetition levels, without decoding values.
#
# A few bytes of run-length encoding can represent a list of any length, so the memory for a batch of rows cannot be
# computed from the file's size or its metadata. It can be computed from the repetition levels: a level of 0 begins a
# row.

LARGEST_PAGE = 2**28
"""Largest size of a page in bytes; writers use pages of about a MiB."""

HEADER = 2**20
"""Largest size of a page's header in bytes."""


class Longest(NamedTuple):
    """Number of entries of the longest row, and its index in the row group."""

    entries: int
    row: int


def longest_row(handle: IO[bytes], chunk: Column, max_level: int, pa: Any) -> Longest:
    """The longest row of one column of a row group.

    Args:
        handle: the open file.
        chunk: the column.
        max_level: the column's largest repetition level, above 0.
        pa: the module pyarrow.

    Returns:
        The first of the longest rows.
    """
    longest, current, row = Longest(0, 0), 0, -1
    for rows, entries in _runs(handle, chunk, max_level.bit_length(), pa):
        if not rows:
            current += entries
            continue
        if current > longest.entries:
            longest = Longest(current, row)
        row, current = row + rows, entries
    return Longest(current, row) if current > longest.entries else longest


def _runs(handle: IO[bytes], chunk: Column, width: int, pa: Any) -> Iterator[tuple[int, int]]:
    """Pairs: (0, n) for n more entries of the current row; (n, m) if n rows begin and the last has m entries so far."""
    for levels, count in _pages(handle, chunk, pa):
        yield from _levels(levels, count, width)


def _levels(data: bytes, count: int, width: int) -> Iterator[tuple[int, int]]:
    """Decode a page's levels, which are runs of one level or bits, `width` of them for each level."""
    import numpy

    at = 0
    while count > 0:
        header, at = read_varint(data, at)
        if header & 1:
            size = (header >> 1) * width
            bits = numpy.unpackbits(numpy.frombuffer(data[at : at + size], "uint8"), bitorder="little")
            inside: Any = bits[: len(bits) // width * width].reshape(-1, width).any(axis=1)
            inside = inside[:count]
            if not len(inside):
                raise UnreadableError("levels that end before the page")
            yield from _of_bits(numpy.flatnonzero(~inside).tolist(), len(inside))
            count, at = count - len(inside), at + size
        else:
            run, size = min(header >> 1, count), (width + 7) // 8
            level = int.from_bytes(data[at : at + size], "little")
            if not run:
                raise UnreadableError("a run of 0 levels")
            yield (0, run) if level else (run, 1)
            count, at = count - run, at + size


def _of_bits(starts: list[int], count: int) -> Iterator[tuple[int, int]]:
    if not starts:
        yield 0, count
        return
    if starts[0]:
        yield 0, starts[0]
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        yield 1, end - start


def _pages(handle: IO[bytes], chunk: Column, pa: Any) -> Iterator[tuple[bytes, int]]:
    """The encoded repetition levels of each data page, and their number."""
    at, left = chunk.start, chunk.values
    while left > 0:
        handle.seek(at)
        page, size = read_struct(handle.read(HEADER), 0)
        compressed, whole = number(page, 3), number(page, 2)
        if max(compressed, whole) > LARGEST_PAGE:
            raise UnreadableError(f"a page of {max(compressed, whole)} bytes")
        handle.seek(at + size)
        at += size + compressed
        first, second = struct(page, 5), struct(page, 8)
        if second is not None:
            count, levels = number(second, 1), handle.read(min(number(second, 6), compressed))
        elif first is not None:
            count, levels = number(first, 1), _of_first_version(handle.read(compressed), whole, chunk.codec, pa)
        else:
            continue  # a dictionary
        left -= count
        yield levels, count


def _of_first_version(data: bytes, whole: int, codec: int, pa: Any) -> bytes:
    """The levels of a page of version 1: they are at its start, after their size, and compressed with the page."""
    if codec not in CODECS:
        raise UnreadableError(f"a page compressed with codec {codec}")
    name = CODECS[codec]
    if name is not None:
        data = pa.Codec(name).decompress(data, whole, asbytes=True)
    return data[4 : 4 + int.from_bytes(data[:4], "little")]


# Plans how many rows of a Parquet file are decoded at once, so that their memory is known in advance.

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


# Parquet: list columns, read in batches of rows.

READ_BUFFER = 2**20
"""Size in bytes of the buffer for reading a column; otherwise a whole row group would be read at once."""

REWRITE = "write the file again: it was cut off, or is not Parquet"


def open_log(
    path: Path, chosen: dict[str, str], chunk_tokens: int, known: Known
) -> tuple[dict[str, str], int, Callable[[], Iterator[Chunk]]]:
    """Columns, number of rows, and the reader."""
    pa, pq = _pyarrow()
    try:
        # It need not be closed: nothing is written, and the object is freed together with the reader.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER)
        kinds = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
    except (pa.ArrowException, OSError, ValueError) as error:  # a ValueError if a name is not UTF-8
        raise LogError("a complete Parquet file", f"{path}: {_first_line(error)}", REWRITE) from error
    present = file.schema_arrow.names
    names = columns.assign(present, chosen)
    for role, name in names.items():
        if present.count(name) > 1:
            raise LogError(f"one column `{name}`", f"{present.count(name)} columns of that name", "write it once")
        _check_type(pa, role, name, kinds[name])
    if "group" in names and (pa.types.is_string(kinds[names["group"]]) or pa.types.is_binary(kinds[names["group"]])):
        # As a dictionary, so that a long prompt is stored once and not once per row.
        group = [names["group"]]
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER, read_dictionary=group)
    rows = file.metadata.num_rows
    return names, rows, lambda: _chunks(pa, path, file, names, rows, chunk_tokens, known)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow, to read Parquet", "no such package", "pip install 'klgrad[logs]'") from error
    return pyarrow, pyarrow.parquet


def _check_type(pa: Any, role: str, name: str, kind: Any) -> None:
    if role in columns.PER_ROW:
        return
    is_list = any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
    inner = kind.value_type if is_list else None
    tests = [pa.types.is_floating] + ([pa.types.is_integer, pa.types.is_boolean] if role == "mask" else [])
    if inner is None or not any(test(inner) for test in tests):
        wanted = "numbers or booleans" if role == "mask" else "floats"
        raise LogError(
            f"`{name}` as lists of {wanted}, one list per completion",
            f"a column of {kind}",
            f"log per-token values, or {columns.another(role)}",
        )


def _chunks(
    pa: Any, path: Path, file: Any, names: dict[str, str], rows: int, tokens: int, known: Known
) -> Iterator[Chunk]:
    labels, done = per_row(names, "row", known), 0
    wanted = list(dict.fromkeys(names.values()))
    try:
        for row_groups, size in batches(pa, path, file.schema, names, tokens):
            for batch in file.iter_batches(batch_size=size, row_groups=row_groups, columns=wanted):
                numbers = torch.arange(done, done + batch.num_rows)
                done += batch.num_rows
                given = {
                    role: _ragged(batch.column(name), name, numbers)
                    for role, name in names.items()
                    if role not in columns.PER_ROW
                }
                found = {
                    role: each.number(_identifiers(pa, batch.column(names[role]), names[role]), numbers)
                    for role, each in labels.items()
                }
                yield build(numbers, "row", given, found, done, names)
    except (pa.ArrowException, OSError, UnicodeError, UnreadableError) as error:
        raise LogError(
            f"a complete Parquet file of {rows} rows", f"{path}: {_first_line(error)} after row {done}", REWRITE
        ) from error
    if done != rows:
        raise LogError(f"{rows} rows in {path}, as its metadata state", f"{done} rows", REWRITE)


def _identifiers(pa: Any, column: Any, name: str) -> list[object]:
    """The values of a column of any type. Dates and times become numbers, since Python's dates end in the year 9999."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        known = _identifiers(pa, column.dictionary, name)
        return [None if i is None else known[i] for i in column.indices.to_pylist()]
    if pa.types.is_temporal(kind) and kind.bit_width in (32, 64):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    try:
        return column.to_pylist()
    except (ValueError, OverflowError) as error:
        raise LogError(
            f"prompts in `{name}` that Python can represent",
            f"a column of {kind}: {_first_line(error)}",
            "log a number or a text, or leave the column out with --column group=",
        ) from error


def _ragged(column: Any, name: str, rows: torch.Tensor) -> Ragged:
    if column.null_count:
        at = column.is_null().to_pylist().index(True)
        raise LogError(
            f"a list in `{name}` in every row",
            f"null in row {int(rows[at])}",
            "remove the row, or log an empty list",
        )
    lengths = torch.from_numpy(column.value_lengths().to_numpy(zero_copy_only=False).astype("int64"))
    flat = column.flatten()
    # A null inside a list becomes NaN, and later gives the same error; booleans have no NaN.
    flat = flat.cast("float32") if flat.null_count and flat.type == "bool" else flat
    values = flat.to_numpy(zero_copy_only=False)
    return Ragged(torch.from_numpy(values if values.flags.writeable else values.copy()), lengths)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
