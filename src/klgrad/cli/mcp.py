"""`klgrad mcp`: the commands as tools of coding agents, by the Model Context Protocol."""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable

from .. import __version__
from ..errors import MissingExtraError

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


def command() -> None:
    """Offer the commands to coding agents, as tools of an MCP server on standard input and output.

    An agent's configuration names the command `klgrad` with the argument `mcp`. Needs `pip install 'klgrad[mcp]'`.
    Each call runs in a process of its own, so that a file that was edited meanwhile is read again.
    """
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise MissingExtraError("mcp, the SDK", "no such package", "pip install 'klgrad[mcp]'") from error
    from . import app  # which imports this file

    server = MCPServer("klgrad", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    for registered in app.registered_commands:
        name = registered.name
        if name in EXAMPLES and registered.callback is not None:
            server.add_tool(
                tool_of(name),
                name=name,
                description=_describe(name, inspect.getdoc(registered.callback) or ""),
                annotations=ToolAnnotations(destructive_hint=False, open_world_hint=False),
                structured_output=False,
            )
    server.run()


def _describe(name: str, documentation: str) -> str:
    return (
        f"{documentation}\n\n`arguments` are those of the command line `klgrad {name}`, for example {EXAMPLES[name]}; "
        '["--help"] lists them all. Paths are relative to the folder in which the server was started.'
    )


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
