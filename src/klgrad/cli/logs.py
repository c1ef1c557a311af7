"""`klgrad logs` and `klgrad diagnose`: what the log-probs and the scalars of a run say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.text import Text

from ..errors import SettingError
from ..support import text_table
from .console import JsonFile, argument, as_html, bar, beside, deliver, json_text, option, stderr

if TYPE_CHECKING:
    from rich.table import Table

    from ..frameworks.run_file import PartAudit
    from ..frameworks.run_settings import Run
    from ..logs import LogReport
    from ..logs.coefficients import CoefficientComparison
    from ..logs.diagnosis import Diagnosis, Observation, RunConfiguration
    from ..logs.symptoms import Fact
    from ..reports import Report


def command(
    files: Annotated[
        list[Path], argument("Parquet, JSONL or NPZ, with per-token log-probs; folders and patterns too.")
    ],
    cell: Annotated[
        str | None, option("The KL loss in use, by its name in `klgrad audit`: its coefficients are reported.")
    ] = None,
    column: Annotated[
        list[str] | None,
        option(
            "The name of a column that is not recognised. Roles: logp, ref_logp, old_logp, behavior_logp, mask, "
            "group. `ROLE=` leaves an optional column out.",
            metavar="ROLE=NAME",
        ),
    ] = None,
    by: Annotated[
        str | None,
        option("A column with one value per completion, such as `step`: report each value too.", metavar="NAME"),
    ] = None,
    html: Annotated[Path | None, option("Write the report as a page, with figures if there is `--by`.")] = None,
    json: Annotated[Path | None, option("Write the report as JSON; `-` is standard output.")] = None,
) -> None:
    """Report the KL of a run from its logged log-probs, with standard errors, and whether trainer and sampler agree.

    The file has one row per completion, with lists `logp` and `ref_logp`, and optionally `behavior_logp` (of the
    sampler), `old_logp` and `mask`. The names of TRL, verl, OpenRLHF, prime-rl and others are recognised. Each file is
    read once. `KLCallback(log_rollouts=FOLDER)` of `klgrad.trl` writes such files.
    """
    import torch

    from ..logs.examination import draw, examine
    from ..logs.reader import parse_choices

    # A batch fits into the cache of one core, so more threads would not help.
    torch.set_num_threads(1)
    chosen, console = parse_choices(column or []), beside(json, html)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with bar(*columns, console=stderr()) as shown:
        task = shown.add_task(f"Reading {files[0].name}", total=1)
        report = examine(files, cell, chosen, by=by, progress=lambda share: shown.update(task, completed=share))
    text = show(report)
    deliver(console, text, (json, lambda: json_text(report.to_dict())), (html, lambda: as_html(text, draw(report))))


def show(r: LogReport) -> RenderableType:
    """The whole report, section by section."""
    read = ", ".join(f"{role} from `{name}`" if role != name else role for role, name in r.columns.items())
    parts: list[RenderableType] = [
        Text(f"{r.file}: {r.rows:,} completions, {r.tokens:,} tokens", style="bold"),
        Text(f"Read {read}.", style="dim"),
        *(Text(note, style="yellow") for note in r.notes),
        *_section("KL to the reference", _estimates(r.kl), _scalars(r.kl)),
    ]
    if any(name.startswith("ratio/") for name in r.kl.scalars):
        sampler = "behavior_logp" if "behavior_logp" in r.columns else "old_logp"
        parts += _section(f"Importance ratios, logp to {sampler}", _ratios(r.kl))
    if (of_cell := r.coefficients) is not None:
        title = f"Coefficients of {of_cell.cell.name}, compared with the sound terms"
        parts += _section(title, _coefficients(of_cell), _terms(of_cell))
    parts += _section("Trainer against sampler", *_mismatch(r))
    if "by" in r.columns:
        parts += _section(f"By {r.columns['by']}", _parts(r))
    parts += _section("What to change", *map(Text, r.advice))
    return Group(*parts)


def _section(title: str, *parts: RenderableType) -> list[RenderableType]:
    return ["", Text(title, style="bold"), *parts]


MEANINGS = {
    "kl/reverse/k1": "KL(π‖ref) by k1",
    "kl/reverse/k2": "KL(π‖ref) by k2 (biased)",
    "kl/reverse/k3": "KL(π‖ref) by k3",
    "kl/forward/k3": "KL(ref‖π) by k3",
    "kl/mismatch/k1": "KL(sampler‖trainer) by k1",
    "kl/mismatch/k2": "KL(sampler‖trainer) by k2 (biased)",
    "kl/mismatch/k3": "KL(sampler‖trainer) by k3",
    "kl/mismatch_of_trainer/k3": "KL(trainer‖sampler) by k3",
}
"""What the estimates of both reports mean, in the order of the tables."""


def _estimates(report: Report) -> Table:
    units = ("per_token", "per_sequence")
    named = [(name, text) for name, text in MEANINGS.items() if f"{name}/per_token" in report.estimates]
    rows = [[text, *(str(report.estimates[f"{name}/{unit}"]) for unit in units)] for name, text in named]
    return text_table(rows, ("", "per token", "per completion"), numbers=1)


PARTS = {
    "KL(π‖ref) by k3, per token": "kl/reverse/k3/per_token",
    "by k1, per completion": "kl/reverse/k1/per_sequence",
    "KL(sampler‖trainer) by k3, per token": "kl/mismatch/k3/per_token",
}
"""The estimates in the table of the parts, by its heads."""

LONGEST = 64
"""Characters of a label that are shown; JSON has it whole."""


def _parts(r: LogReport) -> Table:
    rows = []
    for part in r.parts:
        label = str(part.label)
        label = label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"
        estimates = part.kl.estimates | (part.mismatch.estimates if part.mismatch else {})
        cells = [str(estimates[name]) for name in PARTS.values() if name in estimates]
        if part.mismatch is not None:
            cells.append(f"{part.mismatch['ratio/sequence/effective_sample_size']:.1%}")
        rows.append([label, f"{part.rows:,}", f"{part.tokens / part.rows:.4g}", *cells])
    heads = (r.columns["by"], "completions", "tokens each", *PARTS, "effective sample size")
    return text_table(rows, heads if r.mismatch is not None else heads[:5], numbers=1)


SCALARS = {
    "length/mean": "tokens per completion, mean",
    "length/min": "fewest",
    "length/max": "most",
    "clamp/share_beyond_k3_value_10": "tokens beyond a clamp of k3 at 10",
    "clamp/share_beyond_k2_value_10": "tokens beyond a clamp of k2 at 10",
    "clamp/share_beyond_input_20": "tokens beyond |log π/ref| = 20",
    "log_ratio/abs_max": "largest |log π/ref|",
}


def _scalars(report: Report) -> Table:
    values = {name: float(report.scalars[name]) for name in SCALARS}
    rows = [(SCALARS[name], f"{x:.3%}" if "share" in name else f"{x:.4g}") for name, x in values.items()]
    return text_table(rows, ("", ""), numbers=1)


def _ratios(report: Report) -> Table:
    fields = ("mean", "quantile_0.01", "quantile_0.5", "quantile_0.99", "max", "effective_sample_size")
    rows = []
    for kind in ("token", "prefix", "sequence"):
        *numbers, left = (float(report.scalars[f"ratio/{kind}/{x}"]) for x in fields)
        rows.append([kind, *(f"{x:.4g}" for x in numbers), f"{left:.1%}"])
    return text_table(rows, ("", "mean", "1%", "50%", "99%", "max", "effective sample size"), numbers=1)


def _coefficients(compared: CoefficientComparison) -> Table:
    """One column per level. The terms are printed below, since they are wider than a terminal."""
    levels = compared.levels.values()
    rows = [
        ("relative difference", *(_number(c.relative_difference, percent=True) for c in levels)),
        ("correlation", *(_number(c.correlation) for c in levels)),
        ("nearest multiple of the sound one", *(_number(c.scale) for c in levels)),
        ("largest", *(f"{c.largest:.3g}" for c in levels)),
        ("largest of the sound ones", *(f"{c.largest_sound:.3g}" for c in levels)),
    ]
    return text_table(rows, ("", *(LEVELS[level] for level in compared.levels)), numbers=1)


LEVELS = {"token": "token by token", "sequence": "whole completions"}


def _terms(compared: CoefficientComparison) -> Text:
    on_policy, off_policy = compared.cell.descends
    sound = "".join(f"Sound, {LEVELS[level]}: {c.term}\n" for level, c in compared.levels.items())
    reason = f"{compared.explanation}\n" if compared.explanation else ""
    return Text(
        f"{sound}{reason}{compared.dead_share:.3%} of the tokens are in a dead zone. "
        f"It descends {on_policy} on-policy, {off_policy} off-policy."
    )


def _mismatch(r: LogReport) -> list[RenderableType]:
    if r.mismatch is None or r.cause is None:
        return [Text("Unknown: the file has no log-probs of the sampler (behavior_logp).", style="dim")]
    trainer = "old_logp" if "old_logp" in r.columns else "logp"
    outside = float(r.mismatch.scalars["ratio/token/share_outside_band"])
    left = float(r.mismatch.scalars["ratio/sequence/effective_sample_size"])
    ratios = (
        f"{trainer} to behavior_logp: {outside:.3%} of the token ratios are outside 0.5 to 2; "
        f"effective sample size {left:.1%} of the completions."
    )
    label = {"none": "", "unexplained": "No cause found. "}.get(r.cause.name, f"Likely cause: {r.cause.name}. ")
    style = "green" if r.cause.name == "none" else "bold yellow"
    return [_estimates(r.mismatch), Text(ratios), Text(label + r.cause.description, style=style)]


def _number(x: float, *, percent: bool = False) -> str:
    if x != x:
        return "none"
    return f"{x:.3f}" if not percent else f"{x:.1%}" if x < 10 else f"{x:.3g} x"


# `klgrad diagnose`.

FOUND = 1
"""The exit status with --check where a symptom was seen."""

NEVER_NEGATIVE = re.compile(r"\b(k2|k3|low_var_kl|mse|abs)\b|^trl grpo|^ms-swift loss_type")
"""In the name of an audited loss: the estimate that the run logs is a square, an absolute value or k3."""


def diagnose(
    runs: Annotated[
        list[Path],
        argument(
            "trainer_state.json, a folder with checkpoints or TensorBoard's event files, wandb's history as CSV "
            "or JSON, or JSON lines such as verl's file logger writes. Several runs are compared.",
            metavar="RUN",
        ),
    ],
    config: Annotated[
        list[Path] | None,
        option(
            "The run's configuration, as `klgrad advise --config` reads it: it decides between causes. Once for "
            "all runs, or once for each in their order.",
            metavar="FILE",
        ),
    ] = None,
    framework: Annotated[str | None, option("With --config: the framework, where the file does not tell.")] = None,
    beta: Annotated[
        list[float] | None, option("The coefficient of each run, in their order, without --config.")
    ] = None,
    kl: Annotated[str, option("The metric that is the KL.", metavar="NAME")] = "",
    json: JsonFile = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 if there is a symptom.")] = False,
) -> None:
    """Find what is wrong with the KL in a run's scalars: likely causes in order, what decides, and the cure.

    Nothing needs to be added to a run: what its trainer logs is read. A KL to the sampler is told from one to the
    reference, and a value that is not finite from one that was not logged.
    """
    from ..logs.diagnosis import RunConfiguration, diagnose as diagnose_logs, read_scalars

    if config and beta:
        raise SettingError("--config or --beta", "both", "leave --beta out: the files have it")
    logs = [log for path in runs for log in read_scalars(path)]
    if config:
        with stderr().status("Auditing"):
            configurations = [_configuration(path, framework) for path in config]
    else:
        configurations = [RunConfiguration(beta=value) for value in beta or []]
    diagnosis = diagnose_logs(logs, configurations, kl)
    deliver(beside(json), show_diagnosis(diagnosis), (json, lambda: json_text(diagnosis.to_dict())))
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


def show_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    """The whole report: each run, then what comparing them shows."""
    parts: list[RenderableType] = []
    for run in diagnosis.runs:
        title = Text(f"{run.log.name}: {run.log.form}", style="bold")
        parts += [*([""] if parts else []), title, *map(Text, run.lines)]
        parts += [line for seen in run.observations for line in _observation(seen)]
    if len(diagnosis.runs) > 1:
        parts += ["", Text("The runs compared", style="bold"), *map(Text, diagnosis.lines)]
        parts += [line for seen in diagnosis.compared for line in _observation(seen)]
    if not diagnosis.observations:
        parts += ["", Text("No symptom was seen.", style="green")]
    return Group(*parts)


def _observation(seen: Observation) -> list[RenderableType]:
    from ..logs.symptoms import threads_of

    parts: list[RenderableType] = ["", Text(seen.symptom.title, style="bold yellow"), Text(seen.evidence)]
    for i, (cause, settled) in enumerate(seen.causes, 1):
        parts.append(Text(f"  {i}. {cause.what}"))
        parts += [Text("     The configuration of this run says so.", style="bold")] * settled
        parts.append(Text(f"     decided by: {cause.decides.replace('`', '')}", style="cyan"))
        parts.append(Text(f"     cure: {cause.cure.replace('`', '')}"))
    if threads := threads_of(seen.symptom.name):
        parts.append(Text(f"  Seen in {', '.join(threads)}", style="dim"))
    return parts
