"""Logs in Parquet, JSON lines and NumPy archives: their columns by role, and their rows in chunks.

Reading these formats cannot run code.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..core.rollout import ROUNDING_STEPS
from ..errors import KlgradError, LogError, MissingExtraError
from ..support import ROLES, Json, role_of

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.lib.npyio import NpzFile
    from pyarrow.parquet import ParquetFile

# Finds the column of each role by the names that frameworks use.

PER_TOKEN = ("logp", "ref_logp", "old_logp", "behavior_logp")
"""Roles of log-probs: one number per token. `mask` also has one per token."""

PER_ROW = ("group", "by")
"""Roles with one value per completion: its prompt, and what a report is split by (`--by`)."""

EXAMPLES = {
    "logp": ("logp", "per_token_logps", "log_prob", "action_log_probs", "trainer_logprobs"),
    "ref_logp": ("ref_logp", "ref_per_token_logps", "ref_log_prob", "base_action_log_probs", "reference_logprobs"),
}
"""Names that an error suggests for the two required roles."""


def assign(present: Sequence[str], chosen: dict[str, str]) -> dict[str, str]:
    """The column of each role: the chosen one (none if it is empty), else the recognised name of the best priority.

    Without a column for `logp`, it is that of `old_logp`: at the start of an update π is the old policy.
    """
    best: dict[str, tuple[int, str]] = {}
    for name in present:
        if name not in chosen.values() and (recognised := role_of(name)) is not None:
            role, priority = recognised
            if role not in best or priority < best[role][0]:
                best[role] = priority, name
    names = {role: name for role, (_, name) in best.items() if role not in chosen}
    names |= {role: _check_choice(role, name, present) for role, name in chosen.items() if name}
    plain = names.get("logp", "").lower() in ("logprobs", "logprob", "log_probs")
    proximal = plain and names.get("old_logp", "").lower().startswith("prox")
    if proximal and "behavior_logp" not in {**names, **chosen} and "logp" not in chosen:
        # AReaL names the trainer's recomputed log-probs `prox_logp`, and the sampler's just `logprobs`.
        names["behavior_logp"] = names.pop("logp")
    if "logp" not in names and "old_logp" in names:
        names["logp"] = names.pop("old_logp")
    for role in ("logp", "ref_logp"):
        if role not in names:
            near = _did_you_mean(role, [name for name in present if role_of(name) is None])
            raise LogError(
                f"a column of per-token log-probs for `{role}`, such as {', '.join(EXAMPLES[role])}",
                f"columns {', '.join(present) or '(none)'}",
                f"{near}name it with --column {role}=NAME",
            )
    return {role: names[role] for role in (*ROLES, "by") if role in names}


def parse_choices(choices: Iterable[str]) -> dict[str, str]:
    """Parse `role=NAME`, as given to the command; `role=` leaves an optional role out."""
    names = {}
    for choice in choices:
        role, equals, name = choice.partition("=")
        role = role.strip().replace("-", "_")
        if not equals or role not in ROLES or (role in EXAMPLES and not name.strip()):
            raise LogError(
                f"ROLE=NAME with a role of: {', '.join(ROLES)}",
                repr(choice),
                "write for example --column ref_logp=my_reference; --column mask= leaves an optional column out",
            )
        names[role] = name.strip()
    return names


def _did_you_mean(name: str, present: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, present, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


def _other_column(role: str) -> str:
    """The remedy that names another column for a role, or none."""
    return f"name another column with --column {role}=NAME" + (f", or none with {role}=" * (role not in EXAMPLES))


def _check_choice(role: str, name: str, present: Sequence[str]) -> str:
    if name not in present:
        option = "--by NAME" if role == "by" else f"--column {role}=NAME"
        raise LogError(
            f"a column {name!r} for `{role}`",
            f"columns {', '.join(present) or '(none)'}",
            f"{_did_you_mean(name, present)}name one that there is with {option}",
        )
    return name


# Numbers prompt identifiers, and other values of rows, in the order of their first occurrence.

LONGEST_IDENTIFIER = 64
"""Largest number of characters of a prompt's identifier that is stored unchanged; a longer one, such as a whole prompt,
is stored as a digest."""

Known = dict[str, dict[object, int]]
"""The numbers of identifiers, by role; several files of one run share them, and their memory grows with the prompts."""


def _key(x: object, *, whole: bool) -> object:
    """A hashable key, small unless it has to be `whole`. Messages and dictionaries are compared as JSON."""
    if not isinstance(x, str | int | float):
        x = json.dumps(x, sort_keys=True, default=str)
    if isinstance(x, str) and len(x) > LONGEST_IDENTIFIER and not whole:
        return hashlib.blake2b(x.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return x


# A bounded number of rows of a log.


@dataclass(frozen=True)
class Ragged:
    """The concatenated values of all rows, and the number of values of each row."""

    values: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows of a log without their dead tokens. No statistic depends on dead tokens.

    Attributes:
        rows: (B,) numbers of the rows in the file.
        unit: the name of a row in messages: `row` (counted from 0) or `line` (from 1).
        lengths: (B,) numbers of live tokens.
        columns: role to flat log-probs of the live tokens.
        per_row: (B,) numbers of the completion's values by role: of its prompt (`group`), of its part (`by`).
        mask: whether each token is live, before dead tokens were removed, or None.
        names: role to the column's name in the file.
        share: share of the file up to the end of the chunk.
    """

    rows: Tensor
    unit: str
    lengths: Tensor
    columns: dict[str, Tensor]
    per_row: dict[str, Tensor]
    mask: Ragged | None
    names: dict[str, str]
    share: float

    @property
    def starts(self) -> Tensor:
        """(B,) index of the first value of each row."""
        return self.lengths.cumsum(0) - self.lengths

    def place(self, row: int, token: int) -> str:
        """The place of a live token in the file, for messages."""
        if self.mask is not None:
            start = int(self.mask.lengths[:row].sum())
            live = self.mask.values[start : start + int(self.mask.lengths[row])]
            token = int(torch.nonzero(live)[token])
        return f"{self.unit} {int(self.rows[row])}, token {token}"


