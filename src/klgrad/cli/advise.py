"""`klgrad advise`."""

import json
from collections.abc import Iterator
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import RunFileError, UnknownNameError
from ..frameworks import DEFAULTS, FRAMEWORKS, HOMES, READERS, SETTINGS, recorded
from ..frameworks.framework import TARGET_OF, Meaning, SettingLines, expresses
from ..frameworks.run_file import DATA, PartAudit, Run
from ..support import Json, text_table
from ..targets import TARGETS
from .console import beside, completing, deliver, json_text, option, stderr, stdout

# What `klgrad advise --config` prints: the settings of a run, what its KL descends, and the lines to change.


def report_on(file: Path, run: Run, findings: list[PartAudit]) -> RenderableType:
    """The whole report, section by section."""
    parts: list[RenderableType] = [
        Text(f"{file}: {run.framework}, {run.trainer}", style="bold"),
        *(Text(note) for note in run.notes),
        "",
        _settings(run),
    ]
    if not findings:
        parts += ["", Text("This run has no KL to a reference.", style="bold")]
    parts += [Text(f"{name} is set and never read: {why}.", style="bold yellow") for name, why in run.unread.items()]
    for finding in findings:
        parts += ["", *_finding(run, finding)]
    return Group(*parts, "", *_changes(run, findings, file.suffix.lower()), *_version(run))


def _settings(run: Run) -> Table:
    rows = []
    for name, value in run.settings.items():
        source = "--set" if name in run.overrides else "" if name in run.given else "default"
        rows.append((f"  {name}", _written(value), Text(source, style="dim")))
    return text_table(rows, columns=3)


def _finding(run: Run, finding: PartAudit) -> list[RenderableType]:
    part = finding.part
    parts: list[RenderableType] = [
        Text(f"KL in the {part.place}, β = {part.coefficient:g}", style="bold"),
        Text(f"{part.loss}: {finding.source}", style="dim"),
    ]
    if finding.parts:
        parts.append(text_table([(f"  {label}", text) for label, text in finding.parts]))
    if part.caveat and finding.verdict:  # it says how the loss was audited
        parts.append(Text(part.caveat))
    if finding.verdict:
        parts.append(Text(f"Fresh samples: {_named(finding.words, finding.verdict)}"))
        if run.stale:
            parts.append(Text(f"Stale samples: {_named(finding.words_off_policy, finding.verdict_off_policy)}"))
            parts += [Text(f"  stale here: {reason}", style="dim") for reason in run.stale]
        else:
            parts.append(Text("No setting of this run makes its samples stale."))
    if finding.advice or finding.notes:
        parts.append(Text(finding.advice or f"Notes: {finding.notes}."))
    return parts


def _named(words: str, verdict: str) -> str:
    """The words, and the name of the verdict unless they are the same."""
    return f"{words}." if verdict in ("unknown", "nothing") else f"{words} ({verdict})."


def _changes(run: Run, findings: list[PartAudit], suffix: str) -> list[RenderableType]:
    target = f"the {TARGETS[run.target].phrase} ({run.target})," if run.target else ""
    if not run.changes and not findings:
        return [Text(f"No setting of {READERS[run.framework].title} that is read here adds one.")]
    if not run.changes and not all(finding.verdict for finding in findings):
        return [Text(f"Whether this is {target} was not audited here.")]
    if not run.changes:
        return [Text(f"Nothing to change for {target} on fresh samples.")]
    title = Text(f"For {target} on fresh samples, change" if target else "These lines lead to no reverse KL. Change")
    return [title, "", Text("\n".join(_lines(run, suffix)), style="cyan", no_wrap=True, overflow="ignore"), ""]


def _lines(run: Run, suffix: str) -> Iterator[str]:
    """Lines as the file takes them, with the reasons as comments."""
    before: list[str] = []
    for change in run.changes:
        why = f"  # {'optional; ' * change.optional}was {_written(change.was)}: {change.why}"
        name, value, reader = change.name, _written(change.value), READERS[run.framework]
        if run.framework == "openrlhf" or (reader.flags and suffix not in DATA):
            shown = name if reader.flags != "-" else name.replace("_", "-")
            yield f"--{shown}{'' if change.value is True else f' {value}'}{why}"
        elif suffix == ".toml":
            section, _, last = name.rpartition(".")
            if section != ".".join(before):
                yield f"[{section}]"
            yield f"{last} = {json.dumps(change.value)}{why}"
            before = section.split(".")
        elif suffix in DATA:
            *sections, last = name.split(".")
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(sections, before, strict=False))))
            for i in range(shared, len(sections)):
                yield f"{'  ' * i}{sections[i]}:"
            yield f"{'  ' * len(sections)}{last}: {value}{why}"
            before = sections
        elif run.framework == "trl":
            yield f"{name}={change.value!r},{why}" if suffix == ".py" else f"--{name} {value}{why}"
        else:
            yield f"{name}={value}{why}"


