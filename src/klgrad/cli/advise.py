"""`klgrad advise`."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Group
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from ..errors import UnknownNameError
from ..frameworks.advice import SETTINGS, WHERE, Meaning, code, expresses
from .console import stdout


class DivergenceChoice(StrEnum):
    """Which way round."""

    reverse = "reverse"
    forward = "forward"


class LevelChoice(StrEnum):
    """Of completions, or of tokens with their prefixes held fixed."""

    token = "token"
    sequence = "sequence"


def command(
    framework: Annotated[str, typer.Argument(help=f"One of: {', '.join(SETTINGS)}.")],
    divergence: Annotated[
        DivergenceChoice, typer.Option(help="reverse is KL(π‖ref), forward is KL(ref‖π).")
    ] = DivergenceChoice.reverse,
    level: Annotated[
        LevelChoice, typer.Option(help="sequence: between completions. token: prefixes held fixed.")
    ] = LevelChoice.sequence,
    off_policy: Annotated[
        bool, typer.Option("--off-policy", help="The samples are stale or another engine's.")
    ] = False,
) -> None:
    """Say what to write for the KL that is meant, and what it would really descend."""
    if framework not in SETTINGS:
        raise UnknownNameError("framework", framework, SETTINGS)
    meaning: Meaning = (divergence.value, level.value)
    wanted = f"{divergence.value}-kl-{level.value}, {'off-policy' if off_policy else 'on-policy'}"
    setting = SETTINGS[framework].get(meaning)
    parts: list[object] = []
    if setting is not None:
        parts += [Syntax(setting.lines, "python" if "(" in setting.lines else "ini", theme="ansi_dark"), ""]
        parts.append(f"It descends {setting.descends.on_policy} on-policy, {setting.descends.off_policy} off-policy.")
        parts += [setting.note] if setting.note else []
    if setting is None or not expresses(setting, meaning, off_policy):
        reason = "no setting says it" if setting is None else "that is not quite it"
        parts += ["" if setting else None, f"In {framework} {reason}; in {WHERE[framework]}, write:", ""]
        parts.append(Syntax(code(meaning, off_policy), "python", theme="ansi_dark"))
    shown = [part for part in parts if part is not None]
    stdout().print(Panel(Group(*shown), title=Text(f"{framework}: {wanted}", style="bold"), title_align="left"))  # type: ignore[arg-type]
