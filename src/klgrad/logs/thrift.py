"""Reads Thrift's compact protocol, which Parquet uses for its footer and the headers of its pages."""

from typing import Any

DEEPEST = 8
"""Largest depth of nested structs; Parquet uses five."""


class UnreadableError(ValueError):
    """The bytes do not follow the format."""


def read_struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The fields of a struct by their numbers, and the position of its end."""
    found: dict[int, Any] = {}
    field = 0
    while True:
        kind, at = _byte(data, at)
        if not kind:
            return found, at
        if kind >> 4:
            field += kind >> 4
        else:
            field, at = _integer(data, at)
        found[field], at = _value(data, at, kind & 15, depth)


def number(found: dict[int, Any], field: int, missing: int | None = None) -> int:
    """A field that must be a size, a count or a position in a file."""
    value = found.get(field, missing)
    if not isinstance(value, int) or not 0 <= value < 2**62:
        raise UnreadableError(f"{value!r} instead of a size or a count")
    return value


def struct(found: dict[int, Any], field: int) -> dict[int, Any] | None:
    """A field that must be a struct; None if it is missing."""
    value = found.get(field)
    if value is not None and not isinstance(value, dict):
        raise UnreadableError("a number instead of a struct")
    return value


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
        size, at = read_varint(data, at)
        return data[at : at + size], at + size
    if kind == 9 and depth < DEEPEST:
        return _list(data, at, depth + 1)
    if kind == 12 and depth < DEEPEST:
        return read_struct(data, at, depth + 1)
    raise UnreadableError(f"a field of type {kind}")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    head, at = _byte(data, at)
    size, kind = head >> 4, head & 15
    if size == 15:
        size, at = read_varint(data, at)
    found: list[Any] = []
    for _ in range(size):
        # In a list a boolean has a byte of its own.
        value, at = _byte(data, at) if kind in (1, 2) else _value(data, at, kind, depth)
        found.append(value)
    return found, at


def _byte(data: bytes, at: int) -> tuple[int, int]:
    if at >= len(data):
        raise UnreadableError("bytes that end too soon")
    return data[at], at + 1


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned integer, and the position of its end."""
    found = shift = 0
    while True:
        byte, at = _byte(data, at)
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
        if shift > 63:
            raise UnreadableError("a number of more than 64 bits")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    found, at = read_varint(data, at)
    return (found >> 1) ^ -(found & 1), at
