"""The longest list of a Parquet column, from its repetition levels: no value is decoded.

A few bytes of run-length encoding can stand for a list of any length, so that neither a file's size nor its metadata
says what a batch of its rows takes. The levels say it: one that is 0 begins a row.
"""

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

LARGEST_PAGE = 2**28
"""Bytes of a page: writers make pages of about a MiB."""

HEADER = 2**20
"""Bytes in which a page's header must end."""


class Longest(NamedTuple):
    """Entries of the longest row, and which of the row group it is."""

    entries: int
    row: int


class UnreadablePageError(ValueError):
    """Levels that are not as the format has them."""


def longest_row(handle: IO[bytes], chunk: Any, max_level: int, pa: Any) -> Longest:
    """Of one column chunk; `max_level` is the column's greatest repetition level, above 0."""
    longest, current, row = Longest(0, 0), 0, -1
    for rows, entries in _runs(handle, chunk, max_level.bit_length(), pa):
        if not rows:
            current += entries
            continue
        if current > longest.entries:
            longest = Longest(current, row)
        row, current = row + rows, entries
    return Longest(current, row) if current > longest.entries else longest


def _runs(handle: IO[bytes], chunk: Any, width: int, pa: Any) -> Iterator[tuple[int, int]]:
    """Either (0, n): n entries of the row at hand; or (n, m): n rows begin, the last of which has m entries so far."""
    for levels, count in _pages(handle, chunk, pa):
        yield from _levels(levels, count, width)


def _levels(data: bytes, count: int, width: int) -> Iterator[tuple[int, int]]:
    """A page's levels, encoded as runs of one level and as bits, `width` for each."""
    import numpy

    at = 0
    while count > 0:
        header, at = _varint(data, at)
        if header & 1:
            size = (header >> 1) * width
            bits = numpy.unpackbits(numpy.frombuffer(data[at : at + size], "uint8"), bitorder="little")
            inside = bits[: len(bits) // width * width].reshape(-1, width).any(1)[:count]
            if not len(inside):
                raise UnreadablePageError("levels end before the page does")
            yield from _of_bits(numpy.flatnonzero(~inside).tolist(), len(inside))
            count, at = count - len(inside), at + size
        else:
            run, size = min(header >> 1, count), (width + 7) // 8
            level = int.from_bytes(data[at : at + size], "little")
            if not run:
                raise UnreadablePageError("a run of no level")
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


def _pages(handle: IO[bytes], chunk: Any, pa: Any) -> Iterator[tuple[bytes, int]]:
    """Encoded repetition levels of each data page, and how many there are."""
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        at = min(at, chunk.dictionary_page_offset)
    left = chunk.num_values
    while left > 0:
        handle.seek(at)
        page, size = _struct(handle.read(HEADER), 0)
        compressed, whole = page.get(3, 0), page.get(2, 0)
        if not 0 <= compressed <= LARGEST_PAGE or not 0 <= whole <= LARGEST_PAGE:
            raise UnreadablePageError(f"a page of {max(compressed, whole)} bytes")
        handle.seek(at + size)
        at += size + compressed
        first, second = page.get(5), page.get(8)
        if second is not None:
            count, levels = second.get(1, 0), handle.read(second.get(6, 0))
        elif first is not None:
            count, levels = first.get(1, 0), _of_first_version(handle.read(compressed), whole, chunk.compression, pa)
        else:
            continue  # a dictionary
        if count <= 0:
            raise UnreadablePageError(f"a page of {count} values")
        left -= count
        yield levels, count


def _of_first_version(data: bytes, whole: int, codec: str, pa: Any) -> bytes:
    """Levels come first in the page, after their size, and are compressed with it."""
    if codec != "UNCOMPRESSED":
        data = pa.Codec(codec.lower()).decompress(data, whole, asbytes=True)
    return data[4 : 4 + int.from_bytes(data[:4], "little")]


def _struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """A struct of Thrift's compact protocol by the numbers of its fields, and where it ends."""
    found, field = {}, 0
    while True:
        kind, at = _byte(data, at)
        if not kind:
            return found, at
        if kind >> 4:
            field += kind >> 4
        else:
            field, at = _integer(data, at)
        found[field], at = _value(data, at, kind & 15, depth)


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
        size, at = _varint(data, at)
        return None, at + size
    if kind == 12 and depth < 4:
        return _struct(data, at, depth + 1)
    raise UnreadablePageError(f"a page header with a field of type {kind}")


def _byte(data: bytes, at: int) -> tuple[int, int]:
    if at >= len(data):
        raise UnreadablePageError("the file ends in a page")
    return data[at], at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte, at = _byte(data, at)
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
        if shift > 63:
            raise UnreadablePageError("a number of more than 64 bits")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    found, at = _varint(data, at)
    return (found >> 1) ^ -(found & 1), at
