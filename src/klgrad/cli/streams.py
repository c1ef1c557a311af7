"""Standard output and standard error that can print any character, and raise clear errors if they cannot be written."""

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
"""Replacements of the characters in reports and help texts that are not ASCII, for terminals without them."""

ERRORS = "klgrad.spelled"


def _spell(error: UnicodeError) -> tuple[str, int]:
    """An error handler for encoding: symbols in `SPELLED` become words, other characters and bytes their codes."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_spelled, error.object[error.start : error.end])), error.end


def _spelled(c: str) -> str:
    if "\udc80" <= c <= "\udcff":  # how Python represents an undecodable byte of a file name
        return f"\\x{ord(c) - 0xDC00:02x}"
    return SPELLED.get(c) or c.encode("ascii", "backslashreplace").decode()


codecs.register_error(ERRORS, _spell)


class PipeClosed(Exception):
    """The output pipe was closed. Not an `OSError`, for which typer and rich would exit with status 1."""


class Stream(io.TextIOWrapper):
    """Writes into the buffer of another stream, which stays open."""

    def write(self, text: str) -> int:
        """Write text."""
        with self._named_errors():
            return super().write(text)

    def flush(self) -> None:
        """Flush the buffer."""
        with self._named_errors():
            super().flush()

    def write_bytes(self, content: bytes) -> None:
        """Write bytes unchanged, after the text that was written before."""
        with self._named_errors():
            super().flush()
            self.buffer.write(content)
            self.buffer.flush()

    def close(self) -> None:
        """Flush only: the buffer belongs to the other stream."""
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
            remedy = "redirect it to another place, or free disk space"
            raise OutputError(f"{name} that can be written", str(error.strerror), remedy) from error

    def _discard(self) -> None:
        """Discard the rest of the buffer: otherwise Python would fail again when it writes it at exit."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` by a `Stream` each within the context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = ours = tuple(map(_wrapped, before))
    try:
        yield
    finally:
        for stream in filter(None, ours):
            with suppress(PipeClosed, OutputError):  # results were flushed before, where a failure sets the status
                stream.flush()
        sys.stdout, sys.stderr = before


def _wrapped(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):  # None, or the stream of a notebook, which accepts any text
        return stream
    stream.flush()
    return Stream(
        stream.buffer, stream.encoding, ERRORS, line_buffering=stream.line_buffering, write_through=stream.write_through
    )
