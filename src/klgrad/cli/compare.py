"""`klgrad compare`."""

from pathlib import Path
from typing import Annotated

import typer

from .console import stdout


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The figure.")] = Path("compared.png"),
) -> None:
    """Draw runs of `klgrad train` and `klgrad distill` side by side: reward, KL, reward against KL, lengths."""
    from ..train.compare import figure, load, table

    console, found = stdout(), load(runs)
    console.print(table(found))
    figure(found, out)
    console.print(f"Drawn in {out}", highlight=False)
