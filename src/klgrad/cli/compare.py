"""`klgrad compare`."""

from pathlib import Path
from typing import Annotated

import typer

from .console import beside, deliver


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of runs.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="File for the figure: .png, .svg or .pdf; `-` is standard output, as PNG.")
    ] = Path("compared.png"),
) -> None:
    """Compare runs of `klgrad train` and `klgrad distill`: a table, and a figure of rewards, KLs and lengths."""
    from ..training.output.comparison import load, picture, table

    console, found = beside(out), load(runs)
    kind = out.suffix.removeprefix(".").lower()
    deliver(console, table(found), (out, lambda: picture(found, kind if kind in ("svg", "pdf") else "png")))
