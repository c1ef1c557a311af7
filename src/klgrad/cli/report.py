"""`klgrad report`."""

from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from ..errors import UnknownNameError
from ..frameworks.findings import Finding, findings
from ..support import text_table
from .console import stdout


def _completed(start: str) -> list[str]:
    """Names of the projects, for the shell."""
    return [name for name in dict.fromkeys(each.framework for each in findings()) if name.startswith(start)]


def command(
    framework: Annotated[
        str | None,
        typer.Argument(
            help="The project. None: list all findings.",
            show_default=False,
            autocompletion=_completed,
        ),
    ] = None,
    finding: Annotated[
        str | None, typer.Argument(help="The finding, where there are several.", show_default=False)
    ] = None,
) -> None:
    """Print a finding about a framework as Markdown, for that project's issue tracker. Nothing is sent anywhere.

    It says what is declared, what happens, and why, with a program that shows it without klgrad, and a patch. The
    versions are at its end: try the program with the newest release before you post it.
    """
    known = findings()
    if framework is None:
        return _list(known)
    chosen = [each for each in known if each.framework == framework]
    if not chosen:
        raise UnknownNameError("framework with a finding", framework, [each.framework for each in known])
    if finding is not None:
        names = [each.name for each in chosen]
        chosen = [each for each in chosen if each.name == finding]
        if not chosen:
            raise UnknownNameError(f"finding about {framework}", finding, names)
    if len(chosen) > 1:
        return _list(chosen)
    stdout().print(Text(chosen[0].text), soft_wrap=True, end="")


def _list(known: list[Finding]) -> None:
    rows = [(each.framework, each.name, each.title.replace("`", "")) for each in known]
    note = Text("klgrad report FRAMEWORK FINDING prints one as Markdown.", style="dim")
    stdout().print(Group(text_table(rows, columns=3), "", note))