def build(
    rows: Tensor, unit: str, tokens: dict[str, Ragged], per_row: dict[str, Tensor], share: float, names: dict[str, str]
) -> Chunk:
    """A `Chunk`, after a check that all columns of a row have the same length, without the dead tokens."""
    lengths = tokens["logp"].lengths
    for role, column in tokens.items():
        if not torch.equal(column.lengths, lengths):
            i = int(torch.nonzero(column.lengths != lengths)[0])
            raise LogError(
                f"the same number of entries in `{names[role]}` and `{names['logp']}` in every row",
                f"{int(column.lengths[i])} and {int(lengths[i])} in {unit} {int(rows[i])}",
                f"align `{names[role]}` with the sampled tokens: one entry per token, no prompt, no shift",
            )
    columns = {role: column.values for role, column in tokens.items() if role in PER_TOKEN}
    for role, x in columns.items():
        if x.dtype == torch.float64:  # above 0 by what the rounding of a trainer's float32 can explain
            columns[role] = torch.where((x > 0) & (x <= ROUNDING_STEPS * torch.finfo(torch.float32).eps), 0.0, x)
    mask = tokens.get("mask")
    if mask is not None:
        live = _to_bool(mask, rows, unit, names["mask"])
        mask = Ragged(live, lengths)
        columns = {role: x[live] for role, x in columns.items()}
        counted = torch.cat([torch.zeros(1, dtype=torch.int64), live.cumsum(0)])
        ends = lengths.cumsum(0)
        lengths = counted[ends] - counted[ends - lengths]
    return Chunk(rows, unit, lengths, columns, per_row, mask, names, share)


