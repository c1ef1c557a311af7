"""The advice of an audit, as data."""

from dataclasses import dataclass

from ..remedies import Piece, Remedy, capitalised, joined


@dataclass(frozen=True)
class Advice:
    """What a loss does, what to beware of, and what to do about it.

    Attributes:
        finding: what the loss does, as the predicate of a sentence: "descends the token-level forward KL".
        warnings: further findings, in the same form.
        remedies: what to do, most important first; empty for a sound loss.
    """

    finding: str = ""
    warnings: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def pieces(self) -> list[Piece]:
        """The advice in sentences, with code marked as such."""
        findings = capitalised("; ".join([self.finding, *self.warnings]))
        found = [Piece(f"{findings}.")] if findings else []
        for remedy in self.remedies:
            found += [Piece(" "), *remedy.pieces]
        return found

    def __str__(self) -> str:
        return joined(self.pieces)
