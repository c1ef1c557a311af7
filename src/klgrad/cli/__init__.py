"""The command line: `klgrad`.

What needs torch is imported by the function that needs it, so that a help text, an error and a version are printed
without waiting for torch.
"""

import asyncio
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import typer
from typer.core import TyperOption
from typer.rich_utils import rich_format_error

from .. import __version__
from ..errors import KlgradError, MissingExtraError
from . import advise, audit, convert, doctor, logs, reproduce, train
from .console import INTERRUPTED, accept_any_text, discard_output, stderr, stdout

ERROR = 2
CLOSED_PIPE = 141
"""The exit status that shells give to a program whose output pipe was closed."""

COMPLETING = "_KLGRAD_COMPLETE"
"""The variable by which a shell asks for completions."""

COMPLETION_OPTIONS = {"--install-completion", "--show-completion"}
"""Options of typer's own."""


def _type_of(option: TyperOption, ctx: typer.Context) -> str | None:
    """What a help text has behind an option: nothing for a flag, where typer's `<bool>` asks for a value."""
    return None if option.is_flag else option.metavar or option.display_type(ctx)


TyperOption.display_type_rich = _type_of  # pyright: ignore[reportAttributeAccessIssue]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
app.command("audit")(audit.command)
app.command("advise")(advise.command)
app.command("convert")(convert.command)
app.command("frameworks")(doctor.frameworks)
app.command("logs")(logs.command)
app.command("diagnose")(logs.diagnose)
app.command("report")(doctor.report)
app.command("reproduce")(reproduce.command)
app.command("train", context_settings=train.SETTINGS)(train.command)
app.command("distill", context_settings=train.SETTINGS)(train.distill_command)
app.command("compare")(train.compare_command)
app.command("doctor")(doctor.command)


# `klgrad mcp`: the commands as tools of coding agents, by the Model Context Protocol.

EXAMPLES = {
    "audit": '["losses.py:kl_penalty", "--expect", "reverse-kl-token"]',
    "advise": '["--config", "train.yaml"]',
    "convert": '["trl grpo beta=0.04 loss_type=dapo", "k2-loss-token-mean"]',
    "diagnose": '["runs/mine/trainer_state.json", "--config", "train.yaml"]',
}
"""The commands that are offered as tools, each with an example."""

INSTRUCTIONS = """\
klgrad says which divergence the KL term of an RL loss for language models descends. Call `audit` on the loss function \
under discussion before judging it, and `advise` on the configuration of a run. `diagnose` reads the scalars of a run, \
and `convert` takes β from one loss to another. A file that is audited is imported and run: audit only code that the \
user trusts.
"""

DIFFERS = 1
"""The exit status of a command that ran, and found something other than was expected."""

Tool = Callable[[list[str]], Awaitable[str]]


@app.command("mcp")
def mcp() -> None:
    """Offer the commands to coding agents, as tools of an MCP server on standard input and output.

    An agent's configuration names the command `klgrad` with the argument `mcp`. Needs `pip install 'klgrad[mcp]'`.
    Each call runs in a process of its own, so that a file that was edited meanwhile is read again.
    """
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise MissingExtraError("mcp, the SDK", "no such package", "pip install 'klgrad[mcp]'") from error

    server = MCPServer("klgrad", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    for registered in app.registered_commands:
        name = registered.name
        if name in EXAMPLES and registered.callback is not None:
            usage = (
                f"`arguments` are those of the command line `klgrad {name}`, for example {EXAMPLES[name]}; "
                '["--help"] lists them all. Paths are relative to the folder in which the server was started.'
            )
            server.add_tool(
                tool_of(name),
                name=name,
                description=f"{inspect.getdoc(registered.callback)}\n\n{usage}",
                annotations=ToolAnnotations(destructive_hint=False, open_world_hint=False),
                structured_output=False,
            )
    server.run()


def tool_of(name: str) -> Tool:
    """A function that runs one command with its arguments, and returns what it printed."""

    async def run(arguments: list[str]) -> str:
        from mcp.server.mcpserver.exceptions import ToolError

        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "klgrad", name, *arguments),
            stdin=asyncio.subprocess.DEVNULL,  # standard input is the protocol's
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        text = (await process.communicate())[0].decode(errors="replace")
        if process.returncode not in (0, DIFFERS):
            raise ToolError(text or f"klgrad {name} ended with status {process.returncode}")
        return text

    return run


# The command as a whole, and its exit status.


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
    if isinstance(error, SystemExit):  # raised by user code: the commands themselves raise typer.Exit
        error = KlgradError("code that returns", f"sys.exit({error.code!r})", "remove the call")
        stderr().print(f"SystemExit: {error}", style="red", soft_wrap=True)
    elif isinstance(error, KlgradError):
        stderr().print(f"{type(error).__name__}: {error}", style="red", soft_wrap=True)
    elif hasattr(error, "exit_code"):  # an error of click; some versions of typer contain a copy of click
        rich_format_error(cast(Any, error))
    else:
        traceback.print_exception(error)
