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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.rollout import ROUNDING_STEPS, is_invalid, what_is_wrong
from ..errors import KlgradError, LogError, MissingExtraError
from ..support import ROLES, Json, role_of

if TYPE_CHECKING:
    import pyarrow as pa

# Finds the column of each role by the names that frameworks use.

PER_TOKEN = ("logp", "ref_logp", "old_logp", "behavior_logp", "mask")
"""Roles with one number per token of a completion. The others, `group` and `by`, have one value per completion."""

EXAMPLES = {
    "logp": ("logp", "per_token_logps", "log_prob", "action_log_probs", "trainer_logprobs"),
    "ref_logp": ("ref_logp", "ref_per_token_logps", "ref_log_prob", "base_action_log_probs", "reference_logprobs"),
}
"""The required roles, with names that an error suggests."""


def assign(present: Sequence[str], chosen: dict[str, str]) -> dict[str, str]:
    """The column of each role: the chosen one (none if it is empty), else the recognised name of the best priority.

    Without a column for `logp`, it is that of `old_logp`: at the start of an update π is the old policy.
    """
    recognised = [(known, name) for name in present if name not in chosen.values() and (known := role_of(name))]
    names: dict[str, str] = {}
    for (role, _), name in sorted(recognised, key=lambda each: each[0][1]):
        if role not in chosen:
            names.setdefault(role, name)
    for role, name in chosen.items():
        if name and name not in present:
            option = "--by NAME" if role == "by" else f"--column {role}=NAME"
            raise _missing(f"a column {name!r} for `{role}`", present, _near(name, present), option)
    names |= {role: name for role, name in chosen.items() if name}
    plain = names.get("logp", "").lower() in ("logprobs", "logprob", "log_probs")
    proximal = plain and names.get("old_logp", "").lower().startswith("prox")
    if proximal and "behavior_logp" not in {**names, **chosen} and "logp" not in chosen:
        # AReaL names the trainer's recomputed log-probs `prox_logp`, and the sampler's just `logprobs`.
        names["behavior_logp"] = names.pop("logp")
    if "logp" not in names and "old_logp" in names:
        names["logp"] = names.pop("old_logp")
    for role, examples in EXAMPLES.items():
        if role not in names:
            near = _near(role, [name for name in present if role_of(name) is None])
            wanted = f"a column of per-token log-probs for `{role}`, such as {', '.join(examples)}"
            raise _missing(wanted, present, near, f"--column {role}=NAME")
    return {role: names[role] for role in (*ROLES, "by") if role in names}


