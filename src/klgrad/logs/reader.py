"""Logs in Parquet, JSON lines and NumPy archives, as a stream of chunks. Reading these formats cannot run code."""

import glob
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import LogError, MissingExtraError
from ..support import Json
from .columns import PER_ROW, PER_TOKEN, Chunk, Known, Ragged, assign, build, numberings, suggest_other_column

CHUNK_TOKENS = 2**20
"""The approximate number of tokens in memory, for each column."""

DECODED_ROWS = 2**8
"""Number of completions that are decoded at once; a chunk consists of several such parts."""

CODE = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib")
"""Suffixes of files that can run code when they are read."""


class DecodedRows(NamedTuple):
    """Completions as the file has them.

    Attributes:
        numbers: (B,) numbers of the rows in the file.
        tokens: role to one number per token.
        values: role to one value per completion.
        share: share of the file up to the last of them.
    """

    numbers: Tensor
    tokens: dict[str, Ragged]
    values: dict[str, list[object]]
    share: float


@dataclass(frozen=True)
class Log:
    """An open log.

    Attributes:
        columns: role to the column's name.
        unit: the name of a row in messages: `row` (counted from 0) or `line` (from 1).
        decode: reads the file once.
    """

    columns: dict[str, str]
    unit: str
    decode: Callable[[], Iterator[DecodedRows]]

    def chunks(self, chunk_tokens: int, known: Known) -> Iterator[Chunk]:
        """Read the file once.

        Args:
            chunk_tokens: the approximate number of tokens of a chunk.
            known: the numbers of prompts in the files before this one, to which those of this file are added.
        """
        labels = numberings(self.columns, self.unit, known)
        held: list[tuple[DecodedRows, dict[str, Tensor]]] = []
        tokens = 0
        for part in self.decode():
            # Numbered here, so that the texts of long prompts are not held.
            per_row = {role: labels[role].number(part.values[role], part.numbers) for role in labels}
            held.append((part._replace(values={}), per_row))
            tokens += len(part.tokens["logp"].values)
            if tokens >= chunk_tokens:
                yield self._join(held)
                held, tokens = [], 0
        if held:
            yield self._join(held)

    def _join(self, held: list[tuple[DecodedRows, dict[str, Tensor]]]) -> Chunk:
        parts = [part for part, _ in held]
        tokens = {}
        for role in parts[0].tokens:
            columns = [part.tokens[role] for part in parts]
            tokens[role] = Ragged(torch.cat([x.values for x in columns]), torch.cat([x.lengths for x in columns]))
        per_row = {role: torch.cat([numbers[role] for _, numbers in held]) for role in held[0][1]}
        rows = torch.cat([part.numbers for part in parts])
        return build(rows, self.unit, tokens, per_row, parts[-1].share, self.columns)


