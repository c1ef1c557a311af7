"""Streams and consoles: what is printed, and where."""

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, track
from rich.segment import Segment

from ..errors import OutputError
from ..support import finite, is_stdout, write_output

# Standard output and standard error.


def _streams() -> list[io.TextIOWrapper]:
    """Without a closed one and that of a notebook, which accepts any text."""
    return [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]


def accept_any_text() -> None:
    """Let the streams write what their encoding does not have as codes, instead of an error."""
    for stream in _streams():
        stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Discard what the streams still hold: Python would fail again when it writes it at exit."""
    for stream in _streams():
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), stream.fileno())


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """For the shell: those names that begin with what was typed."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]  # typer goes by the name


def option(text: str, *names: str, **settings: Any) -> Any:
    """An option of typer's whose default is no part of its help text."""
    return typer.Option(*names, help=text, show_default=False, **settings)


def argument(text: str, **settings: Any) -> Any:
    """An argument, likewise."""
    return typer.Argument(help=text, show_default=False, **settings)


JsonFile = Annotated[Path | None, option("Write it as JSON; `-` is standard output.")]
"""The option `--json` of most commands."""


def json_text(data: object) -> str:
    """Data as the text of a file."""
    return json.dumps(finite(data), indent=2, ensure_ascii=False) + "\n"


# The consoles of the commands, and how they write their files.


T = TypeVar("T")

SILENCE = 10.0
"""Seconds after which a line tells the progress, where there is no bar."""

INTERRUPTED = 130
"""The exit status that shells give to Ctrl-C."""

PIPED_WIDTH = 160
"""Columns of the output where it does not go to a terminal."""

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters with which a text could command the terminal or turn its direction, all but the end of a line."""


class LiteralConsole(Console):
    """Prints strings as they are: `[a]` in a name is no markup, and `:x:` no emoji.

    Control characters are shown by their codes: names, labels and messages come from files that others wrote. It keeps
    the stream of this moment, so that it still shows something while the output of a loss is captured.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)
        if not self.is_terminal:
            self.width = PIPED_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render a part of the output."""
        for segment in super().render(renderable, options):
            harmless = segment.control or not CONTROL.search(segment.text)
            code = lambda control: control[0].encode("unicode_escape").decode()
            yield segment if harmless else Segment(CONTROL.sub(code, segment.text), segment.style)


def stdout() -> Console:
    """The console for results."""
    return LiteralConsole(file=sys.stdout)


def stderr() -> Console:
    """The console for progress and messages, which are not part of the results."""
    return LiteralConsole(file=sys.stderr, stderr=True)


def as_html(report: RenderableType, figure: str = "") -> str:
    """What is printed as a page that needs no network, with a figure in SVG below it."""
    console = LiteralConsole(file=io.StringIO(), record=True)
    console.width = 130  # the window of a laptop
    console.print(report)
    return console.export_html().replace("</body>", f"{figure}</body>")


def bar(*columns: ProgressColumn, console: Console) -> Progress:
    """A progress bar that disappears when it is done, and is shown in a terminal only."""
    # rich before 14.3 prints an empty line at the end of a disabled bar, unless the console is quiet.
    shown = console if console.is_terminal else Console(quiet=True)
    return Progress(*columns, console=shown, transient=True, disable=not console.is_terminal)


def tracked(items: Sequence[T], title: str, console: Console) -> Iterable[T]:
    """The items, with a progress bar where the console is a terminal."""
    return track(items, title, console=console, transient=True) if console.is_terminal else items


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


@contextmanager
def first_lines(name: str, console: Console) -> Iterator[None]:
    """Capture standard output and standard error within the context, and show their first lines afterwards."""
    text = io.StringIO()
    try:
        with redirect_stdout(text), redirect_stderr(text):
            yield
    finally:
        lines = text.getvalue().splitlines()
        if lines:
            more = f" {len(lines):,} lines; the first {SHOWN}" if len(lines) > SHOWN else ""
            console.print("\n".join([f"{name} printed{more}:", *(f"  {line}" for line in lines[:SHOWN])]), style="dim")
