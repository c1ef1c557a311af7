"""JSON lines: one object per completion, read in blocks of lines.

pyarrow parses a block if it is installed and the block is valid; this is five times as fast. Otherwise the standard
library parses it line by line, so that errors name the line.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from . import columns
from .chunk import Chunk, Ragged, build
from .limits import LONGEST_LINE
from .lines import Block, Part, read_lines, records
from .log_errors import LogError
from .prompt_groups import Groups, Known, per_row

BLOCK = 2**23
"""Bytes of a block; a longer line is a block of its own."""


def open_log(
    path: Path, chosen: dict[str, str], chunk_tokens: int, known: Known
) -> tuple[dict[str, str], int, Callable[[], Iterator[Chunk]]]:
    """Columns (from the first line), number of bytes, and the reader."""
    with path.open("rb") as handle:
        first = next((record for block in _blocks(handle) for _, record in records(block, path)), None)
    if first is None:
        raise LogError("a log with rows in it", f"{path}, which has blank lines only", "write the log again")
    names = columns.assign(list(first), chosen)
    # pyarrow needs the types in advance: blocks with other types than the first line are read line by line.
    schema = _schema(names, first)
    return names, path.stat().st_size, lambda: _chunks(path, names, schema, chunk_tokens, known)


def _blocks(handle: IO[bytes]) -> Iterator[Block]:
    first = 1
    while data := handle.read(BLOCK):
        rest = handle.readline(LONGEST_LINE + 1)
        breaks = data.count(b"\n")
        if len(rest) > LONGEST_LINE:
            raise LogError(
                f"lines of up to {LONGEST_LINE:,} bytes",
                f"a longer line {first + breaks}",
                "write one completion per line; write longer completions as Parquet",
            )
        data += rest
        breaks += rest.endswith(b"\n")
        yield Block(data, first, breaks + (not data.endswith(b"\n")))
        first += breaks


def _chunks(path: Path, names: dict[str, str], schema: Any, chunk_tokens: int, known: Known) -> Iterator[Chunk]:
    labels = per_row(names, "line", known)
    held: list[Part] = []
    tokens = done = 0
    with path.open("rb") as handle:
        for block in _blocks(handle):
            part = _fast(block, names, schema) or read_lines(block, names, path)
            done += len(block.data)
            if not len(part[0]):
                continue
            held.append(part)
            tokens += len(part[1]["logp"].values)
            if tokens >= chunk_tokens:
                yield _assemble(held, names, labels, done)
                held, tokens = [], 0
    if held:
        yield _assemble(held, names, labels, done)


def _assemble(held: list[Part], names: dict[str, str], labels: dict[str, Groups], done: int) -> Chunk:
    numbers = torch.cat([part[0] for part in held])
    given = {}
    for role in [role for role in names if role not in columns.PER_ROW]:
        parts = [part[1][role] for part in held]
        given[role] = Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))
    found = {role: each.number((x for part in held for x in part[2][role]), numbers) for role, each in labels.items()}
    return build(numbers, "line", given, found, done, names)


def _schema(names: dict[str, str], first: dict[str, Any]) -> Any:
    """The schema of the first line's values; None without pyarrow, or if they have another type than expected."""
    try:
        import pyarrow as pa
    except ImportError:
        return None
    kinds = {}
    for role, name in names.items():
        value = first[name]
        if role in columns.PER_ROW:
            kinds[name] = {str: pa.string(), int: pa.int64()}.get(type(value))
        else:
            flags = role == "mask" and isinstance(value, list) and bool(value) and isinstance(value[0], bool)
            kinds[name] = pa.list_(pa.bool_() if flags else pa.float32())
    return None if None in kinds.values() else pa.schema(kinds)


def _fast(block: Block, names: dict[str, str], schema: Any) -> Part | None:
    """The rows of the block; None if it has a null, a blank line or a value of another type."""
    if schema is None:
        return None
    import pyarrow as pa
    import pyarrow.json as pj

    try:
        table = pj.read_json(
            pa.BufferReader(block.data),
            read_options=pj.ReadOptions(block_size=len(block.data) // 2 + 1),  # two blocks, for two threads
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except (pa.ArrowException, UnicodeError):
        return None
    if table.num_rows != block.lines:
        return None
    given = {}
    for role, name in names.items():
        column = table.column(name).combine_chunks()
        if column.null_count:
            return None
        if role not in columns.PER_ROW:
            flat = column.flatten()
            if flat.null_count:
                return None
            values = torch.from_numpy(flat.to_numpy(zero_copy_only=False).copy())
            given[role] = Ragged(values, torch.from_numpy(column.value_lengths().to_numpy().astype("int64")))
    values = {role: table.column(names[role]).to_pylist() for role in columns.PER_ROW if role in names}
    return torch.arange(block.first, block.first + block.lines), given, values