def _version(run: Run) -> list[RenderableType]:
    reader = READERS[run.framework]
    more = f"`klgrad advise {run.framework}` has lines for other KLs" if run.framework in SETTINGS else ""
    more += ", and KLTrainer, which also corrects the KL for stale samples" if run.framework == "trl" else ""
    defaults = f"Defaults are those of {run.framework} {FRAMEWORKS[run.framework].tested}"
    defaults += f" ({reader.source})" if reader.source else ""
    return [Text(f"{more}. {defaults}." if more else f"{defaults}.")]


def _written(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def json_of(file: Path, run: Run, findings: list[PartAudit]) -> str:
    """The report as JSON."""
    settings = {
        name: {"value": value, "from": "set" if name in run.overrides else "file" if name in run.given else "default"}
        for name, value in run.settings.items()
    }
    return json_text(
        {
            "file": str(file),
            "framework": run.framework,
            "defaults_of_version": FRAMEWORKS[run.framework].tested,
            "trainer": run.trainer,
            "settings": settings,
            "kl": [finding.to_dict() for finding in findings],
            "stale": list(run.stale),
            "target": run.target,
            "changes": [vars(change) for change in run.changes],
            "unread": run.unread,
            "notes": list(run.notes),
        }
    )


# `klgrad advise` itself.

DivergenceChoice = StrEnum("DivergenceChoice", {"reverse": "reverse", "forward": "forward"})
LevelChoice = StrEnum("LevelChoice", {"token": "token", "sequence": "sequence"})
TrainerChoice = StrEnum("TrainerChoice", {"grpo": "grpo", "rloo": "rloo"})

BOUNDED = " Off-policy Truncate(2.0) bounds the variance and adds bias; bound=None adds none."


def command(
    framework: Annotated[
        str | None,
        typer.Argument(
            help=f"One of: {', '.join(SETTINGS)}. With --config it may be left out.",
            autocompletion=completing(lambda: sorted({*SETTINGS, *READERS})),
        ),
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
        option(
            "What this run descends, and what to change: the YAML, JSON or TOML file, or the script, of a run of "
            f"{', '.join(READERS)}.",
            metavar="FILE",
        ),
    ] = None,
    trainer: Annotated[
        TrainerChoice | None, option("With --config and TRL: the trainer, where the file does not tell.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        option(
            "With --config: a setting that the file does not say, or says otherwise. May be repeated.",
            "--set",
            metavar="NAME=VALUE",
        ),
    ] = None,
    json: Annotated[Path | None, option("With --config: write it as JSON; `-` is standard output.")] = None,
) -> None:
    """Show what to write in a framework for a given KL, and what those lines descend; or what a run descends.

    The lines are printed without a frame, so that they can be copied.
    """
    framework = framework and framework.lower()
    if config is not None:
        from ..frameworks.run_file import find, read_run

        for given in setting or []:
            if "=" not in given.lstrip("="):
                raise RunFileError("--set NAME=VALUE", given, "write --set beta=0.04, for example")
        settings = {name: value for name, _, value in (given.partition("=") for given in setting or [])}
        run = read_run(config, framework, trainer and trainer.value, settings)
        console = beside(json)
        with stderr().status("Auditing"):  # shown in a terminal only
            findings = find(run)
        deliver(console, report_on(config, run, findings), (json, lambda: json_of(config, run, findings)))
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
        _setting(console, framework, setting, "Or, with TRL's own trainer, write" if exact and own_trainer else why)
    if not exact and not own_trainer:
        why = "No setting has this meaning" if setting is None else "For this meaning on every batch"
        _print(console, f"{why}: in {HOMES[framework].place}, write")
        _code(console, framework, meaning, off_policy)
    home, default, known = HOMES[framework], DEFAULTS[framework], FRAMEWORKS[framework]
    _print(console, f"The tensors of a Rollout, in {home.scope}:")
    console.print(text_table((f"  {role}", where) for role, where in home.tensors.items()))
    of_record = recorded(framework)
    descends = f": {of_record.parts_of(default.subject)}" if of_record else ""
    _print(console, f"Defaults: {default.settings}{descends}.")
    differs = "" if known.installed in (None, known.tested) else f" {known.installed} is installed, and may differ."
    _print(console, f"Checked on {framework} {known.tested}.{differs}")


def _setting(console: Console, framework: str, setting: SettingLines, why: str) -> None:
    _print(console, why)
    _print(console, setting.lines, **COPIED)
    if known := recorded(framework):
        _print(console, f"It descends: {known.parts_of(setting.subject)}.")
    if setting.note:
        console.print(Text(setting.note))
    if setting.policy_loss:
        console.print(Text(f"Effect on the policy loss: {setting.policy_loss}"))


def _code(console: Console, framework: str, meaning: Meaning, off_policy: bool) -> None:
    _print(console, HOMES[framework].lines(meaning, off_policy), **COPIED)
    target = TARGET_OF[meaning]
    _print(console, f"On-policy it {TARGETS[target].does} ({target}).{BOUNDED if off_policy else ''}")
    console.print(Text(HOMES[framework].note))


COPIED: Json = {"style": "cyan", "soft_wrap": True}
"""How lines to copy are printed: without wrapping."""


def _print(console: Console, text: str, **look: Any) -> None:
    console.print()
    console.print(Text(text), **look)
