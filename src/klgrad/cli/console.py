"""Streams and consoles: what is printed, and where."""

import codecs
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Event, Thread
from typing import Protocol, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, track
from rich.segment import Segment

from ..errors import OutputError
from ..support import is_stdout, write_output

# Standard output and standard error that can print any character.

SPELLED = {
    "π": "pi", "‖": "||", "±": "+-", "β": "beta", "μ": "mu", "∇": "grad", "Σ": "sum", "δ": "delta", "λ": "lambda",
    "σ": "sigma", "θ": "theta", "χ": "chi", "φ": "phi", "Δ": "Delta", "ε": "epsilon", "α": "alpha", "γ": "gamma",
    "Π": "prod", "∂": "d", "√": "sqrt", "∝": "~", "≪": "<<", "≤": "<=", "≥": ">=", "·": "*", "×": "x", "½": "1/2",
    "≠": "!=", "−": "-", "–": "-", "—": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "→": "->", "•": "*",
    "⁻": "^-", "⁰": "^0", "¹": "^1", "²": "^2", "³": "^3", "⁴": "^4", "⁶": "^6", "⁸": "^8", "ν": "nu",
    "η": "eta", "ᵀ": "^T",
}  # fmt: skip
"""Replacements of the characters in reports and help texts that are not ASCII, for terminals without them."""

ERRORS = "klgrad.spelled"


def _spell(error: UnicodeError) -> tuple[str, int]:
    """An error handler for encoding: symbols in `SPELLED` become words, other characters and bytes their codes."""
    assert isinstance(error, UnicodeEncodeError)
    words = []
    for c in error.object[error.start : error.end]:
        is_byte = "\udc80" <= c <= "\udcff"  # how Python represents an undecodable byte of a file name
        code = f"\\x{ord(c) - 0xDC00:02x}" if is_byte else c.encode("ascii", "backslashreplace").decode()
        words.append(SPELLED.get(c) or code)
    return "".join(words), error.end


codecs.register_error(ERRORS, _spell)


def each_stream() -> list[io.TextIOWrapper]:
    """Standard output and standard error, except a closed one and that of a notebook, which accepts any text."""
    return [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]


def spell_symbols() -> None:
    """Let the streams spell out what their encoding does not have."""
    for stream in each_stream():
        stream.reconfigure(errors=ERRORS)


def discard_output() -> None:
    """Discard what the streams still hold: Python would fail again when it writes it at exit."""
    for stream in each_stream():
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), stream.fileno())


# The consoles of the commands, and how they write their files.


class HasName(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=HasName)

SILENCE = 10.0
"""Seconds after which a line tells the progress, where there is no bar."""

INTERRUPTED = 130
"""The exit status that shells give to Ctrl-C."""

PIPED_WIDTH = 160
"""Columns of the output where it does not go to a terminal."""


CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters with which a text could command the terminal or turn its direction, all but the end of a line."""


class _Literal(Console):
    """Shows control characters by their codes: names, labels and messages come from files that others wrote."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render a part of the output."""
        for segment in super().render(renderable, options):
            harmless = segment.control or not CONTROL.search(segment.text)
            code = lambda control: control[0].encode("unicode_escape").decode()
            yield segment if harmless else Segment(CONTROL.sub(code, segment.text), segment.style)


def stdout() -> Console:
    """The console for results."""
    return _literal(stderr=False)


def stderr() -> Console:
    """The console for progress and messages, which are not part of the results."""
    return _literal(stderr=True)


def _literal(*, stderr: bool) -> Console:
    """A console that prints strings as they are: `[a]` in a name is not markup, and `:x:` not an emoji.

    It keeps the stream of this moment, so that it still shows something while the output of a loss is captured.
    """
    file = sys.stderr if stderr else sys.stdout

    def console(width: int | None) -> Console:
        return _Literal(file=file, stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    terminal = console(None)
    return terminal if terminal.is_terminal else console(PIPED_WIDTH)


def bar(*columns: ProgressColumn, console: Console) -> Progress:
    """A progress bar that disappears when it is done, and is shown in a terminal only."""
    # rich before 14.3 prints an empty line at the end of a disabled bar, unless the console is quiet.
    shown = console if console.is_terminal else Console(quiet=True)
    return Progress(*columns, console=shown, transient=True, disable=not console.is_terminal)


def tracked(items: Sequence[T], title: str, console: Console) -> Iterable[T]:
    """The items, with a progress bar where the console is a terminal, and lines now and then where it is none."""
    if console.is_terminal:
        yield from track(items, title, console=console, transient=True)
        return
    current = ""
    with lines(console, lambda: f"{title} {current}"):
        for i, item in enumerate(items, 1):
            current = f"{item.name} ({i} of {len(items)})"
            yield item


@contextmanager
def lines(console: Console, progress: Callable[[], str]) -> Iterator[None]:
    """Within the context, print the progress now and then, unless the console is a terminal, which has a bar."""
    if console.is_terminal:
        yield
        return
    done = Event()

    def print_lines() -> None:
        while not done.wait(SILENCE):
            console.print(progress(), style="dim", soft_wrap=True)

    thread = Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def beside(*paths: Path | None) -> Console:
    """The console for a report written with these files: standard output, unless one of them goes there."""
    taken = sum(map(is_stdout, paths))
    if taken > 1:
        raise OutputError("standard output for one file", f"for {taken}", "name files for the others")
    return stderr() if taken else stdout()


def deliver(console: Console, report: RenderableType, *files: tuple[Path | None, Callable[[], str | bytes]]) -> None:
    """Write the files, show the report, and print the paths of the files.

    In this order, the files are written even if the report goes to a closed pipe; and the report is shown even if a
    file cannot be written.
    """
    written = []
    try:
        for path, content in files:
            if path is not None:
                write_output(path, content())
                written.append(path)
    finally:
        console.print(report, crop=False)  # lines to copy may be longer than the console is wide
        for path in written:
            if not is_stdout(path):
                print_path(stderr(), f"Wrote {path}")


def print_path(console: Console, line: str) -> None:
    """Print on one line of any length, so that a path can be copied."""
    console.print(line, soft_wrap=True)


# Limit what an audited loss prints: it is called thousands of times.

SHOWN = 5
"""Lines that are shown."""
KEPT = 2_000
"""Bytes that are kept."""


class _Head(io.RawIOBase):
    """Keeps the beginning of the output, and counts its lines."""

    def __init__(self) -> None:
        self.kept, self.lines = b"", 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        written = bytes(data)  # pyright: ignore[reportArgumentType]
        self.lines += written.count(b"\n")
        self.kept += written[: KEPT - len(self.kept)]
        return len(written)


@contextmanager
def first_lines(name: str, console: Console) -> Iterator[None]:
    """Capture standard output and standard error within the context, and show their first lines afterwards."""
    head = _Head()
    stream = io.TextIOWrapper(io.BufferedWriter(head), encoding="utf-8", errors="backslashreplace")
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        stream.flush()
        lines = head.kept.decode("utf-8", "replace").splitlines()[:SHOWN]
        if lines:
            more = f" {head.lines:,} lines; the first {SHOWN}" if head.lines > SHOWN else ""
            console.print("\n".join([f"{name} printed{more}:", *(f"  {line}" for line in lines)]), style="dim")
