"""Parquet: list columns, a batch of rows at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import MissingExtraError
from . import columns
from .chunk import Chunk, Ragged, build
from .errors import LogError
from .groups import Groups

MOST_ROWS = 2**16
"""Rows of a batch, however short they are."""

READ_BUFFER = 2**20
"""Bytes: columns are read through a buffer, not a row group at a time."""

REWRITE = "write the file again: it was cut off, or is no Parquet"


def open_log(
    path: Path, chosen: dict[str, str], chunk_tokens: int
) -> tuple[dict[str, str], int, Callable[[], Iterator[Chunk]]]:
    """Columns, number of rows, and the reader."""
    pa, pq = _pyarrow()
    try:
        # The caller's closing is not needed: nothing is written, and the object dies with the reader.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER)
    except (pa.ArrowException, OSError) as error:
        raise LogError("a whole Parquet file", f"{path}: {_first_line(error)}", REWRITE) from error
    present = file.schema_arrow.names
    names = columns.assign(present, chosen)
    for role, name in names.items():
        if present.count(name) > 1:
            raise LogError(f"one column `{name}`", f"{present.count(name)} of that name", "write it once")
        _check_type(pa, role, name, file.schema_arrow.field(name).type)
    rows = file.metadata.num_rows
    return names, rows, lambda: _chunks(pa, path, file, names, rows, _batch_rows(file, names, chunk_tokens))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow, to read Parquet", "no such package", "pip install 'klgrad[logs]'") from error
    return pyarrow, pyarrow.parquet


def _check_type(pa: Any, role: str, name: str, kind: Any) -> None:
    if role == "group":
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


def _batch_rows(file: Any, names: dict[str, str], tokens: int) -> int:
    """Rows of a batch of about that many tokens, from the counts that the file itself states."""
    held = file.metadata
    count = 0
    for i in range(held.num_row_groups):
        group = held.row_group(i)
        count += max((group.column(j).num_values for j in range(group.num_columns)), default=0)
    mean = max(1.0, count / max(held.num_rows, 1))
    return max(1, min(MOST_ROWS, int(tokens / mean)))


def _chunks(pa: Any, path: Path, file: Any, names: dict[str, str], rows: int, size: int) -> Iterator[Chunk]:
    groups, done = Groups(names.get("group", ""), "row"), 0
    try:
        for batch in file.iter_batches(batch_size=size, columns=list(dict.fromkeys(names.values()))):
            numbers = torch.arange(done, done + batch.num_rows)
            done += batch.num_rows
            given = {
                role: _ragged(batch.column(name), name, numbers) for role, name in names.items() if role != "group"
            }
            group = groups.number(batch.column(names["group"]).to_pylist(), numbers) if "group" in names else None
            yield build(numbers, "row", given, group, done, names)
    except (pa.ArrowException, OSError) as error:
        raise LogError(
            f"a whole Parquet file of {rows} rows", f"{path}: {_first_line(error)} after row {done}", REWRITE
        ) from error
    if done != rows:
        raise LogError(f"the {rows} rows that {path} promises", f"{done} rows", REWRITE)


def _ragged(column: Any, name: str, rows: torch.Tensor) -> Ragged:
    if column.null_count:
        at = column.is_null().to_pylist().index(True)
        raise LogError(
            f"a list in `{name}` in every row",
            f"null in row {int(rows[at])}",
            "leave the row out, or log an empty list",
        )
    lengths = torch.from_numpy(column.value_lengths().to_numpy(zero_copy_only=False).astype("int64"))
    flat = column.flatten()
    # A null inside a list becomes NaN, which is then told like any other NaN; booleans have none.
    flat = flat.cast("float32") if flat.null_count and flat.type == "bool" else flat
    values = flat.to_numpy(zero_copy_only=False)
    return Ragged(torch.from_numpy(values if values.flags.writeable else values.copy()), lengths)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
