"""The command line: `klgrad`.

What needs torch is imported by the function that needs it, so that a help text, an error and a version are printed
without waiting for torch.
"""

import os
import sys
import traceback
from contextlib import suppress
from typing import Any, cast

import typer
from typer.core import TyperOption
from typer.rich_utils import rich_format_error

from .. import __version__
from ..errors import KlgradError
from . import advise, audit, convert, diagnose, doctor, frameworks, logs, mcp, reproduce, train
from .console import INTERRUPTED, accept_any_text, discard_output, stderr, stdout

ERROR = 2
CLOSED_PIPE = 141
"""The exit status that shells give to a program whose output pipe was closed."""

COMPLETING = "_KLGRAD_COMPLETE"
"""The variable by which a shell asks for completions."""

COMPLETION_OPTIONS = {"--install-completion", "--show-completion"}
"""Options of typer's own."""


def _type_of(option: TyperOption, ctx: Any) -> str | None:
    """What a help text has behind an option: nothing for a flag, where typer's `<bool>` asks for a value."""
    return None if option.is_flag else option.metavar or option.display_type(ctx)


TyperOption.display_type_rich = _type_of  # pyright: ignore[reportAttributeAccessIssue]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
app.command("audit")(audit.command)
app.command("advise")(advise.command)
app.command("convert")(convert.command)
app.command("frameworks")(frameworks.command)
app.command("logs")(logs.command)
app.command("diagnose")(diagnose.command)
app.command("report")(frameworks.report)
app.command("reproduce")(reproduce.command)
app.command("train", context_settings=train.SETTINGS)(train.command)
app.command("distill", context_settings=train.SETTINGS)(train.distill_command)
app.command("compare")(train.compare_command)
app.command("doctor")(doctor.command)
app.command("mcp")(mcp.command)


def _version(requested: bool) -> None:
    if requested:
        stdout().print(f"klgrad {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Which divergence does this KL term really descend?"""


def main() -> None:
    """Run the command line. Exit status 1 means only that a verdict differs; every error is 2."""
    accept_any_text()
    status = _status()
    discard_output()
    sys.exit(status)


def _status() -> int:
    try:
        status = app(standalone_mode=False, prog_name="klgrad")
        sys.stdout.flush()  # here, where a failure can still be reported
        return status or 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (Exception, SystemExit) as error:
        # typer and rich exit with status 1 when they find a closed pipe.
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
            return CLOSED_PIPE
        completes = COMPLETING in os.environ or bool(COMPLETION_OPTIONS & set(sys.argv[1:2]))
        if isinstance(error, SystemExit) and completes:  # this is how typer ends a completion
            return int(error.code or 0)
        with suppress(OSError, SystemExit):  # standard error may be closed
            _report(error)
        return ERROR


def _report(error: BaseException) -> None:
    """Print an error on standard error."""
    if isinstance(error, KlgradError):
        _print_error(f"{type(error).__name__}: {error}")
    elif isinstance(error, SystemExit):  # raised by user code: the commands themselves raise typer.Exit
        _print_error(
            f"SystemExit: expected code that returns; received sys.exit({error.code!r}); remedy: remove the call"
        )
    elif hasattr(error, "exit_code"):  # an error of click; some versions of typer contain a copy of click
        rich_format_error(cast(Any, error))
    else:
        traceback.print_exception(error)


def _print_error(line: str) -> None:
    stderr().print(line, style="red", soft_wrap=True)
