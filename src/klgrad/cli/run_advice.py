"""What `klgrad advise --config` prints: the settings of a run, what its KL descends, and the lines to change."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..adapters.registry import FRAMEWORKS
from ..adapters.run_file import Finding, Run
from ..support.atomic_files import finite
from ..targets import TARGETS, Verdict


def in_words(verdict: Verdict) -> str:
    """The predicate of a sentence, with the name of the verdict."""
    does = TARGETS[verdict].does
    return does if verdict in ("unknown", "nothing") else f"{does} ({verdict})"


def report_on(file: Path, run: Run, findings: list[Finding]) -> RenderableType:
    """The whole report, section by section."""
    parts: list[RenderableType] = [
        Text(f"{file}: {run.framework}, {run.trainer}", style="bold"),
        *(Text(note) for note in run.notes),
        "",
        _settings(run),
    ]
    if not findings:
        parts += ["", Text("This run has no KL to a reference.", style="bold")]
    for finding in findings:
        parts += ["", *_finding(run, finding)]
    return Group(*parts, "", *_changes(run, file.suffix.lower()), *_version(run))


def _settings(run: Run) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in run.settings.items():
        default = Text("--set" if name in run.overrides else "" if name in run.given else "default", style="dim")
        table.add_row(Text(f"  {name}"), Text(_written(value)), default)
    return table


def _finding(run: Run, found: Finding) -> list[RenderableType]:
    part = found.part
    parts: list[RenderableType] = [
        Text(f"KL in the {part.place}, β = {part.coefficient:g}", style="bold"),
        Text(f"{part.loss}: {found.source}", style="dim"),
    ]
    if part.caveat and found.verdict:  # it says how the loss was audited
        parts.append(Text(part.caveat))
    if found.verdict:
        parts.append(Text(f"Fresh samples: {_named(found.words, found.verdict)}"))
        if run.stale:
            parts.append(Text(f"Stale samples: {_named(found.words_off_policy, found.verdict_off_policy)}"))
            parts += [Text(f"  stale here: {reason}", style="dim") for reason in run.stale]
        else:
            parts.append(Text("No setting of this run makes its samples stale."))
    if found.advice or found.notes:
        parts.append(Text(found.advice or f"Notes: {found.notes}."))
    return parts


def _named(words: str, verdict: str) -> str:
    """The words, and the name of the verdict unless they are the same."""
    return f"{words}." if verdict in ("unknown", "nothing") else f"{words} ({verdict})."


def _changes(run: Run, suffix: str) -> list[RenderableType]:
    target = f"the {TARGETS[run.target].title_in_sentence} ({run.target}),"
    if not run.changes:
        return [Text(f"Nothing to change for {target} on fresh samples.")]
    lines = "\n".join(_lines(run, suffix))
    title = Text(f"For {target} on fresh samples, change")
    return [title, "", Text(lines, style="cyan", no_wrap=True, overflow="ignore"), ""]


def _lines(run: Run, suffix: str) -> Iterator[str]:
    """Lines as the file takes them, with the reasons as comments."""
    before: list[str] = []
    for change in run.changes:
        why = f"  # {'optional; ' * change.optional}was {_written(change.was)}: {change.why}"
        name, value = change.name, _written(change.value)
        if run.framework == "openrlhf":  # which takes flags only
            yield f"--{name}{'' if change.value is True else f' {value}'}{why}"
        elif suffix in (".yaml", ".yml", ".json"):
            *sections, last = name.split(".")
            shared = next((i for i, (x, y) in enumerate(zip(sections, before, strict=False)) if x != y), len(before))
            shared = min(shared, len(sections))
            for i in range(shared, len(sections)):
                yield f"{'  ' * i}{sections[i]}:"
            yield f"{'  ' * len(sections)}{last}: {value}{why}"
            before = sections
        elif run.framework == "trl":
            yield f"{name}={change.value!r},{why}" if suffix == ".py" else f"--{name} {value}{why}"
        else:
            yield f"{name}={value}{why}"


def _version(run: Run) -> list[RenderableType]:
    known = FRAMEWORKS[run.framework]
    more = f"`klgrad advise {run.framework}` has lines for other KLs"
    more += ", and KLTrainer, which also corrects the KL for stale samples" if run.framework == "trl" else ""
    return [Text(f"{more}. Defaults are those of {run.framework} {known.tested}.")]


def _written(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}.get(value, str(value)) if not _is_number(value) else f"{value:g}"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def json_of(file: Path, run: Run, findings: list[Finding]) -> str:
    """The report as JSON."""
    settings = {
        name: {"value": value, "from": "set" if name in run.overrides else "file" if name in run.given else "default"}
        for name, value in run.settings.items()
    }
    data = {
        "file": str(file),
        "framework": run.framework,
        "defaults_of_version": FRAMEWORKS[run.framework].tested,
        "trainer": run.trainer,
        "settings": settings,
        "kl": [finding.to_dict() for finding in findings],
        "stale": list(run.stale),
        "target": run.target,
        "changes": [vars(change) for change in run.changes],
        "notes": list(run.notes),
    }
    return json.dumps(finite(data), indent=2) + "\n"
