"""`klgrad audit`."""

import os
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console, Group
from rich.progress import track
from rich.text import Text

from ..adapters import FRAMEWORKS
from ..audit import AuditResult, Subject, audit, catalogue, load
from ..audit.curve import coefficient_curve
from ..audit.known_losses import COMMON
from ..audit.render import terminal as tables
from ..audit.render.page import to_html
from ..audit.render.plain import to_json, to_markdown
from ..audit.words import notes, small_batches
from ..errors import LossImportError, UnknownNameError
from ..targets import TARGETS, Target, Verdict
from .console import beside, deliver, stderr
from .fixes import fixes_for
from .frameworks import framework_of, recorded_table, settings_of, tags, titles
from .printed import first_lines


class Lengths(StrEnum):
    """The problems that a loss is audited on."""

    all = "all"
    equal = "equal"


class Advantages(StrEnum):
    """The advantages that a loss receives if it takes `advantages`."""

    zero = "zero"
    random = "random"


def _target(name: str) -> Target:
    for known, target in TARGETS.items():
        if name == known:
            return target
    raise UnknownNameError("verdict", name, TARGETS)


DIFFERS = f"verdict differs. One of: {', '.join(TARGETS)}."


def command(
    losses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOSS]...",
            help="A name of the catalogue, `path/to/file.py:function`, `package.module:function`, a framework "
            f"({', '.join(FRAMEWORKS)}) or one of its settings, in quotation marks. None: the common losses of the "
            "catalogue.",
            show_default=False,
        ),
    ] = None,
    expect: Annotated[
        Target | None,
        typer.Option(metavar="VERDICT", parser=_target, help=f"Exit with status 1 if an on-policy {DIFFERS}"),
    ] = None,
    expect_off_policy: Annotated[
        Target | None,
        typer.Option(metavar="VERDICT", parser=_target, help="The same for the off-policy verdict."),
    ] = None,
    whole_catalogue: Annotated[
        bool, typer.Option("--catalogue", help="Audit every loss of the catalogue, not only the common ones.")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="Audit every framework that is installed.")] = False,
    advantages: Annotated[
        Advantages,
        typer.Option(
            help="The advantages that the loss receives; `random` audits what the reference adds to the gradient."
        ),
    ] = Advantages.zero,
    lengths: Annotated[
        Lengths,
        typer.Option(
            help="`equal` leaves out the problems with varying lengths, for a loss that averages over tokens."
        ),
    ] = Lengths.all,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit with status 1 also for a verdict that holds in large batches only, a dead zone, or a gradient "
            "that is not finite.",
        ),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the results as JSON; `-` is standard output.", show_default=False)
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.", show_default=False)] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with curves, to read in a browser.", show_default=False)
    ] = None,
) -> None:
    """Find which divergence a KL loss descends, by summing over every outcome of small problems.

    A loss of your own receives as keyword arguments those tensors that its signature names: `logp`, `ref_logp`,
    `old_logp`, `behavior_logp`, `mask`, `advantages`, all (B, T), and `group` (B,). It returns a scalar or a (B, T)
    tensor. Its file is imported and run, as a test runner would do.
    """
    torch.set_num_threads(1)  # the tensors are too small for threads to help
    console, progress = beside(json, markdown, html), stderr()
    if losses and not any((expect, expect_off_policy, strict, json, markdown, html)):
        losses = [name for name in losses if not _show_recorded(console, name)]
        if not losses and not all_:
            return
    subjects = settings_of(console, FRAMEWORKS, wanted=False) if all_ else []
    for name in losses or []:
        subjects += settings_of(console, [name], wanted=True) if framework_of(name) else [_find(name)]
    if not losses and not all_:
        known = catalogue()
        subjects = list(known.values()) if whole_catalogue else [known[name] for name in COMMON]
    results = []
    for subject in track(subjects, "Auditing", console=progress, transient=True, disable=not progress.is_terminal):
        with first_lines(subject.name, progress):
            results.append(audit(subject, advantages=advantages.value, lengths=lengths.value))
    if losses and not all_ and not set(losses) & set(FRAMEWORKS):
        pairs = zip(results, subjects, strict=True)
        report = Group(*(tables.in_full(*pair, console.width) for pair in pairs))
    else:
        if losses or all_ or whole_catalogue:
            report = tables.overview(results, console.width, tags(), titles())
        else:
            more = f"{len(results)} of {len(catalogue())} losses: `klgrad audit --catalogue` audits them all."
            report = Group(tables.by_standing(results, console.width, tags()), Text(more, style="dim"))
    deliver(
        console,
        report,
        (json, lambda: to_json(results)),
        (markdown, lambda: to_markdown(results)),
        (html, lambda: _page(subjects, results)),
    )
    _check_expectations(console, results, expect, expect_off_policy, strict)


def _page(subjects: list[Subject], results: list[AuditResult]) -> str:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # what the losses print has been shown already
        curves = [coefficient_curve(subject) for subject in subjects]
    summaries = [subject.summary for subject in subjects]
    return to_html(results, curves, summaries=summaries, fixes=fixes_for(subjects), tags=tags())


def _show_recorded(console: Console, name: str) -> bool:
    """Print the recorded audit of a framework that is not installed; False if there is none to print."""
    table = recorded_table(name) if framework_of(name) else None
    if table is not None:
        console.print(table)
    return table is not None


def _find(name: str) -> Subject:
    known = catalogue()
    if name in known:
        return known[name]
    if ":" in name:
        with first_lines(name, stderr()):
            return load(name)
    if name.endswith(".py"):
        raise LossImportError("path/to/file.py:function", repr(name), "add ':' and the function's name")
    raise UnknownNameError("loss", name, [*known, *FRAMEWORKS])


def _check_expectations(
    console: Console,
    results: list[AuditResult],
    expect: Target | None,
    expect_off_policy: Target | None,
    strict: bool,
) -> None:
    """Print what differs from the expectations, and exit with status 1 if anything does."""
    failed = []
    on_policy: Verdict | None = expect and (expect.same_on_policy or expect.name)
    off_policy: Verdict | None = expect_off_policy and expect_off_policy.name
    for r in results:
        checks = (("on-policy", on_policy, r.verdict), ("off-policy", off_policy, r.verdict_off_policy))
        failed += [
            f"{r.name}: expected {want} {where}, found {got}" for where, want, got in checks if want and want != got
        ]
        if strict and r.holds == "large-batches":
            failed.append(f"{r.name}: {r.verdict} in large batches only, {small_batches(r)}")
        if strict and (r.dead_zone or not r.finite):
            failed.append(f"{r.name}: {', '.join(notes(r))}")
    for line in failed:
        console.print(line, style="bold red")
    if failed:
        raise typer.Exit(1)