def open_log(path: Path, chosen: dict[str, str]) -> Log:
    """Find the columns of a log.

    Args:
        path: the file.
        chosen: role to column name, to override the recognised names.

    Returns:
        The log, from which nothing but names has been read.
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
    return READERS[suffix](path, chosen)


# Parquet: list columns, read in batches of rows.

READ_BUFFER = 2**20
"""Size in bytes of the buffer for reading a column; otherwise a whole row group would be read at once."""

REWRITE = "write the file again: it was cut off, or is not Parquet"


def _open_parquet(path: Path, chosen: dict[str, str]) -> Log:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow, to read Parquet", "no such package", "pip install 'klgrad[logs]'") from error
    try:
        # It need not be closed: nothing is written, and the object is freed together with the reader.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER)
        schema = file.schema_arrow
        present = schema.names
    except (pa.ArrowException, OSError, ValueError) as error:  # a ValueError if a name is not UTF-8
        raise LogError("a complete Parquet file", f"{path}: {_first_line(error)}", REWRITE) from error
    names = assign(present, chosen)
    for role, name in names.items():
        if present.count(name) > 1:
            raise LogError(f"one column `{name}`", f"{present.count(name)} columns of that name", "write it once")
        if role not in PER_ROW:
            _check_type(pa, role, name, schema.field(name).type)
    return Log(names, "row", lambda: _decode_parquet(pa, path, file, names))


def _check_type(pa: Any, role: str, name: str, kind: Any) -> None:
    is_list = any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
    tests = [pa.types.is_floating] + ([pa.types.is_integer, pa.types.is_boolean] if role == "mask" else [])
    if not is_list or not any(test(kind.value_type) for test in tests):
        wanted = "numbers or booleans" if role == "mask" else "floats"
        raise LogError(
            f"`{name}` as lists of {wanted}, one list per completion",
            f"a column of {kind}",
            f"log per-token values, or {suggest_other_column(role)}",
        )


def _decode_parquet(pa: Any, path: Path, file: Any, names: dict[str, str]) -> Iterator[DecodedRows]:
    rows, done = file.metadata.num_rows, 0
    try:
        for batch in file.iter_batches(DECODED_ROWS, columns=list(dict.fromkeys(names.values()))):
            numbers = torch.arange(done, done + batch.num_rows)
            tokens = {
                role: _lists(batch.column(name), name, numbers) for role, name in names.items() if role not in PER_ROW
            }
            values = {role: batch.column(names[role]).to_pylist() for role in PER_ROW if role in names}
            done += batch.num_rows
            yield DecodedRows(numbers, tokens, values, done / max(rows, 1))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise LogError(
            f"a complete Parquet file of {rows} rows", f"{path}: {_first_line(error)} after row {done}", REWRITE
        ) from error
    if done != rows:
        raise LogError(f"{rows} rows in {path}, as its metadata state", f"{done} rows", REWRITE)


def _lists(column: Any, name: str, rows: Tensor) -> Ragged:
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
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")


# JSON lines: one object per completion.


def _open_jsonl(path: Path, chosen: dict[str, str]) -> Log:
    first = next(_records(path), None)
    if first is None:
        raise LogError("a log with rows in it", f"{path}, which has blank lines only", "write the log again")
    names = assign(list(first[1]), chosen)
    return Log(names, "line", lambda: _decode_jsonl(path, names))


def _records(path: Path) -> Iterator[tuple[int, Json, int]]:
    """The number and the object of each line that is not blank, and the number of bytes up to its end."""
    done = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            done += len(line)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                what = "" if line.endswith(b"\n") else "cut off or "
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
            yield number, record, done


def _decode_jsonl(path: Path, names: dict[str, str]) -> Iterator[DecodedRows]:
    size = path.stat().st_size
    rows = (
        (number, {role: _entry(record, role, name, number) for role, name in names.items()}, done)
        for number, record, done in _records(path)
    )
    while part := list(islice(rows, DECODED_ROWS)):
        tokens = {}
        for role in [role for role in names if role not in PER_ROW]:
            lists = [row[role] for _, row, _ in part]
            tokens[role] = Ragged(torch.cat(lists), torch.tensor([len(x) for x in lists]))
        values = {role: [row[role] for _, row, _ in part] for role in PER_ROW if role in names}
        yield DecodedRows(torch.tensor([number for number, _, _ in part]), tokens, values, part[-1][2] / size)


def _entry(record: Json, role: str, name: str, number: int) -> Any:
    """A value of a line: a tensor if it has one number per token."""
    if name not in record:
        raise LogError(
            f"`{name}` in every line, as in the first",
            f"line {number} without it",
            "remove the line, or log the value",
        )
    value = record[name]
    if role in PER_ROW:
        return value
    if not isinstance(value, list):
        raise LogError(
            f"`{name}` as a list, one number per token",
            f"{type(value).__name__} in line {number}",
            f"log per-token values, or {suggest_other_column(role)}",
        )
    try:
        # float32, in which trainers compute: there a log-prob of 1e-7 is rounding; in float64 it would be an error.
        numbers = torch.tensor(value, dtype=torch.float32)
        if numbers.ndim != 1:
            raise TypeError("lists in a list")
        return numbers
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        is_number = lambda x: isinstance(x, float) or (isinstance(x, int) and abs(x) < 2**63)
        token = next((i for i, x in enumerate(value) if not is_number(x)), 0)
        raise LogError(
            f"a number per token in `{name}`",
            f"{json.dumps(value[token])[:40] if value else value} at line {number}, token {token}",
            "log a number for every token, and mask the tokens to ignore",
        ) from error


# NPZ: rectangular arrays.

KINDS = {"mask": "biuf", **dict.fromkeys(PER_TOKEN, "f")}
"""The `dtype.kind` letters that are valid for each role."""


def _open_npz(path: Path, chosen: dict[str, str]) -> Log:
    names = assign(_load(path, lambda archive: archive.files), chosen)
    return Log(names, "row", lambda: _decode_npz(path, names))


def _load(path: Path, get: Callable[[Any], Any]) -> Any:
    """Get something from an archive."""
    try:
        import numpy
    except ImportError as error:
        raise MissingExtraError("numpy, to read NPZ", "no such package", "pip install 'klgrad[logs]'") from error
    try:
        with path.open("rb") as file, numpy.load(file, allow_pickle=False) as archive:
            return get(archive)
    except Exception as error:  # NumPy raises errors of many kinds for a damaged file
        raise LogError(
            "a complete NPZ file with arrays of numbers",
            f"{path}: {_first_line(error)}",
            "write it again with numpy.savez: it was cut off, is not NPZ, or has Python objects, which are pickles and "
            "can run code; save rectangular arrays and a mask, or write ragged lists as Parquet or JSONL",
        ) from error


def _decode_npz(path: Path, names: dict[str, str]) -> Iterator[DecodedRows]:
    import numpy

    # A damaged array is read as plain bytes, which have no shape.
    arrays = _load(path, lambda archive: {role: numpy.asarray(archive[name]) for role, name in names.items()})
    _check_arrays(arrays, names)
    rows, width = arrays["logp"].shape
    arrays = {role: x.astype(x.dtype.newbyteorder("="), copy=False) for role, x in arrays.items()}
    for start in range(0, rows, DECODED_ROWS):
        part = {role: x[start : start + DECODED_ROWS] for role, x in arrays.items()}
        values = {role: part.pop(role).tolist() for role in PER_ROW if role in part}
        end = start + len(part["logp"])
        lengths = torch.full((end - start,), width)
        tokens = {role: Ragged(torch.from_numpy(x.reshape(-1)), lengths) for role, x in part.items()}
        yield DecodedRows(torch.arange(start, end), tokens, values, end / rows)


def _check_arrays(arrays: dict[str, Any], names: dict[str, str]) -> None:
    shape = arrays["logp"].shape
    for role, array in arrays.items():
        once = role in PER_ROW
        expected = shape[:1] if once else shape
        if len(shape) != 2 or array.shape != expected:
            raise LogError(
                f"`{names[role]}` of shape {f'{expected}, one entry per completion' if once else '(B, T)'}"
                + (f", as `{names['logp']}` with {shape}" if len(shape) == 2 and not once else ""),
                f"shape {array.shape}",
                "pad the completions to one length and save a mask",
            )
        if role in KINDS and (array.dtype.kind not in KINDS[role] or array.dtype.itemsize > 8):
            wanted = "a number or boolean" if role == "mask" else "a floating-point"
            raise LogError(
                f"`{names[role]}` with {wanted} dtype of up to 64 bits",
                str(array.dtype),
                "save a mask as booleans" if role == "mask" else "save log-probs, not token ids, as float32",
            )


READERS = {".parquet": _open_parquet, ".jsonl": _open_jsonl, ".ndjson": _open_jsonl, ".npz": _open_npz}


# The files that a user names: single ones, folders and patterns.


def files_of(names: Sequence[Path]) -> list[Path]:
    """The log files, in the order in which they were named, those of a folder or a pattern by name; each once.

    Args:
        names: files, folders (all log files directly in them) and patterns with `*`, `?` or `[...]`.
    """
    return list(dict.fromkeys(path for name in names for path in _expand(name)))


def describe(names: Sequence[Path], files: Sequence[Path]) -> str:
    """What was read, for the head of a report."""
    count = f"{len(files)} file{'s' * (len(files) != 1)}"
    if len(names) == 1:
        return str(names[0]) + (f" ({count})" if list(files) != list(names) else "")
    return f"{names[0]} and {len(names) - 1} more ({count})"


def _expand(path: Path) -> list[Path]:
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