def _near(name: str, present: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, present, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


def _missing(wanted: str, present: Sequence[str], near: str, option: str) -> LogError:
    return LogError(wanted, f"columns {', '.join(present) or '(none)'}", f"{near}name it with {option}")


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


# A log as a stream of chunks: rows by role, without the tokens that the mask leaves out.

ROWS = 2**10
"""Number of completions in memory."""

LONGEST_IDENTIFIER = 64
"""Largest number of characters of a prompt's identifier that is stored unchanged; a longer one, such as a whole prompt,
is stored as a digest."""

Known = dict[str, dict[object, int]]
"""The numbers of identifiers, by role; several files of one run share them, and their memory grows with the prompts."""


class Ragged(NamedTuple):
    """The concatenated values of all rows, and the number of values of each row."""

    values: Tensor
    lengths: Tensor


class Rows(NamedTuple):
    """Rows as the file has them: their numbers there; by role the numbers per token, and the values per completion.

    `share` is that of the file up to the last of them.
    """

    numbers: Sequence[int]
    tokens: dict[str, Ragged]
    values: dict[str, list[object]]
    share: float


@dataclass(frozen=True)
class Chunk:
    """Rows of a log without their dead tokens. No statistic depends on dead tokens.

    Attributes:
        lengths: (B,) numbers of live tokens.
        columns: role to flat log-probs of the live tokens.
        per_row: (B,) numbers of the completion's values by role: of its prompt (`group`), of its part (`by`).
        share: share of the file up to the end of the chunk.
    """

    lengths: Tensor
    columns: dict[str, Tensor]
    per_row: dict[str, Tensor]
    share: float


@dataclass(frozen=True)
class Log:
    """An open log: the columns by role, the name of a row in messages, and what reads the file once."""

    columns: dict[str, str]
    unit: str
    read: Callable[[], Iterator[Rows]]

    def chunks(self, known: Known) -> Iterator[Chunk]:
        """Read the file once; `known` has the numbers of prompts of earlier files, and gets those of this one."""
        for rows in self.read():
            per_row = {role: self._number(role, rows, known.setdefault(role, {})) for role in rows.values}
            self._check_lengths(rows)
            lengths = rows.tokens["logp"].lengths
            live = self._live(rows)
            columns = {role: _round(x.values) for role, x in rows.tokens.items() if role != "mask"}
            self._check_values(rows, columns, live)
            if live is not None:
                columns = {role: x[live] for role, x in columns.items()}
                counted = torch.cat([torch.zeros(1, dtype=torch.int64), live.cumsum(0)])
                ends = lengths.cumsum(0)
                lengths = counted[ends] - counted[ends - lengths]
            yield Chunk(lengths, columns, per_row, rows.share)

    def _number(self, role: str, rows: Rows, known: dict[object, int]) -> Tensor:
        """(B,) numbers from 0; equal identifiers have equal numbers, and new ones are added to `known`."""
        numbers: list[int] = []
        for row, x in zip(rows.numbers, rows.values[role], strict=True):
            if x is None or x != x:
                raise LogError(
                    f"the completion's {'value' if role == 'by' else 'prompt'} in `{self.columns[role]}` in every row",
                    f"{'null' if x is None else 'NaN'} in {self.unit} {row}",
                    "log it for every completion, or leave the column out",
                )
            numbers.append(known.setdefault(_key(x, whole=role == "by"), len(known)))
        return torch.tensor(numbers, dtype=torch.int64)

    def _check_lengths(self, rows: Rows) -> None:
        lengths = rows.tokens["logp"].lengths
        for role, column in rows.tokens.items():
            if not torch.equal(column.lengths, lengths):
                i = int(torch.nonzero(column.lengths != lengths)[0])
                raise LogError(
                    f"the same number of entries in `{self.columns[role]}` and `{self.columns['logp']}` in every row",
                    f"{int(column.lengths[i])} and {int(lengths[i])} in {self.unit} {rows.numbers[i]}",
                    f"align `{self.columns[role]}` with the sampled tokens: one entry per token, no prompt, no shift",
                )

    def _live(self, rows: Rows) -> Tensor | None:
        """Whether each token is live; None without a mask."""
        if "mask" not in rows.tokens:
            return None
        mask = rows.tokens["mask"].values
        strays = torch.nonzero((mask != 0) & (mask != 1))
        if len(strays):
            at = int(strays[0])
            raise LogError(
                f"a mask of 0 and 1 in `{self.columns['mask']}`",
                f"{mask[at].item():g} at {self._place(rows, at)}",
                "log the completion mask; weights belong to the loss, not to the mask",
            )
        return mask == 1

    def _check_values(self, rows: Rows, columns: dict[str, Tensor], live: Tensor | None) -> None:
        """The first invalid value in the order of the file is the error."""
        places: list[tuple[int, str]] = []
        for role, x in columns.items():
            invalid = torch.nonzero(is_invalid(x) if live is None else is_invalid(x) & live)
            places += [(int(invalid[0]), role)] if len(invalid) else []
        if places:
            at, role = min(places)
            raise LogError(*what_is_wrong(float(columns[role][at]), self.columns[role], self._place(rows, at)))

    def _place(self, rows: Rows, at: int) -> str:
        ends = rows.tokens["logp"].lengths.cumsum(0)
        row = int(torch.searchsorted(ends, at, right=True))
        return f"{self.unit} {rows.numbers[row]}, token {at - int(ends[row] - rows.tokens['logp'].lengths[row])}"


def _key(x: object, *, whole: bool) -> object:
    """A hashable key, small unless it has to be `whole`. Messages and dictionaries are compared as JSON."""
    if not isinstance(x, str | int | float):
        x = json.dumps(x, sort_keys=True, default=str)
    if isinstance(x, str) and len(x) > LONGEST_IDENTIFIER and not whole:
        return hashlib.blake2b(x.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return x


def _round(x: Tensor) -> Tensor:
    """In a wide column, 0 for what the rounding of a trainer's float32 has put above it."""
    if x.dtype != torch.float64:
        return x
    return torch.where((x > 0) & (x <= ROUNDING_STEPS * torch.finfo(torch.float32).eps), 0.0, x)


# The formats. A reader finds the columns of a file, and returns what reads its rows by their roles.

Read = Callable[[dict[str, str]], Iterator[Rows]]


def open_log(path: Path, chosen: dict[str, str]) -> Log:
    """The log of a file, from which nothing but names has been read; `chosen` overrides the recognised names."""
    if not path.exists():
        raise LogError("an existing file or folder", str(path), "check the path")
    if (suffix := path.suffix.lower()) not in READERS:
        remedy = "save it as Parquet (`pyarrow.parquet.write_table`), JSONL or NPZ (`numpy.savez`); no pickle is read"
        raise LogError(f"a file that ends in {', '.join(READERS)}", str(path), remedy)
    present, read = READERS[suffix](path)
    names = assign(present, chosen)
    return Log(names, "line" if READERS[suffix] is _open_jsonl else "row", lambda: read(names))


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """What pyarrow and NumPy say of a file; NumPy raises errors of many kinds for a damaged one."""
    try:
        yield
    except KlgradError:
        raise
    except ImportError as error:
        remedy = "pip install 'klgrad[logs]'"
        raise MissingExtraError("pyarrow for Parquet, NumPy for NPZ", "no such package", remedy) from error
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
        remedy = "write it again: it was cut off, is of another format, or has Python objects, which are pickles"
        raise LogError("a complete Parquet or NPZ file of numbers", f"{path}: {reason}", remedy) from error


def _no_numbers(role: str, name: str, received: str) -> LogError:
    numbers = "0 and 1" if role == "mask" else "floats"
    return LogError(
        f"`{name}` with {numbers} per token: a list for each completion, or an array of shape (B, T)",
        received,
        f"log per-token values, or name another column with --column {role}=NAME",
    )


def _open_parquet(path: Path) -> tuple[list[str], Read]:
    with _whole(path):
        import pyarrow.parquet as pq

        # A small buffer: otherwise a whole row group would be read at once.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
        schema = file.schema_arrow

    def read(names: dict[str, str]) -> Iterator[Rows]:
        done = 0
        with _whole(path):
            for batch in file.iter_batches(ROWS, columns=list(dict.fromkeys(names.values()))):
                numbers = range(done, done := done + batch.num_rows)
                tokens = {
                    role: _lists(batch.column(name), role, name, numbers)
                    for role, name in names.items()
                    if role in PER_TOKEN
                }
                values = {role: batch.column(names[role]).to_pylist() for role in names if role not in PER_TOKEN}
                yield Rows(numbers, tokens, values, done / file.metadata.num_rows)

    return schema.names, read


def _lists(column: pa.Array, role: str, name: str, rows: Sequence[int]) -> Ragged:
    from pyarrow import types

    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    of = [types.is_floating] + [types.is_integer, types.is_boolean] * (role == "mask")
    if not is_list or not any(test(kind.value_type) for test in of):
        raise _no_numbers(role, name, f"a column of {kind}")
    if column.null_count:
        raise _no_numbers(role, name, f"null in row {rows[column.is_null().to_pylist().index(True)]}")
    flat = column.flatten()
    # A null inside a list becomes NaN, and later gives the same error; booleans have no NaN.
    values = (flat.cast("float32") if role == "mask" else flat).to_numpy(zero_copy_only=False)
    lengths = torch.from_numpy(column.value_lengths().to_numpy(zero_copy_only=False).astype("int64"))
    return Ragged(torch.from_numpy(values if values.flags.writeable else values.copy()), lengths)


def _open_jsonl(path: Path) -> tuple[list[str], Read]:
    first = next(_records(path), (0, {}, 0))[1]

    def read(names: dict[str, str]) -> Iterator[Rows]:
        lines = (
            (number, {role: _value(row.get(name), role, name, number) for role, name in names.items()}, done)
            for number, row, done in _records(path)
        )
        while part := list(islice(lines, ROWS)):
            columns = {role: [row[role] for _, row, _ in part] for role in names}
            lists = {role: columns.pop(role) for role in PER_TOKEN if role in names}
            tokens = {role: Ragged(torch.cat(x), torch.tensor([len(row) for row in x])) for role, x in lists.items()}
            yield Rows([number for number, *_ in part], tokens, columns, part[-1][2] / path.stat().st_size)

    return list(first), read


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
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise LogError(
                    "one JSON object per line",
                    f"line {number} of {path}, which is cut off or something else",
                    'write the file again, with {"logp": [...], "ref_logp": [...]} per completion',
                )
            yield number, record, done


def _value(value: Any, role: str, name: str, number: int) -> Any:
    """Of numbers per token a tensor in float32, in which trainers compute: a log-prob of 1e-7 is rounding there."""
    if role not in PER_TOKEN:
        return value
    try:
        numbers = torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        numbers = torch.empty(0, 0)
    if numbers.ndim == 1:
        return numbers
    place = f"line {number}"
    if isinstance(value, list):
        token = next((i for i, x in enumerate(value) if not isinstance(x, int | float)), 0)
        place, value = f"{place}, token {token}", value[token]
    raise _no_numbers(role, name, f"{json.dumps(value)[:40]} at {place}")


def _open_npz(path: Path) -> tuple[list[str], Read]:
    with _whole(path):
        import numpy

        with path.open("rb") as file, numpy.load(file, allow_pickle=False) as archive:
            present = archive.files

    def read(names: dict[str, str]) -> Iterator[Rows]:
        with _whole(path), path.open("rb") as file, numpy.load(file, allow_pickle=False) as archive:
            arrays = {role: archive[name] for role, name in names.items()}
        shape = arrays["logp"].shape
        for role, x in arrays.items():
            kinds = "f" if role != "mask" else "biuf"
            if role in PER_TOKEN and (x.ndim != 2 or x.shape != shape or x.dtype.kind not in kinds):
                raise _no_numbers(role, names[role], f"shape {x.shape} of {x.dtype}")
            if role not in PER_TOKEN and x.shape != shape[:1]:
                received = f"shape {x.shape} for {shape[0]} completions"
                raise LogError(
                    f"`{names[role]}` with one entry per completion", received, "save an array of shape (B,)"
                )
        for start in range(0, shape[0], ROWS):
            part = {role: x[start : start + ROWS] for role, x in arrays.items()}
            numbers = range(start, start + len(part["logp"]))
            lengths = torch.full((len(numbers),), shape[1])
            tokens = {
                role: Ragged(torch.from_numpy(x.astype("float32" if role == "mask" else x.dtype).reshape(-1)), lengths)
                for role, x in part.items()
                if role in PER_TOKEN
            }
            values = {role: x.tolist() for role, x in part.items() if role not in PER_TOKEN}
            yield Rows(numbers, tokens, values, numbers.stop / shape[0])

    return present, read


READERS = {".parquet": _open_parquet, ".jsonl": _open_jsonl, ".ndjson": _open_jsonl, ".npz": _open_npz}


# The files that a user names: single ones, folders and patterns.


def files_of(names: Sequence[Path]) -> list[Path]:
    """The log files, in the order in which they were named, those of a folder or a pattern by name; each once."""
    return list(dict.fromkeys(path for name in names for path in _expand(name)))


def describe(names: Sequence[Path], files: Sequence[Path]) -> str:
    """What was read, for the head of a report."""
    if list(files) == list(names) and len(names) == 1:
        return str(names[0])
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} ({len(files)} file{'s' * (len(files) != 1)})"


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        # A file whose name begins with a dot is still being written.
        inside = [x for x in path.iterdir() if x.suffix.lower() in READERS and not x.name.startswith(".")]
    elif not path.exists() and glob.has_magic(str(path)):
        inside = [x for x in map(Path, glob.glob(str(path), recursive=True)) if x.is_file()]
    else:
        return [path]
    if not inside:
        raise LogError(f"files that end in {', '.join(READERS)}", f"{path} without any", "check the path")
    return sorted(inside)
