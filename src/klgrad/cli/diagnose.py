"""`klgrad diagnose`."""

from __future__ import annotations

import json as json_module
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import SettingError
from ..support import finite
from .console import beside, deliver, stderr

if TYPE_CHECKING:
    from ..frameworks.run_file import PartAudit
    from ..frameworks.run_settings import Run
    from ..logs.diagnosis import Diagnosis, Observation, RunConfiguration, RunDiagnosis
    from ..logs.symptoms import Fact

FOUND = 1
"""The exit status with --check where a symptom was seen."""

NEVER_NEGATIVE = re.compile(r"\b(k2|k3|low_var_kl|mse|abs)\b|^trl grpo|^ms-swift loss_type")
"""In the name of an audited loss: the estimate that the run logs is a square, an absolute value or k3."""


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="trainer_state.json, a folder with checkpoints or TensorBoard's event files, wandb's history as CSV "
            "or JSON, or JSON lines such as verl's file logger writes. Several runs are compared.",
            show_default=False,
        ),
    ],
    config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="The run's configuration, as `klgrad advise --config` reads it: it decides between causes. Once for "
            "all runs, or once for each in their order.",
            show_default=False,
        ),
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="With --config: the framework, where the file does not tell.", show_default=False)
    ] = None,
    beta: Annotated[
        list[float] | None,
        typer.Option(help="The coefficient of each run, in their order, without --config.", show_default=False),
    ] = None,
    kl: Annotated[str, typer.Option(metavar="NAME", help="The metric that is the KL.", show_default=False)] = "",
    json: Annotated[
        Path | None, typer.Option(help="Write it as JSON; `-` is standard output.", show_default=False)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 if there is a symptom.")] = False,
) -> None:
    """Find what is wrong with the KL in a run's scalars: likely causes in order, what decides, and the cure.

    Nothing needs to be added to a run: what its trainer logs is read. A KL to the sampler is told from one to the
    reference, and a value that is not finite from one that was not logged.
    """
    from ..logs.diagnosis import RunConfiguration, diagnose, read_scalars

    if config and beta:
        raise SettingError("--config or --beta", "both", "leave --beta out: the files have it")
    logs = [log for path in runs for log in read_scalars(path)]
    if config:
        with stderr().status("Auditing"):
            configurations = [_configuration(path, framework) for path in config]
    else:
        configurations = [RunConfiguration(beta=value) for value in beta or []]
    diagnosis = diagnose(logs, configurations, kl)
    content = lambda: json_module.dumps(finite(diagnosis.to_dict()), indent=2) + "\n"
    deliver(beside(json), show(diagnosis), (json, content))
    if check and diagnosis.observations:
        raise typer.Exit(FOUND)


def _configuration(path: Path, framework: str | None) -> RunConfiguration:
    from ..frameworks.run_file import find, read_run
    from ..logs.diagnosis import RunConfiguration

    run = read_run(path, framework)
    findings = find(run)
    lines = [f"{path}: {run.framework}, {run.trainer}."]
    for finding in findings:
        words = finding.words or finding.source
        lines.append(f"KL in the {finding.part.place}, β = {finding.part.coefficient:g}: {words}.")
    lines += ["This run has no KL to a reference."] * (not findings)
    lines += [f"{name} is set and never read: {why}." for name, why in run.unread.items()]
    betas = {finding.part.coefficient for finding in findings}
    return RunConfiguration(
        betas.pop() if len(betas) == 1 else None,
        frozenset(_facts(run, findings)),
        tuple(lines),
        bool(findings) and all(NEVER_NEGATIVE.search(finding.part.loss) for finding in findings),
    )


def _facts(run: Run, findings: list[PartAudit]) -> set[Fact]:
    words = " ".join(f"{finding.words} {finding.notes}" for finding in findings)
    holds_by_fact: dict[Fact, bool] = {
        "no-kl": not findings,
        "unread": bool(run.unread),
        "both": len({finding.part.place for finding in findings}) > 1,
        "ignores-ref": "no KL: its gradient" in words or any(finding.verdict == "nothing" for finding in findings),
        "climbs": "climbs" in " ".join(finding.words for finding in findings),
        "forward": any(finding.words.startswith("forward KL") for finding in findings),
        "cut": "no gradient where" in words or "dead for" in words,
        "divided": any("standard deviation" in change.why for change in run.changes),
        "stale": bool(run.stale),
    }
    return {fact for fact, holds in holds_by_fact.items() if holds}


def show(diagnosis: Diagnosis) -> RenderableType:
    """The whole report: each run, then what comparing them shows."""
    parts: list[RenderableType] = []
    for run in diagnosis.runs:
        parts += [*([""] if parts else []), *_run(run)]
    if len(diagnosis.runs) > 1:
        parts += ["", Text("The runs compared", style="bold"), *map(Text, diagnosis.lines)]
        parts += [line for seen in diagnosis.compared for line in _observation(seen)]
    if not diagnosis.observations:
        parts += ["", Text("No symptom was seen.", style="green")]
    return Group(*parts)


def _run(run: RunDiagnosis) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(f"{run.log.name}: {run.log.form}", style="bold"), *map(Text, run.lines)]
    return [*parts, *(line for seen in run.observations for line in _observation(seen))]


def _observation(seen: Observation) -> list[RenderableType]:
    from ..logs.symptoms import threads_of

    parts: list[RenderableType] = ["", Text(seen.symptom.title, style="bold yellow"), Text(seen.evidence)]
    for i, (cause, settled) in enumerate(seen.causes, 1):
        parts.append(Text(f"  {i}. {cause.what}"))
        if settled:
            parts.append(Text("     The configuration of this run says so.", style="bold"))
        parts.append(Text(f"     decided by: {cause.decides.replace('`', '')}", style="cyan"))
        parts.append(Text(f"     cure: {cause.cure.replace('`', '')}"))
    if threads := threads_of(seen.symptom.name):
        parts.append(Text(f"  Seen in {', '.join(threads)}", style="dim"))
    return parts
