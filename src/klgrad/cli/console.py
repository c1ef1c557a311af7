"""Where the commands print."""

from rich.console import Console

PIPED_WIDTH = 160
"""Columns of the output where no terminal says how wide it is."""


def stdout() -> Console:
    """For results."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def stderr() -> Console:
    """For progress, which no pipe should see."""
    return Console(stderr=True)
