"""`klgrad frameworks` and `klgrad report`: the frameworks on record, and what is to be reported to them."""

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import UnknownNameError
from ..frameworks import FRAMEWORKS, recorded
from ..frameworks.drift import PartChange, VersionDrift, check
from ..frameworks.findings import FrameworkReport, findings
from ..support import text_table
from .audit import completed_framework
from .console import beside, deliver, stderr, stdout, tracked

CHANGED = 1
"""The exit status of --check where a release or a part is not the recorded one."""


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FRAMEWORK]...", help="None: all.", show_default=False, autocompletion=completed_framework
        ),
    ] = None,
    check_: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Ask the package index for newer releases, audit what is installed in another version than the "
            "recorded one, and exit with status 1 if anything differs.",
        ),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write it as JSON; `-` is standard output.", show_default=False)
    ] = None,
) -> None:
    """List the frameworks whose losses are audited, with the versions on record; or check what has changed since.

    The index is asked by `pip index versions`, with your own configuration of pip.
    """
    for name in names or []:
        if name not in FRAMEWORKS:
            raise UnknownNameError("framework", name, FRAMEWORKS)
    chosen = [FRAMEWORKS[name] for name in names or FRAMEWORKS]
    drifts = []
    for framework in tracked(chosen, "Checking", stderr()) if check_ else chosen:
        known = recorded(framework.name)
        version, date = (known.version, known.date) if known else (None, "")
        here = None if framework.transcribed else framework.installed
        drifts.append(check(framework, known) if check_ else VersionDrift(framework.name, version, date, None, here))
    deliver(beside(json), show(drifts, checked=check_), (json, lambda: _to_json(drifts)))
    if check_ and any(drift.has_changed for drift in drifts):
        raise typer.Exit(CHANGED)


def show(drifts: list[VersionDrift], *, checked: bool) -> RenderableType:
    """A row for each, and below it what differs."""
    heads = ("framework", "recorded", "on", "installed", *(["newest"] if checked else []))
    rows = []
    for drift in drifts:
        here = "transcribed" if FRAMEWORKS[drift.framework].transcribed else drift.installed or ""
        newest = Text(drift.newest or "on no index", style="yellow" if drift.has_newer else "")
        rows.append((drift.framework, drift.recorded or "", drift.date, here, *([newest] if checked else [])))
    parts: list[RenderableType] = [text_table(rows, heads, fold=True)]
    for drift in drifts:
        if drift.failure:
            parts += [
                "",
                Text(f"{drift.framework} {drift.installed} could not be audited: {drift.failure}", style="red"),
            ]
        elif drift.audited:
            same = "" if drift.differences else ": every part of every setting is as recorded"
            title = f"{drift.framework} {drift.installed} against the record of {drift.recorded}{same}"
            parts += ["", Text(title, style="bold"), *map(_line, drift.differences)]
    return Group(*parts)


def _line(difference: PartChange) -> Text:
    if difference.part == "setting":
        return Text(f"  {difference.setting}: {'is new' if difference.now else 'is gone'}")
    was, now = (cell or "nothing" for cell in (difference.was, difference.now))
    return Text(f"  {difference.setting}: {difference.part} was {was}, is {now}")


def _to_json(drifts: list[VersionDrift]) -> str:
    data = [asdict(drift) | {"has_newer": drift.has_newer} for drift in drifts]
    return json_module.dumps({"frameworks": data}, indent=2) + "\n"


# klgrad report


def _with_report(start: str) -> list[str]:
    """Names of the projects, for the shell."""
    return [name for name in dict.fromkeys(each.framework for each in findings()) if name.startswith(start)]


def report(
    framework: Annotated[
        str | None,
        typer.Argument(
            help="The project. None: list all findings.",
            show_default=False,
            autocompletion=_with_report,
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


def _list(known: list[FrameworkReport]) -> None:
    rows = [(each.framework, each.name, each.title.replace("`", "")) for each in known]
    note = Text("klgrad report FRAMEWORK FINDING prints one as Markdown.", style="dim")
    stdout().print(Group(text_table(rows, columns=3), "", note))
