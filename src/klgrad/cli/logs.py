"""`klgrad logs`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..support import text_table
from .console import bar, beside, deliver, lines, stderr

if TYPE_CHECKING:
    from rich.table import Table

    from ..logs import LogReport
    from ..logs.log_report import CoefficientComparison
    from ..logs.mismatch import Cause
    from ..reports import Report


def command(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Parquet, JSONL or NPZ, with per-token log-probs; folders and patterns too.", show_default=False
        ),
    ],
    cell: Annotated[
        str | None,
        typer.Option(
            help="The KL loss in use, by its name in `klgrad audit`; k3-loss is assumed without.", show_default=False
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=NAME",
            help="The name of a column that is not recognised. Roles: logp, ref_logp, old_logp, behavior_logp, mask, "
            "group. `ROLE=` leaves an optional column out.",
            show_default=False,
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A column with one value per completion, such as `step`: report each value too.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report as a page, with figures if there is `--by`.", show_default=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the report as JSON; `-` is standard output.", show_default=False)
    ] = None,
) -> None:
    """Report the KL of a run from its logged log-probs, with standard errors, and the coefficients of its KL loss.

    The file has one row per completion, with lists `logp` and `ref_logp`, and optionally `behavior_logp` (of the
    sampler), `old_logp` and `mask`. The names of TRL, verl, OpenRLHF, prime-rl and others are recognised. Each file is
    read once. `KLCallback(log_rollouts=FOLDER)` of `klgrad.trl` writes such files.
    """
    import torch

    from ..logs.log_report import to_html, to_json
    from ..logs.reader import parse_choices

    # A batch fits into the cache of one core, so more threads would not help.
    torch.set_num_threads(1)
    chosen = parse_choices(column or [])
    console = beside(json, html)
    report = _examine(files, cell, chosen, by, stderr())
    deliver(console, show(report), (json, lambda: to_json(report)), (html, lambda: to_html(report)))


def _examine(
    files: list[Path], cell: str | None, chosen: dict[str, str], by: str | None, console: Console
) -> LogReport:
    from ..logs.examination import examine

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    title, share = f"Reading {files[0].name}", ""

    def update(done: float, total: float) -> None:
        nonlocal share
        share = f": {done / total:.0%}" if total else ""
        shown.update(task, completed=done, total=total)

    with bar(*columns, console=console) as shown, lines(console, lambda: f"{title}{share}"):
        task = shown.add_task(title, total=None)
        return examine(files, cell, chosen, by=by, progress=update)


def show(r: LogReport) -> RenderableType:
    """The whole report, section by section."""
    read = ", ".join(f"{role} from `{name}`" if role != name else role for role, name in r.columns.items())
    parts: list[RenderableType] = [
        Text(f"{r.file}: {r.rows:,} completions, {r.tokens:,} tokens", style="bold"),
        Text(f"Read {read}.", style="dim"),
        *(Text(note, style="yellow") for note in r.notes),
        *_section("KL to the reference", _estimates(r.kl), _scalars(r.kl, ("length", "clamp", "log_ratio"))),
    ]
    if any(name.startswith("ratio/") for name in r.kl.scalars):
        sampler = "behavior_logp" if "behavior_logp" in r.columns else "old_logp"
        parts += _section(f"Importance ratios, logp to {sampler}", _ratios(r.kl))
    parts += _section(f"Coefficients of {r.cell.name}, compared with the sound terms", _coefficients(r), _dead(r))
    parts += _section("Trainer against sampler", *_mismatch(r))
    if "by" in r.columns:
        parts += _section(f"By {r.columns['by']}", _parts(r))
    parts += _section("What to change", *(Text(sentence) for sentence in r.advice))
    return Group(*parts)


def _section(title: str, *parts: RenderableType) -> list[RenderableType]:
    return ["", Text(title, style="bold"), *parts]


def _estimates(report: Report) -> Table:
    from ..logs.log_report import estimate_rows

    return text_table(estimate_rows(report), ("", "per token", "per completion"), numbers=1)


def _parts(r: LogReport) -> Table:
    from ..logs.log_report import part_heads, part_rows

    return text_table(part_rows(r), part_heads(r), numbers=1)


SCALARS = {
    "length/mean": "tokens per completion, mean",
    "length/min": "fewest",
    "length/max": "most",
    "clamp/share_beyond_k3_value_10": "tokens beyond a clamp of k3 at 10",
    "clamp/share_beyond_k2_value_10": "tokens beyond a clamp of k2 at 10",
    "clamp/share_beyond_input_20": "tokens beyond |log π/ref| = 20",
    "log_ratio/abs_max": "largest |log π/ref|",
}


def _scalars(report: Report, prefixes: tuple[str, ...]) -> Table:
    scalars = {name: float(x) for name, x in report.scalars.items() if name.startswith(prefixes)}
    rows = [(SCALARS[name], f"{x:.3%}" if "share" in name else f"{x:.4g}") for name, x in scalars.items()]
    return text_table(rows, ("", ""), numbers=1)


def _ratios(report: Report) -> Table:
    rows = []
    for kind in ("token", "prefix", "sequence"):
        if f"ratio/{kind}/mean" in report.scalars:
            numbers = [float(report.scalars[f"ratio/{kind}/{x}"]) for x in RATIO_FIELDS]
            rows.append([kind, *(f"{x:.4g}" for x in numbers[:-1]), f"{numbers[-1]:.1%}"])
    return text_table(rows, ("", "mean", "1%", "50%", "99%", "max", "effective sample size"), numbers=1)


RATIO_FIELDS = ("mean", "quantile_0.01", "quantile_0.5", "quantile_0.99", "max", "effective_sample_size")


def _coefficients(r: LogReport) -> Table:
    """One column per level. The terms are printed below, since they are wider than a terminal."""
    rows = [[name, *(number(c) for c in r.comparisons.values())] for name, number in NUMBERS.items()]
    return text_table(rows, ("", *(LEVELS[level] for level in r.comparisons)), numbers=1)


LEVELS = {"token": "token by token", "sequence": "whole completions"}

NUMBERS: dict[str, Callable[[CoefficientComparison], str]] = {
    "relative difference": lambda c: _number(c.relative_difference, percent=True),
    "correlation": lambda c: _number(c.correlation),
    "nearest multiple of the sound one": lambda c: _number(c.scale),
    "largest": lambda c: f"{c.largest:.3g}",
    "largest of the sound ones": lambda c: f"{c.largest_sound:.3g}",
}


def _dead(r: LogReport) -> Text:
    on_policy, off_policy = r.cell.descends
    sound = "".join(f"Sound, {LEVELS[level]}: {c.term}\n" for level, c in r.comparisons.items())
    reason = f"{r.explanation}\n" if r.explanation else ""
    return Text(
        f"{sound}{reason}{r.dead_share:.3%} of the tokens are in a dead zone. "
        f"It descends {on_policy} on-policy, {off_policy} off-policy."
    )


def _mismatch(r: LogReport) -> list[RenderableType]:
    if r.mismatch is None or r.cause is None:
        return [Text("Unknown: the file has no log-probs of the sampler (behavior_logp).", style="dim")]
    parts: list[RenderableType] = [_estimates(r.mismatch)]
    trainer = "old_logp" if "old_logp" in r.columns else "logp"
    outside = float(r.mismatch.scalars["ratio/token/share_outside_band"])
    left = float(r.mismatch.scalars["ratio/sequence/effective_sample_size"])
    parts.append(
        Text(
            f"{trainer} to behavior_logp: {outside:.3%} of the token ratios are outside 0.5 to 2; "
            f"effective sample size {left:.1%} of the completions."
        )
    )
    parts.append(
        Text(_label(r.cause) + r.cause.description, style="green" if r.cause.name == "none" else "bold yellow")
    )
    return parts


def _label(cause: Cause) -> str:
    if cause.name in ("none", "unexplained"):
        return "" if cause.name == "none" else "No cause found. "
    return f"One cause of several: {cause.name}. " if cause.alone is False else f"Likely cause: {cause.name}. "


def _number(x: float, *, percent: bool = False) -> str:
    if x != x:
        return "none"
    return f"{x:.3f}" if not percent else f"{x:.1%}" if x < 10 else f"{x:.3g} x"
