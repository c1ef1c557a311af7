"""`klgrad advise`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..adapters import FRAMEWORKS
from ..adapters.defaults import DEFAULTS
from ..adapters.own_code import HOMES, code
from ..adapters.recommendation import SETTINGS, TARGET_OF, Meaning, Setting, expresses
from ..adapters.recorded import recorded
from ..errors import RunFileError, UnknownNameError
from .console import beside, deliver, stderr, stdout
from .run_advice import in_words, json_of, report_on


class DivergenceChoice(StrEnum):
    """The direction of the KL."""

    reverse = "reverse"
    forward = "forward"


class LevelChoice(StrEnum):
    """The KL between completions, or of tokens with the prefixes held fixed."""

    token = "token"
    sequence = "sequence"


BOUNDED = " Off-policy Truncate(2.0) bounds the variance and adds bias; bound=None adds none."


class TrainerChoice(StrEnum):
    """A trainer of TRL with a KL."""

    grpo = "grpo"
    rloo = "rloo"


def command(
    framework: Annotated[
        str | None, typer.Argument(help=f"One of: {', '.join(SETTINGS)}. With --config it may be left out.")
    ] = None,
    divergence: Annotated[
        DivergenceChoice, typer.Option(help="reverse is KL(π‖ref), forward is KL(ref‖π).")
    ] = DivergenceChoice.reverse,
    level: Annotated[
        LevelChoice, typer.Option(help="sequence: between completions. token: prefixes held fixed.")
    ] = LevelChoice.sequence,
    off_policy: Annotated[
        bool, typer.Option("--off-policy", help="The samples are stale or from another engine.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What this run descends, and what to change: the YAML or JSON file, or the script, of a run of TRL, "
            "verl, OpenRLHF or SkyRL.",
            show_default=False,
        ),
    ] = None,
    trainer: Annotated[
        TrainerChoice | None,
        typer.Option(help="With --config and TRL: the trainer, where the file does not tell.", show_default=False),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="With --config: a setting that the file does not say, or says otherwise. May be repeated.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="With --config: write it as JSON; `-` is standard output.", show_default=False)
    ] = None,
) -> None:
    """Show what to write in a framework for a given KL, and what those lines descend; or what a run descends.

    The lines are printed without a frame, so that they can be copied.
    """
    framework = framework and framework.lower()
    if config is not None:
        _for_run(config, framework, trainer, _settings(setting or []), json)
        return
    if setting:
        raise RunFileError("--config FILE with --set", "--set alone", "write klgrad advise --config FILE --set ...")
    if framework is None:
        raise RunFileError("a framework or --config FILE", "neither", "write klgrad advise trl, for example")
    if framework in FRAMEWORKS and framework not in SETTINGS:
        remedy = f"klgrad audit {framework} shows what its settings descend"
        raise RunFileError(f"a framework with advice: {', '.join(SETTINGS)}", f"{framework}, without any", remedy)
    if framework not in SETTINGS:
        raise UnknownNameError("framework", framework, SETTINGS)
    _for_meaning(stdout(), framework, (divergence.value, level.value), off_policy)


def _settings(written: list[str]) -> dict[str, str]:
    for setting in written:
        if "=" not in setting.lstrip("="):
            raise RunFileError("--set NAME=VALUE", setting, "write --set beta=0.04, for example")
    return dict(setting.split("=", 1) for setting in written)  # type: ignore[misc]


def _for_run(
    config: Path,
    framework: str | None,
    trainer: TrainerChoice | None,
    settings: dict[str, str],
    json: Path | None,
) -> None:
    from ..adapters.run_file import find, read_run

    run = read_run(config, framework, trainer and trainer.value, settings)
    console = beside(json)
    with stderr().status("Auditing"):  # shown in a terminal only
        findings = find(run)
    deliver(console, report_on(config, run, findings), (json, lambda: json_of(config, run, findings)))


def _for_meaning(console: Console, framework: str, meaning: Meaning, off_policy: bool) -> None:
    """Settings where they have this meaning on every batch, code otherwise; for TRL the code comes first."""
    target, setting = TARGET_OF[meaning], SETTINGS[framework].get(meaning)
    console.print(Text(f"{framework}: {target}, {'off-policy' if off_policy else 'on-policy'}", style="bold"))
    exact = setting is not None and expresses(setting, meaning, off_policy)
    own_trainer = framework == "trl"
    if own_trainer:
        _print(console, f"With {HOMES[framework].place}, write")
        _code(console, framework, meaning, off_policy)
    if setting is not None:
        why = "Write" if exact else "No setting has this meaning on every batch. The nearest is"
        _setting(console, setting, "Or, with TRL's own trainer, write" if exact and own_trainer else why)
    if not exact and not own_trainer:
        why = "No setting has this meaning" if setting is None else "For this meaning on every batch"
        _print(console, f"{why}: in {HOMES[framework].place}, write")
        _code(console, framework, meaning, off_policy)
    _tensors(console, framework)
    _print(console, f"Defaults: {_default(framework)}")
    known = FRAMEWORKS[framework]
    _print(console, f"Checked on {framework} {known.tested}.{_other_version(known.installed, known.tested)}")


def _default(framework: str) -> str:
    default, known = DEFAULTS[framework], recorded(framework)
    row = next(row for row in known.rows if row[0] == default.subject) if known else None
    return default.settings + (f": {row[1]} on fresh samples; on stale ones {row[2]}." if row else ".")


def _other_version(installed: str | None, tested: str) -> str:
    return "" if installed in (None, tested) else f" {installed} is installed, and may differ."


def _setting(console: Console, setting: Setting, why: str) -> None:
    _print(console, why)
    _lines(console, setting.lines)
    on_policy, off_policy = map(in_words, setting.descends)
    _print(console, f"On-policy it {on_policy}; off-policy it {off_policy}.")
    if setting.note:
        console.print(Text(setting.note))
    if setting.policy_loss:
        console.print(Text(f"Effect on the policy loss: {setting.policy_loss}"))


def _code(console: Console, framework: str, meaning: Meaning, off_policy: bool) -> None:
    _lines(console, code(framework, meaning, off_policy))
    _print(console, f"On-policy it {in_words(TARGET_OF[meaning])}.{BOUNDED if off_policy else ''}")
    console.print(Text(HOMES[framework].note))


def _tensors(console: Console, framework: str) -> None:
    """Print where the framework keeps the tensors that a `Rollout` takes."""
    home = HOMES[framework]
    _print(console, f"The tensors of a Rollout, in {home.scope}:")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for role, where in home.tensors.items():
        table.add_row(Text(f"  {role}"), Text(where))
    console.print(table)


def _print(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text))


def _lines(console: Console, lines: str) -> None:
    """Print lines to copy, without wrapping."""
    console.print()
    console.print(Text(lines, style="cyan"), soft_wrap=True)
