"""Open a log of any format: JSON lines and NumPy archives are read here."""

import glob
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ..errors import LogError, MissingExtraError
from . import columns, parquet
from .columns import (
    LONGEST_LINE,
    LONGEST_PROMPT,
    LONGEST_ROW,
    MOST_BYTES,
    Chunk,
    Groups,
    Known,
    Ragged,
    build,
    per_row,
    too_long_a_prompt,
    too_many_tokens,
)

# Parses JSON lines one by one with the standard library, so that errors name the line.


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


# JSON lines: one object per completion, read in blocks of lines.
#
# pyarrow parses a block if it is installed and the block is valid; this is five times as fast. Otherwise the standard
# library parses it line by line, so that errors name the line.

BLOCK = 2**23
"""Bytes of a block; a longer line is a block of its own."""


def open_jsonl(
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
    return names, path.stat().st_size, lambda: _jsonl_chunks(path, names, schema, chunk_tokens, known)


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


def _jsonl_chunks(path: Path, names: dict[str, str], schema: Any, chunk_tokens: int, known: Known) -> Iterator[Chunk]:
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


# NPZ: rectangular arrays, read from the archive row by row, so that a wrong size in a header allocates no memory.

BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)

LONGEST_HEADER = 2**16
"""Largest size of a header in bytes; NumPy, too, considers a longer one unsafe."""

KINDS = {"mask": "biuf", **dict.fromkeys(columns.PER_TOKEN, "f")}
"""The `dtype.kind` letters that are valid for each role."""


@dataclass(frozen=True)
class _Header:
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: Any


