"""What to do about an unsound loss, as data. Reports render it last: as a sentence, as HTML, or as JSON."""

from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from .core.term import KLTerm
from .errors import MeaningError


class Piece(NamedTuple):
    """A part of a rendered text, and whether it is code."""

    text: str
    is_code: bool = False


@dataclass(frozen=True)
class Remedy:
    """One thing to do about a loss.

    Attributes:
        do: the step or the purpose, such as "detach the ratio"; empty for a plain replacement.
        use: the replacements to choose from: terms, or names of losses of `klgrad.zoo`.
        why: what the replacement is good for.

    Example:
        >>> from klgrad import KLTerm
        >>> from klgrad.remedies import Remedy
        >>> str(Remedy(use=("k2-loss", KLTerm(level="token"))))
        "Use k2-loss or KLTerm(level='token') instead."
    """

    do: str = ""
    use: tuple[KLTerm | str, ...] = ()
    why: str = ""

    def __post_init__(self) -> None:
        if not (self.do or self.use):
            raise MeaningError("a step or a replacement", "neither", "give `do` or `use`")

    @property
    def terms(self) -> tuple[KLTerm, ...]:
        """The terms among the replacements."""
        return tuple(x for x in self.use if isinstance(x, KLTerm))

    @property
    def pieces(self) -> list[Piece]:
        """One sentence, with the replacements marked as code."""
        joint = ", use " if self.do.startswith("for ") else ": use "
        before = capitalised(f"{self.do}{joint}" if self.do and self.use else self.do or "use ")
        after = " instead" if self.use else ""
        found = [Piece(before)]
        for i, replacement in enumerate(self.use):
            found += [Piece(" or ")] * (i > 0) + [Piece(as_code(replacement), is_code=True)]
        return [*found, Piece(f"{after}{f' ({self.why})' if self.why else ''}.")]

    def __str__(self) -> str:
        return joined(self.pieces)

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        return {"do": self.do, "use": [as_code(x) for x in self.use], "why": self.why}


def joined(pieces: Iterable[Piece]) -> str:
    """The pieces as plain text."""
    return "".join(piece.text for piece in pieces)


def capitalised(text: str) -> str:
    """The text with a capital first letter; other letters stay as they are, unlike with `str.capitalize`."""
    return text[:1].upper() + text[1:]


def as_code(value: object) -> str:
    """Python code for a replacement: a name as it is, a dataclass by the fields that it needs.

    Its first field is written without a name if it is required.

    Example:
        >>> from klgrad import ImportanceWeighting, KLTerm
        >>> as_code(KLTerm(weighting=ImportanceWeighting("prefix", bound=None)))
        "KLTerm(weighting=ImportanceWeighting('prefix', bound=None))"
    """
    return value if isinstance(value, str) else _literal(value)


def _literal(value: object) -> str:
    if not is_dataclass(value):
        return repr(value)
    shown = _needed(value)
    arguments = [f"{f.name}={_literal(getattr(value, f.name))}" for f in shown]
    if shown and shown[0].default is MISSING and not shown[0].kw_only:
        arguments[0] = _literal(getattr(value, shown[0].name))
    return f"{type(value).__name__}({', '.join(arguments)})"


def _needed(value: Any) -> list[Field[Any]]:
    """The fields without which an equal object cannot be built; `level="token"` implies `discount=0`, for example."""
    needed = {f.name: f for f in fields(value) if f.default is MISSING or getattr(value, f.name) != f.default}
    for name in [name for name, f in needed.items() if f.default is not MISSING][::-1]:
        without = {n: getattr(value, n) for n in needed if n != name}
        try:
            implied = type(value)(**without) == value
        except MeaningError:
            implied = False
        if implied:
            del needed[name]
    return list(needed.values())