def _to_bool(mask: Ragged, rows: Tensor, unit: str, name: str) -> Tensor:
    if mask.values.dtype == torch.bool:
        return mask.values
    live = mask.values != 0
    stray = live & (mask.values != 1)
    if bool(stray.any()):
        at = int(torch.nonzero(stray)[0])
        row = int(torch.searchsorted(mask.lengths.cumsum(0), at, right=True))
        raise LogError(
            f"a mask of 0 and 1 in `{name}`",
            f"{mask.values[at].item():g} in {unit} {int(rows[row])}",
            "log the completion mask; weights belong to the loss, not to the mask",
        )
    return live


# A log as a stream of chunks.

CHUNK_TOKENS = 2**20
"""The approximate number of tokens in memory, for each column."""

DECODED_ROWS = 2**8
"""Number of completions that are decoded at once; a chunk consists of several such parts."""

CODE = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib")
"""Suffixes of files that can run code when they are read."""


class DecodedRows(NamedTuple):
    """Completions as the file has them: numbers per token and values per completion by role.

    `rows` are the numbers of the rows in the file, `share` is the share of the file up to the last of them.
    """

    rows: Tensor
    tokens: dict[str, Ragged]
    values: dict[str, list[object]]
    share: float


@dataclass(frozen=True)
class Log:
    """An open log: the columns by role, the name of a row in messages, and what reads the file once."""

    columns: dict[str, str]
    unit: str
    decode: Callable[[], Iterator[DecodedRows]]

    def chunks(self, chunk_tokens: int, known: Known) -> Iterator[Chunk]:
        """Read the file once; `known` has the numbers of prompts of earlier files, and gets those of this one."""
        held: list[tuple[DecodedRows, dict[str, Tensor]]] = []
        tokens = 0
        for part in self.decode():
            # Numbered here, so that the texts of long prompts are not held.
            per_row = {role: self._number(role, part, known.setdefault(role, {})) for role in part.values}
            held.append((part._replace(values={}), per_row))
            tokens += len(part.tokens["logp"].values)
            if tokens >= chunk_tokens:
                yield self._join(held)
                held, tokens = [], 0
        if held:
            yield self._join(held)

    def _number(self, role: str, part: DecodedRows, known: dict[object, int]) -> Tensor:
        """(B,) numbers from 0; equal identifiers have equal numbers, and new ones are added to `known`."""
        numbers: list[int] = []
        for row, x in zip(part.rows.tolist(), part.values[role], strict=True):
            if x is None or x != x:
                raise LogError(
                    f"the completion's {'value' if role == 'by' else 'prompt'} in `{self.columns[role]}` in every row",
                    f"{'null' if x is None else 'NaN'} in {self.unit} {row}",
                    "log it for every completion, or leave the column out",
                )
            numbers.append(known.setdefault(_key(x, whole=role == "by"), len(known)))
        return torch.tensor(numbers, dtype=torch.int64)

    def _join(self, held: list[tuple[DecodedRows, dict[str, Tensor]]]) -> Chunk:
        parts, tokens = [part for part, _ in held], {}
        for role in parts[0].tokens:
            columns = [part.tokens[role] for part in parts]
            tokens[role] = Ragged(torch.cat([x.values for x in columns]), torch.cat([x.lengths for x in columns]))
        per_row = {role: torch.cat([numbers[role] for _, numbers in held]) for role in held[0][1]}
        rows = torch.cat([part.rows for part in parts])
        return build(rows, self.unit, tokens, per_row, parts[-1].share, self.columns)


def open_log(path: Path, chosen: dict[str, str]) -> Log:
    """The log of a file, from which nothing but names has been read; `chosen` overrides the recognised names."""
    if not path.exists():
        raise LogError("an existing file or folder", str(path), "check the path")
    suffix = path.suffix.lower()
    if suffix not in READERS:
        remedy = "save it as Parquet (`pyarrow.parquet.write_table`), JSONL or NPZ (`numpy.savez`)"
        if suffix in CODE:
            remedy = f"a pickle can run code, so it is not read: {remedy}"
        raise LogError(f"a file that ends in {', '.join(READERS)}", str(path), remedy)
    if path.stat().st_size == 0:
        raise LogError("a log with rows in it", f"{path}, which is empty (0 bytes)", "write the log again")
    return READERS[suffix](path, chosen)


