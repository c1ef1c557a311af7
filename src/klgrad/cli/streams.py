"""Standard output and standard error that never fail for a character, and say it plainly when their reader has gone."""

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import OutputError

SPELLED = {
    "π": "pi", "‖": "||", "±": "+-", "β": "beta", "μ": "mu", "∇": "grad", "Σ": "sum", "δ": "delta", "λ": "lambda",
    "σ": "sigma", "θ": "theta", "χ": "chi", "φ": "phi", "Δ": "Delta", "ε": "epsilon", "α": "alpha", "γ": "gamma",
    "Π": "prod", "∂": "d", "√": "sqrt", "∝": "~", "≪": "<<", "≤": "<=", "≥": ">=", "·": "*", "×": "x", "½": "1/2",
    "−": "-", "–": "-", "—": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "→": "->", "•": "*",
    "⁻": "^-", "⁰": "^0", "¹": "^1", "²": "^2", "³": "^3", "⁴": "^4", "⁶": "^6", "⁸": "^8", "ν": "nu", "ᵀ": "^T",
}  # fmt: skip
"""What the reports and help texts hold beyond ASCII, for terminals that do not have it."""

ERRORS = "klgrad.spelled"


def _spell(error: UnicodeError) -> tuple[str, int]:
    """An error handler for encoding: our symbols in words, other characters and stray bytes of names by their code."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_spelled, error.object[error.start : error.end])), error.end


def _spelled(c: str) -> str:
    if "\udc80" <= c <= "\udcff":  # a byte of a file's name that is no text, as Python keeps it
        return f"\\x{ord(c) - 0xDC00:02x}"
    return SPELLED.get(c) or c.encode("ascii", "backslashreplace").decode()


codecs.register_error(ERRORS, _spell)


class PipeClosed(Exception):
    """The reader of our output has gone. Not an `OSError`, which typer and rich would end with exit status 1."""


class Stream(io.TextIOWrapper):
    """Writes into another stream's buffer, and leaves that open."""

    def write(self, text: str) -> int:
        """As every text stream."""
        with self._named_errors():
            return super().write(text)

    def flush(self) -> None:
        """As every text stream."""
        with self._named_errors():
            super().flush()

    def write_bytes(self, content: bytes) -> None:
        """Write bytes as they are, behind what was written as text."""
        with self._named_errors():
            super().flush()
            self.buffer.write(content)
            self.buffer.flush()

    def close(self) -> None:
        """The buffer is the other stream's."""
        self.flush()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._discard()
            raise PipeClosed from None
        except OSError as error:
            self._discard()
            name = "standard error" if self.fileno() == 2 else "standard output"
            remedy = "send it elsewhere, or make room"
            raise OutputError(f"{name} that can be written", str(error.strerror), remedy) from error

    def _discard(self) -> None:
        """Send what is left in the buffer nowhere: Python would fail on it once more when it ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


@contextmanager
def forgiving() -> Iterator[None]:
    """Let both streams be such while this holds."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = ours = tuple(map(_forgiving, before))
    try:
        yield
    finally:
        for stream in filter(None, ours):
            with suppress(PipeClosed, OutputError):  # what matters was flushed, where a failure has a status
                stream.flush()
        sys.stdout, sys.stderr = before


def _forgiving(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):  # none at all, or a notebook's, which takes any text
        return stream
    stream.flush()
    return Stream(
        stream.buffer, stream.encoding, ERRORS, line_buffering=stream.line_buffering, write_through=stream.write_through
    )
