"""`klgrad compare`."""

from pathlib import Path
from typing import Annotated

import typer

from .console import beside, deliver


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The figure (PNG); `-` is standard output.")] = Path("compared.png"),
) -> None:
    """Draw runs of `klgrad train` and `klgrad distill` side by side: reward, KL, reward against KL, lengths."""
    from ..training.output.comparison import load, picture, table

    console, found = beside(out), load(runs)
    deliver(console, table(found), (out, lambda: picture(found)))
