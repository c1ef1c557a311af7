"""`klgrad advise`."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..adapters.defaults import DEFAULTS
from ..adapters.recommendation import SETTINGS, TARGET_OF, WHERE, Meaning, Setting, code, expresses
from ..errors import UnknownNameError
from .console import stdout


class DivergenceChoice(StrEnum):
    """The direction of the KL."""

    reverse = "reverse"
    forward = "forward"


class LevelChoice(StrEnum):
    """The KL between completions, or of tokens with the prefixes held fixed."""

    token = "token"
    sequence = "sequence"


BOUNDED = (
    "It descends {target} on-policy. Off-policy Truncate(2.0) bounds the variance and adds bias; bound=None adds none."
)


def command(
    framework: Annotated[str, typer.Argument(help=f"One of: {', '.join(SETTINGS)}.")],
    divergence: Annotated[
        DivergenceChoice, typer.Option(help="reverse is KL(π‖ref), forward is KL(ref‖π).")
    ] = DivergenceChoice.reverse,
    level: Annotated[
        LevelChoice, typer.Option(help="sequence: between completions. token: prefixes held fixed.")
    ] = LevelChoice.sequence,
    off_policy: Annotated[
        bool, typer.Option("--off-policy", help="The samples are stale or from another engine.")
    ] = False,
) -> None:
    """Show what to write in a framework for a given KL, and what those lines descend.

    The lines are printed without a frame, so that they can be copied.
    """
    framework = framework.lower()
    if framework not in SETTINGS:
        raise UnknownNameError("framework", framework, SETTINGS)
    meaning: Meaning = (divergence.value, level.value)
    target, setting = TARGET_OF[meaning], SETTINGS[framework].get(meaning)
    console = stdout()
    console.print(Text(f"{framework}: {target}, {'off-policy' if off_policy else 'on-policy'}", style="bold"))
    if setting is not None and expresses(setting, meaning, off_policy):
        _setting(console, setting, "Write")
    else:
        where = "No setting has this meaning"
        if setting is not None:
            _setting(console, setting, "No setting has this meaning on every batch. The nearest is")
            where = "For this meaning on every batch"
        _print(console, f"{where}: in {WHERE[framework]}, write")
        _lines(console, code(meaning, off_policy))
        _print(console, BOUNDED.format(target=target) if off_policy else f"It descends {target} on-policy.")
    _print(console, f"Defaults: {DEFAULTS[framework]}")


def _setting(console: Console, setting: Setting, why: str) -> None:
    _print(console, why)
    _lines(console, setting.lines)
    _print(console, f"It descends {setting.descends.on_policy} on-policy, {setting.descends.off_policy} off-policy.")
    if setting.note:
        console.print(Text(setting.note))


def _print(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text))


def _lines(console: Console, lines: str) -> None:
    """Print lines to copy, without wrapping."""
    console.print()
    console.print(Text(lines, style="cyan"), soft_wrap=True)
