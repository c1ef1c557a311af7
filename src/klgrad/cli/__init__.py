"""The command line: `klgrad`."""

import sys

import typer

from .. import __version__
from ..errors import KlgradError
from . import advise, audit, compare, distill, logs, reproduce, train

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
app.command("audit")(audit.command)
app.command("advise")(advise.command)
app.command("logs")(logs.command)
app.command("reproduce")(reproduce.command)
app.command("train", context_settings=train.SETTINGS)(train.command)
app.command("distill", context_settings=distill.SETTINGS)(distill.command)
app.command("compare")(compare.command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"klgrad {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Which divergence does this KL term really descend?"""


def main() -> None:
    """Run; an error of ours is its message and exit status 2, not a traceback."""
    try:
        app()
    except KlgradError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        sys.exit(2)
