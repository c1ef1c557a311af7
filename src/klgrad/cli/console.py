"""Where the commands print, and how they hand over files."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn

from ..errors import OutputError
from ..support.atomic_files import is_stdout, write_output

INTERRUPTED = 130
"""The exit status that shells give to Ctrl-C."""

PIPED_WIDTH = 160
"""Columns of the output where no terminal says how wide it is."""


def stdout() -> Console:
    """For results."""
    return _literal(stderr=False)


def stderr() -> Console:
    """For progress, which no pipe should see."""
    return _literal(stderr=True)


def _literal(*, stderr: bool) -> Console:
    """A console that prints strings as they are: `[a]` in a name is no markup, `:x:` no emoji."""

    def console(width: int | None) -> Console:
        return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    found = console(None)
    return found if found.is_terminal else console(PIPED_WIDTH)


def bar(*columns: ProgressColumn, console: Console) -> Progress:
    """A progress bar that leaves nothing behind, and is not there without a terminal."""
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def beside(*paths: Path | None) -> Console:
    """For a report beside these files: standard output, unless one of them goes there."""
    taken = sum(map(is_stdout, paths))
    if taken > 1:
        raise OutputError("standard output for one file", f"for {taken}", "name files for the others")
    return stderr() if taken else stdout()


def deliver(console: Console, report: RenderableType, *files: tuple[Path | None, Callable[[], str | bytes]]) -> None:
    """Write the files that were asked for, show the report, and say where the files are.

    In this order, so that neither a path that cannot be written nor a reader that has gone costs the other.
    """
    written = []
    try:
        for path, content in files:
            if path is not None:
                write_output(path, content())
                written.append(path)
    finally:
        console.print(report)
        for path in written:
            if not is_stdout(path):
                say_path(stderr(), f"Wrote {path}")


def say_path(console: Console, line: str) -> None:
    """On one line however long: a path is there to be copied."""
    console.print(line, soft_wrap=True)
