"""The command line: `klgrad`."""

import sys
import traceback
from contextlib import suppress
from typing import Any, cast

import typer
from typer.rich_utils import rich_format_error

from .. import __version__
from ..errors import KlgradError
from . import advise, audit, compare, distill, logs, reproduce, train
from .console import INTERRUPTED, stderr, stdout
from .streams import PipeClosed, forgiving

ERROR = 2
CLOSED_PIPE = 141
"""The exit status that shells give to a program whose reader has gone."""

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
        stdout().print(f"klgrad {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Which divergence does this KL term really descend?"""


def main() -> None:
    """Run. Status 1 is a verdict that differs and nothing else; every error is 2."""
    with forgiving():
        status = _status()
    sys.exit(status)


def _status() -> int:
    try:
        found = app(standalone_mode=False)
        if sys.stdout is not None:  # as it is where it was closed
            sys.stdout.flush()  # here, where a failure can still be said
        return found or 0
    except PipeClosed:
        return CLOSED_PIPE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (Exception, SystemExit) as error:
        with suppress(PipeClosed):
            return _told(error)
        return ERROR


def _told(error: BaseException) -> int:
    """Say what went wrong; gives the exit status."""
    if isinstance(error, KlgradError):
        _say(f"{type(error).__name__}: {error}")
    elif isinstance(error, SystemExit):  # the commands themselves end by typer.Exit, which does not come here
        _say(f"SystemExit: expected code that returns; received sys.exit({error.code!r}); remedy: remove the call")
    elif hasattr(error, "exit_code"):  # click's, of which typer has a copy of its own in some versions
        rich_format_error(cast(Any, error))
    else:
        traceback.print_exception(error)
    return ERROR


def _say(line: str) -> None:
    stderr().print(line, style="red", soft_wrap=True)