def open_npz(
    path: Path, chosen: dict[str, str], chunk_tokens: int, known: Known
) -> tuple[dict[str, str], int, Callable[[], Iterator[Chunk]]]:
    """Columns, number of rows, and the reader."""
    try:
        with zipfile.ZipFile(path) as archive:
            present = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            names = columns.assign(present, chosen)
            headers = {}
            for role, name in names.items():
                with archive.open(f"{name}.npy") as stream:
                    headers[role] = _header(stream, name)
    except (*BROKEN, RuntimeError) as error:  # a RuntimeError if the archive is encrypted
        raise _broken(path, error) from error
    _check(headers, names)
    rows, width = headers["logp"].shape
    size = max(1, min(rows, chunk_tokens // max(width, 1)))
    for role in [role for role in columns.PER_ROW if role in headers]:
        size = max(1, min(size, MOST_BYTES // max(headers[role].dtype.itemsize, 1)))
    return names, rows, lambda: _chunks(path, names, size, known)


def _numpy() -> Any:
    try:
        import numpy
        import numpy.lib.format
    except ImportError as error:
        raise MissingExtraError("numpy, to read NPZ", "no such package", "pip install 'klgrad[logs]'") from error
    return numpy


def _header(stream: IO[bytes], name: str) -> _Header:
    form = _numpy().lib.format
    try:
        version = form.read_magic(stream)
        read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, fortran, dtype = read(_header_bytes(stream, 2 if version == (1, 0) else 4))
    except (
        ValueError,
        TypeError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:  # all are possible for a damaged header
        reason = str(error).split("\n")[0]
        raise LogError(f"`{name}` as a NumPy array", reason, "write the file again with numpy.savez") from error
    if dtype.hasobject:
        raise LogError(
            f"`{name}` as an array of numbers",
            "an array of Python objects, which is a pickle and can run code",
            "save rectangular arrays and a mask, or write ragged lists as Parquet or JSONL",
        )
    if fortran and len(shape) > 1:
        raise LogError(
            f"`{name}` row by row (C order)", "Fortran order", "save numpy.ascontiguousarray(x), or the transpose"
        )
    return _Header(shape, dtype)


def _header_bytes(stream: IO[bytes], size: int) -> IO[bytes]:
    """The header, after its length; the length is checked before the header is read."""
    length = stream.read(size)
    if int.from_bytes(length, "little") > LONGEST_HEADER:
        raise ValueError(f"a header of {int.from_bytes(length, 'little')} bytes")
    return io.BytesIO(length + stream.read(int.from_bytes(length, "little")))


def _check(headers: dict[str, _Header], names: dict[str, str]) -> None:
    shape = headers["logp"].shape
    for role, header in headers.items():
        once = role in columns.PER_ROW
        expected = shape[:1] if once else shape
        if len(shape) != 2 or header.shape != expected:
            raise LogError(
                f"`{names[role]}` of shape {f'{expected}, one entry per completion' if once else '(B, T)'}"
                + (f", as `{names['logp']}` with {shape}" if len(shape) == 2 and not once else ""),
                f"shape {header.shape}",
                "pad the completions to one length and save a mask",
            )
        if role in KINDS and (header.dtype.kind not in KINDS[role] or header.dtype.itemsize > 8):
            wanted = "a number or boolean" if role == "mask" else "a floating-point"
            raise LogError(
                f"`{names[role]}` with {wanted} dtype of up to 64 bits",
                str(header.dtype),
                "save a mask as booleans" if role == "mask" else "save log-probs, not token ids, as float32",
            )
        if once and header.dtype.itemsize > LONGEST_PROMPT:
            raise too_long_a_prompt(names[role], header.dtype.itemsize, f"every row, by its dtype {header.dtype}")
    if shape[0] < 0 or shape[1] < 0:
        raise LogError(f"`{names['logp']}` of shape (B, T)", f"shape {shape}", "write the file again with numpy.savez")
    if shape[1] > LONGEST_ROW:
        raise too_many_tokens(names["logp"], shape[1], f"every row, by its shape {shape}")


def _chunks(path: Path, names: dict[str, str], size: int, known: Known) -> Iterator[Chunk]:
    labels, done = per_row(names, "row", known), 0
    try:
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(path))
            streams = {role: stack.enter_context(archive.open(f"{name}.npy")) for role, name in names.items()}
            headers = {role: _header(stream, names[role]) for role, stream in streams.items()}
            rows = headers["logp"].shape[0]
            while done < rows:
                count = min(size, rows - done)
                numbers = torch.arange(done, done + count)
                read = {role: _rows(streams[role], headers[role], names[role], done, count) for role in names}
                found = {role: each.number(read.pop(role).tolist(), numbers) for role, each in labels.items()}
                given = {role: _ragged(x) for role, x in read.items()}
                done += count
                yield build(numbers, "row", given, found, done, names)
    except BROKEN as error:
        raise _broken(path, error) from error


def _rows(stream: IO[bytes], header: _Header, name: str, done: int, count: int) -> Any:
    numpy = _numpy()
    per_row = header.dtype.itemsize * int(numpy.prod(header.shape[1:], dtype=object))
    wanted = per_row * count
    data = stream.read(wanted)
    if len(data) != wanted:
        held = done + len(data) // max(per_row, 1)
        raise LogError(
            f"{header.shape[0]} rows of `{name}`, as its header states",
            f"data that end in row {held}",
            "write the file again",
        )
    flat = numpy.frombuffer(data, header.dtype)
    return flat.astype(header.dtype.newbyteorder("=")).reshape(count, *header.shape[1:])


def _ragged(x: Any) -> Ragged:
    rows, width = x.shape
    return Ragged(torch.from_numpy(x.reshape(-1)), torch.full((rows,), width, dtype=torch.int64))


def _broken(path: Path, error: BaseException) -> LogError:
    what = str(error) or type(error).__name__
    return LogError(
        "a complete NPZ file", f"{path}: {what}", "write it again with numpy.savez: it was cut off, or is not NPZ"
    )


# Logs in Parquet, JSONL and NPZ as a stream of chunks. Reading these formats cannot run code.

CHUNK_TOKENS = 2**20
"""The approximate number of tokens in memory, for each column."""

CODE = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib")
"""Suffixes of files that can run code when they are read."""


@dataclass(frozen=True)
class Log:
    """An open log.

    Attributes:
        columns: role to the column's name.
        total: the value of `Chunk.done` at the end of the file.
        chunks: reads the file once.
    """

    columns: dict[str, str]
    total: int
    chunks: Callable[[], Iterator[Chunk]]


READERS = {".parquet": parquet.open_log, ".jsonl": open_jsonl, ".ndjson": open_jsonl, ".npz": open_npz}


def open_log(path: Path, chosen: dict[str, str], chunk_tokens: int = CHUNK_TOKENS, known: Known | None = None) -> Log:
    """Find the columns of a log.

    Args:
        path: the file.
        chosen: role to column name, to override the recognised names.
        chunk_tokens: the approximate number of tokens of a chunk.
        known: the numbers of prompts in the files before this one, to which those of this file are added.

    Returns:
        The log, from which nothing but names and sizes has been read.
    """
    if not path.exists():
        raise LogError("an existing file or folder", str(path), "check the path")
    suffix = path.suffix.lower()
    if suffix not in READERS:
        remedy = "save it as Parquet (`pyarrow.parquet.write_table`), JSONL or NPZ (`numpy.savez`)"
        if suffix in CODE:
            remedy = f"a pickle can run code, so it is not read: {remedy}"
        raise LogError(f"a file that ends in {', '.join(READERS)}", str(path), remedy)
    if not path.is_file():
        raise LogError("a regular file", str(path), "save the log in one")
    if path.stat().st_size == 0:
        raise LogError("a log with rows in it", f"{path}, which is empty (0 bytes)", "write the log again")
    return Log(*READERS[suffix](path, chosen, chunk_tokens, {} if known is None else known))


# The files that a user names: single ones, folders and patterns.


def files_of(given: Sequence[Path]) -> list[Path]:
    """The log files, in the order in which they were named, those of a folder or a pattern by name; each once.

    Args:
        given: files, folders (all log files directly in them) and patterns with `*`, `?` or `[...]`.
    """
    found = [path for each in given for path in _expanded(each)]
    return list(dict.fromkeys(found))


def describe(given: Sequence[Path], files: Sequence[Path]) -> str:
    """What was read, for the head of a report."""
    if len(given) == 1:
        return str(given[0]) + (f" ({_count(len(files))})" if list(files) != list(given) else "")
    return f"{given[0]} and {len(given) - 1} more ({_count(len(files))})"


def _count(files: int) -> str:
    return f"{files} file{'s' * (files != 1)}"


def _expanded(path: Path) -> list[Path]:
    if path.is_dir():
        # A file whose name begins with a dot is still being written.
        inside = [x for x in path.iterdir() if x.suffix.lower() in READERS and not x.name.startswith(".")]
        return sorted(inside) or _refuse(f"{path}, a folder without any")
    if not path.exists() and glob.has_magic(str(path)):
        matching = [Path(x) for x in glob.glob(str(path), recursive=True)]
        return sorted(x for x in matching if x.is_file()) or _refuse(f"no file that matches {path}")
    return [path]


def _refuse(received: str) -> list[Path]:
    raise LogError(f"files that end in {', '.join(READERS)}", received, "check the path")
