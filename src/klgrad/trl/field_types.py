"""Whether a value is of the type that a dataclass field declares, from the field's annotation and metadata alone."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MAY_BE_INFINITE = frozenset({"max_grad_norm"})
"""Settings that may be infinite: an infinite `max_grad_norm` clips nothing."""
NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a mapping"}

Complaint = tuple[str, str, str]
"""Expected, received, remedy."""


@dataclass(frozen=True)
class Setting:
    """One field of a configuration: its type, its choices and its default."""

    name: str
    kind: Any
    choices: tuple[Any, ...] | None
    const: Any
    default: Any

    def misfit(self, value: Any) -> Complaint | None:
        """Why a value is not of the declared type, or None if it is."""
        if fits(value, self.kind) or (self.const is not None and value == self.const):
            return self._not_finite(value) or self._not_chosen(value)
        expected = f"`{self.name}` as {described(self.kind)}"
        return expected, f"{value!r}, {_called(value)}", self._remedy(value)

    def _not_finite(self, value: Any) -> Complaint | None:
        if not isinstance(value, Real) or math.isfinite(value) or self.name in MAY_BE_INFINITE:
            return None
        return f"`{self.name}` as a finite number", str(value), "write a number"

    def _not_chosen(self, value: Any) -> Complaint | None:
        if self.choices is None or value is None or value in self.choices:
            return None
        return f"`{self.name}` {' or '.join(map(str, self.choices))}", repr(value), f"{self.default} is the default"

    def _remedy(self, value: Any) -> str:
        wants_text = fits("", self.kind)
        if wants_text and isinstance(value, list) and all(isinstance(x, str) for x in value):
            return f"write it as one text, with commas: {self.name}: {','.join(value)}"
        if wants_text and isinstance(value, Real):
            return f'write it in quotes: {self.name}: "{value}"'
        if value is None:
            return "leave the setting out for its default"
        return f"write {described(self.kind)}"


@cache
def settings_of_class(kind: type) -> dict[str, Setting]:
    """The fields of a dataclass that its constructor takes, by name."""
    hints = get_type_hints(kind)
    return {
        f.name: Setting(f.name, hints[f.name], _choices(f.metadata), f.metadata.get("const"), f.default)
        for f in fields(kind)
        if f.init
    }


def changed(config: Any) -> dict[str, Any]:
    """The fields of a dataclass instance that differ from their defaults."""
    given = {f.name: getattr(config, f.name) for f in fields(config) if f.init}
    defaults = {f.name: f.default_factory() if f.default is MISSING and f.default_factory is not MISSING else f.default
                for f in fields(config) if f.init}  # fmt: skip
    return {name: value for name, value in given.items() if value != defaults[name]}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type. A bool is not a number; an int fits a float."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in _alternatives(parts))
    if origin is Literal:
        return value in parts
    if origin is list:
        return isinstance(value, list) and all(fits(each, parts[0]) for each in value)
    kind = origin or kind
    if kind is Any:
        return True
    if kind in (int, float):
        return isinstance(value, Real if kind is float else Integral) and not isinstance(value, bool)
    if issubclass(kind, Enum):
        return isinstance(value, kind) or value in [member.value for member in kind]
    return isinstance(value, kind)


def described(kind: Any) -> str:
    """An annotated type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(described(part) for part in _alternatives(parts) if part is not NoneType)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is list:
        return f"a list of {described(parts[0]).removeprefix('a ')}s" if parts[0] is not str else "a list of texts"
    kind = origin or kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(str(member.value) for member in kind)
    return NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _alternatives(parts: tuple[Any, ...]) -> list[Any]:
    """The types of a union. Beside an enumeration, `str` stands only for its members as text."""
    named = any(isinstance(part, type) and issubclass(part, Enum) for part in parts)
    return [part for part in parts if not (named and part is str)]


def _choices(metadata: Mapping[str, Any]) -> tuple[Any, ...] | None:
    found = metadata.get("choices")
    return None if found is None else tuple(found)


def _called(value: Any) -> str:
    """The type of a value in words."""
    if value is None:
        return "no value"
    return NAMES.get(type(value), f"a {type(value).__name__}")
