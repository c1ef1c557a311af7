"""Parquet: list columns, read in batches of rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import MissingExtraError
from . import columns
from .chunk import Chunk, Ragged, build
from .log_errors import LogError
from .prompt_groups import Known, per_row
from .rowgroups import batches
from .thrift import UnreadableError

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
