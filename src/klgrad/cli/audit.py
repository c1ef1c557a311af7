"""`klgrad audit`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console
from rich.progress import track

from ..audit import AuditResult, Subject, audit, catalogue, load
from ..audit.report import to_json, to_markdown
from ..errors import UnknownNameError
from ..meaning import Verdict
from . import tables

PIPED_WIDTH = 160
"""Columns of the output where no terminal says how wide it is."""


class Advantages(StrEnum):
    """What a loss that asks for `advantages` receives."""

    zero = "zero"
    random = "random"


def _verdict(name: str) -> str:
    known = get_args(Verdict)
    name = name.replace("_", "-")
    if name not in known:
        raise UnknownNameError("verdict", name, known)
    return name


DIFFERS = f"verdict differs. One of: {', '.join(get_args(Verdict))}."


def command(
    losses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOSS]...",
            help="A name of the catalogue, `path/to/file.py:function` or `package.module:function`. "
            "None: the whole catalogue.",
            show_default=False,
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(metavar="VERDICT", parser=_verdict, help=f"Exit with status 1 if an on-policy {DIFFERS}"),
    ] = None,
    expect_off_policy: Annotated[
        str | None,
        typer.Option(metavar="VERDICT", parser=_verdict, help="The same for the off-policy verdict."),
    ] = None,
    advantages: Annotated[
        Advantages, typer.Option(help="What a loss that names `advantages` receives; random audits what ref adds.")
    ] = Advantages.zero,
    json: Annotated[Path | None, typer.Option(help="Write the results for programs.", show_default=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table for a document.", show_default=False)] = None,
) -> None:
    """Say which divergence a KL loss descends, by summing over every outcome of small problems.

    A loss of your own receives by keyword the tensors it names: `logp`, `ref_logp`, `old_logp`,
    `behavior_logp`, `mask`, `advantages`, all (B, T), `group` (B,), and returns a scalar or a (B, T) tensor.
    Its file is imported and run, as a test runner would.
    """
    torch.set_num_threads(1)  # the tensors are tiny; threads only wait for each other
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    subjects = [_find(name) for name in losses] if losses else list(catalogue().values())
    results = [
        audit(subject, advantages=advantages.value)
        for subject in track(subjects, "Auditing", console=Console(stderr=True), transient=True)
    ]
    if losses:
        for subject, result in zip(subjects, results, strict=True):
            console.print(tables.in_full(result, subject))
    else:
        console.print(tables.overview(results, console.width))
    for path, text in ((json, to_json), (markdown, to_markdown)):
        if path is not None:
            _write(path, text(results))
    _hold(console, results, expect, expect_off_policy)


def _find(name: str) -> Subject:
    known = catalogue()
    if name in known:
        return known[name]
    if ":" in name:
        return load(name)
    raise UnknownNameError("loss", name, known)


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _hold(console: Console, results: list[AuditResult], expect: str | None, expect_off_policy: str | None) -> None:
    failed = []
    for r in results:
        checks = (("on-policy", expect, r.verdict), ("off-policy", expect_off_policy, r.verdict_off_policy))
        failed += [
            f"{r.name}: expected {want} {where}, found {got}" for where, want, got in checks if want and want != got
        ]
    for line in failed:
        console.print(line, style="bold red", highlight=False)
    if failed:
        raise typer.Exit(1)
