"""Finds the longest list of a Parquet column from its repetition levels, without decoding values.

A few bytes of run-length encoding can represent a list of any length, so the memory for a batch of rows cannot be
computed from the file's size or its metadata. It can be computed from the repetition levels: a level of 0 begins a row.
"""

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from .footer import CODECS, Column
from .thrift import UnreadableError, number, read_struct, read_varint, struct

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
