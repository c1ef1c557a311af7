"""NPZ: rectangular arrays, read from the archive row by row, so that a wrong size in a header allocates no memory."""

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import MissingExtraError
from . import columns
from .chunk import Chunk, Ragged, build
from .limits import LONGEST_PROMPT, LONGEST_ROW, MOST_BYTES, too_long_a_prompt, too_many_tokens
from .log_errors import LogError
from .prompt_groups import Known, per_row

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


def open_log(
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