# Parquet: list columns, read in batches of rows.

READ_BUFFER = 2**20
"""Size in bytes of the buffer for reading a column; otherwise a whole row group would be read at once."""


def _open_parquet(path: Path, chosen: dict[str, str]) -> Log:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow, to read Parquet", "no such package", "pip install 'klgrad[logs]'") from error
    with _complete(path):
        # It need not be closed: nothing is written, and the object is freed together with the reader.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER)
        schema = file.schema_arrow
        names = assign(schema.names, chosen)
    for role, name in names.items():
        if schema.names.count(name) > 1:
            raise LogError(f"one column `{name}`", f"{schema.names.count(name)} columns of that name", "write it once")
        if role not in PER_ROW:
            _check_type(role, name, schema.field(name).type)
    return Log(names, "row", lambda: _decode_parquet(path, file, names))


@contextmanager
def _complete(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except KlgradError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # a ValueError if a name is not UTF-8
        remedy = "write the file again: it was cut off, or is not Parquet"
        raise LogError("a complete Parquet file", f"{path}: {_first_line(error)}", remedy) from error


def _check_type(role: str, name: str, kind: pa.DataType) -> None:
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    tests = [types.is_floating] + ([types.is_integer, types.is_boolean] if role == "mask" else [])
    if not is_list or not any(test(kind.value_type) for test in tests):
        wanted = "numbers or booleans" if role == "mask" else "floats"
        raise LogError(
            f"`{name}` as lists of {wanted}, one list per completion",
            f"a column of {kind}",
            f"log per-token values, or {_other_column(role)}",
        )


def _decode_parquet(path: Path, file: ParquetFile, names: dict[str, str]) -> Iterator[DecodedRows]:
    rows, done = file.metadata.num_rows, 0
    with _complete(path):
        for batch in file.iter_batches(DECODED_ROWS, columns=list(dict.fromkeys(names.values()))):
            numbers = torch.arange(done, done + batch.num_rows)
            tokens = {
                role: _lists(batch.column(name), name, numbers) for role, name in names.items() if role not in PER_ROW
            }
            values = {role: batch.column(names[role]).to_pylist() for role in PER_ROW if role in names}
            done += batch.num_rows
            yield DecodedRows(numbers, tokens, values, done / rows)


def _lists(column: pa.Array, name: str, rows: Tensor) -> Ragged:
    if column.null_count:
        at = column.is_null().to_pylist().index(True)
        raise LogError(
            f"a list in `{name}` in every row", f"null in row {int(rows[at])}", "remove the row, or log an empty list"
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
    size, records = path.stat().st_size, _records(path)
    while part := list(islice(records, DECODED_ROWS)):
        tokens, values = {}, {}
        for role, name in names.items():
            column = [_value(record, name, number) for number, record, _ in part]
            if role in PER_ROW:
                values[role] = column
            else:
                lists = [_tensor(x, role, name, number) for x, (number, *_) in zip(column, part, strict=True)]
                tokens[role] = Ragged(torch.cat(lists), torch.tensor([len(x) for x in lists]))
        yield DecodedRows(torch.tensor([number for number, *_ in part]), tokens, values, part[-1][2] / size)


def _value(record: Json, name: str, number: int) -> object:
    if name not in record:
        raise LogError(
            f"`{name}` in every line, as in the first", f"line {number} without it", "remove the line, or log the value"
        )
    return record[name]


def _tensor(value: object, role: str, name: str, number: int) -> Tensor:
    """The numbers of a line in float32, in which trainers compute: a log-prob of 1e-7 is rounding there."""
    if not isinstance(value, list):
        raise LogError(
            f"`{name}` as a list, one number per token",
            f"{type(value).__name__} in line {number}",
            f"log per-token values, or {_other_column(role)}",
        )
    try:
        numbers = torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        numbers = torch.empty(0, 0)
    if numbers.ndim != 1:
        is_number = lambda x: isinstance(x, float) or (isinstance(x, int) and abs(x) < 2**63)
        token = next(i for i, x in enumerate(value) if not is_number(x))
        raise LogError(
            f"a number per token in `{name}`",
            f"{json.dumps(value[token])[:40]} at line {number}, token {token}",
            "log a number for every token, and mask the tokens to ignore",
        )
    return numbers


# NPZ: rectangular arrays.

KINDS = {"mask": "biuf", **dict.fromkeys(PER_TOKEN, "f")}
"""The `dtype.kind` letters that are valid for each role."""


def _open_npz(path: Path, chosen: dict[str, str]) -> Log:
    with _archive(path) as archive:
        names = assign(archive.files, chosen)
    return Log(names, "row", lambda: _decode_npz(path, names))


@contextmanager
def _archive(path: Path) -> Iterator[NpzFile]:
    try:
        import numpy
    except ImportError as error:
        raise MissingExtraError("numpy, to read NPZ", "no such package", "pip install 'klgrad[logs]'") from error
    try:
        with path.open("rb") as file, numpy.load(file, allow_pickle=False) as archive:
            yield archive
    except KlgradError:
        raise
    except Exception as error:  # NumPy raises errors of many kinds for a damaged file
        raise LogError(
            "a complete NPZ file with arrays of numbers",
            f"{path}: {_first_line(error)}",
            "write it again with numpy.savez: it was cut off, is not NPZ, or has Python objects, which are pickles and "
            "can run code; save rectangular arrays and a mask, or write ragged lists as Parquet or JSONL",
        ) from error


def _decode_npz(path: Path, names: dict[str, str]) -> Iterator[DecodedRows]:
    with _archive(path) as archive:
        arrays = {role: archive[name] for role, name in names.items()}
        _check_arrays(arrays, names)
    rows, width = arrays["logp"].shape
    for start in range(0, rows, DECODED_ROWS):
        part = {role: x[start : start + DECODED_ROWS] for role, x in arrays.items()}
        values = {role: part.pop(role).tolist() for role in PER_ROW if role in part}
        end = start + len(part["logp"])
        lengths = torch.full((end - start,), width)
        tokens = {role: Ragged(torch.from_numpy(x.reshape(-1)), lengths) for role, x in part.items()}
        yield DecodedRows(torch.arange(start, end), tokens, values, end / rows)


def _check_arrays(arrays: dict[str, np.ndarray], names: dict[str, str]) -> None:
    shape = arrays["logp"].shape
    if len(shape) != 2:
        raise LogError(f"`{names['logp']}` of shape (B, T)", f"shape {shape}", "pad the completions to one length")
    for role, array in arrays.items():
        expected, what = (shape[:1], "one entry per completion") if role in PER_ROW else (shape, "as the log-probs")
        if array.shape != expected:
            raise LogError(
                f"`{names[role]}` of shape {expected}, {what}",
                f"shape {array.shape}",
                "pad the completions to one length and save a mask",
            )
        if role in KINDS and array.dtype.kind not in KINDS[role]:
            wanted = "a number or boolean" if role == "mask" else "a floating-point"
            raise LogError(
                f"`{names[role]}` with {wanted} dtype",
                str(array.dtype),
                "save a mask as booleans" if role == "mask" else "save log-probs, not token ids, as float32",
            )


READERS = {".parquet": _open_parquet, ".jsonl": _open_jsonl, ".ndjson": _open_jsonl, ".npz": _open_npz}


# The files that a user names: single ones, folders and patterns.


def files_of(names: Sequence[Path]) -> list[Path]:
    """The log files, in the order in which they were named, those of a folder or a pattern by name; each once."""
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
