"""`klgrad audit`."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import MeaningError, NotAuditableError, UnknownNameError
from ..frameworks import DEFAULTS, FRAMEWORKS, Recorded, recorded
from ..support import ARGUMENTS
from ..targets import TARGETS, Target
from .console import beside, deliver, first_lines, stderr, tracked

if TYPE_CHECKING:
    from ..audit import AuditResult, Subject
    from .losses import Failures


# The frameworks in `klgrad audit`: settings by name, and recorded tables of those that are not installed.


def framework_of(name: str) -> str:
    """The framework that a name is of: `trl`, or `trl rloo normalize_advantages=True`. Empty for other names."""
    first = name.split(" ")[0]
    return first if first in FRAMEWORKS else ""


def titles() -> dict[str, str]:
    """The heading of each framework's table, with the version that is audited."""
    return {name: framework.title for name, framework in FRAMEWORKS.items() if framework.version is not None}


def tags() -> dict[str, str]:
    """Words to show beside settings, by name: `default` beside the default of each framework."""
    return {default.subject: "default" for default in DEFAULTS.values()}


def settings_of(console: Console, names: Iterable[str], *, wanted: bool) -> list[Subject]:
    """The settings that these names mean: all those of a framework, or those with all words of the name.

    Args:
        console: where remarks on versions are printed.
        names: names of frameworks or of settings.
        wanted: whether a framework that cannot be audited is an error; it is a remark otherwise.

    Returns:
        The losses to audit.
    """
    subjects: list[Subject] = []
    for name in names:
        framework = FRAMEWORKS[framework_of(name)]
        try:
            every = {subject.name: subject for subject in framework.subjects()}
        except NotAuditableError as error:
            if wanted:
                raise
            console.print(str(error.received), style="yellow")
            continue
        if framework.remark:
            console.print(framework.remark, style="yellow")
        subjects += [every[each] for each in matching(name, list(every))]
    return subjects


def matching(name: str, settings: list[str]) -> list[str]:
    """The settings that a name means: the one of that name, or else all those that have all of its words."""
    name = " ".join(name.split())
    if name in settings:
        return [name]
    with_all = [each for each in settings if set(name.split(" ")) <= set(each.split(" "))]
    if not with_all:
        raise UnknownNameError(f"setting of {framework_of(name)}", name, settings)
    return with_all


def recorded_table(name: str) -> Group | None:
    """What the recorded audit says of a framework or setting; None if it can be audited here, or for other names."""
    known = _recorded(name)
    if known is None:
        return None
    return _dated(known, _table(known, matching(name, [row[0] for row in known.rows])))


def recorded_policy_losses(name: str) -> Group | None:
    """The same for the whole policy losses."""
    known = _recorded(name)
    if known is None or not known.policy_losses:
        return None
    from ..audit.policy_page import table_of

    shown = matching(name, [row[0] for row in known.policy_losses])
    return _dated(known, table_of([row for row in known.policy_losses if row[0] in shown]))


def _recorded(name: str) -> Recorded | None:
    framework = FRAMEWORKS.get(framework_of(name))
    return recorded(framework.name) if framework is not None and framework.version is None else None


def _dated(known: Recorded, table: RenderableType) -> Group:
    head = f"{known.framework} is not installed here: audited on {known.date} with version {known.version}."
    remedy = f"Install it to audit your own version: pip install {FRAMEWORKS[known.framework].distribution}"
    return Group(Text(head, style="bold"), table, "", Text(remedy, style="yellow"))


def _table(known: Recorded, shown: list[str]) -> Table:
    table = Table(*known.columns, box=None, padding=(0, 1), pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in known.rows:
        if row[0] in shown:
            tag = tags().get(row[0])
            table.add_row(f"{row[0]} ({tag})" if tag else row[0], *row[1:])
    return table


class Advantages(StrEnum):
    """The advantages that a loss receives if it takes `advantages`."""

    zero = "zero"
    random = "random"


class ExpectedParts(dict[str, str]):
    """Values of parts that are expected: `divergence=reverse-kl,horizon=all`."""


def _target(name: str) -> Target:
    for known, target in TARGETS.items():
        if name == known:
            return target
    raise UnknownNameError("verdict", name, TARGETS)


def _target_or_parts(text: str) -> Target | ExpectedParts:
    from ..audit.sentences import parse_parts

    return ExpectedParts(parse_parts(text)) if "=" in text else _target(text)


def _completed(start: str) -> list[str]:
    """Names of verdicts, for the shell."""
    return [name for name in TARGETS if name.startswith(start)]


def completed_framework(start: str) -> list[str]:
    """Names of frameworks, for the shell; those of the catalogue would need torch, and so seconds."""
    return [name for name in FRAMEWORKS if name.startswith(start)]


DIFFERS = f"verdict differs. One of: {', '.join(TARGETS)}."


def command(
    losses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOSS",
            help="A name of the catalogue, `path/to/file.py:function`, `package.module:function`, `path/to/file.py` "
            f"for every loss in it, a framework ({', '.join(FRAMEWORKS)}) or one of its settings, in quotation marks. "
            "None: the common losses of the catalogue.",
            show_default=False,
            autocompletion=completed_framework,
        ),
    ] = None,
    expect: Annotated[
        Any,
        typer.Option(
            metavar="VERDICT|PART=VALUE,...",
            parser=_target_or_parts,
            autocompletion=_completed,
            help="Exit with status 1 if a part differs, as in `divergence=reverse-kl,horizon=all`, or if an on-policy "
            f"{DIFFERS} With status 2 if anything of a whole file is skipped.",
        ),
    ] = None,
    expect_off_policy: Annotated[
        Target | None,
        typer.Option(
            metavar="VERDICT",
            parser=_target,
            autocompletion=_completed,
            help="The same for the off-policy verdict.",
        ),
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
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Take the whole policy loss apart: its ratio and weights, advantages, unit, drift and KL. "
            "Without a LOSS: the published policy losses.",
        ),
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A parameter of your own loss, such as `beta=0.04`; may be repeated.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARGUMENT=ROLE",
            help="What an argument of your own loss receives, such as `x=logp`, if its name does not tell; may be "
            f"repeated. Roles: {', '.join(ARGUMENTS)}.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print everything about each of several losses, and their table.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit with status 1 also for a verdict that holds in large batches only, a dead zone, a gradient "
            "that is not finite or wrong in float32, or one that masked gaps or empty completions change.",
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
    """Take a KL loss apart: which divergence it descends, how far it looks ahead, for which samples, in which unit.

    A loss of your own is a function, an `nn.Module`, a class or a method of one. It receives those tensors that its
    signature names, by the roles of `--name` or their names in TRL, verl or OpenRLHF; a parameter `batch` receives all
    of them as a dictionary. It returns a scalar, (B,), (B, T), `(loss, metrics)` or `{"loss": loss}`. Its file is
    imported and run, as a test runner would do.
    """
    import torch

    from ..audit import audit, catalogue
    from ..audit.call import parse_names, parse_settings
    from ..audit.subject import COMMON, imports_for
    from ..audit.terminal import to_json, to_markdown
    from .losses import Failures, find_losses

    torch.set_num_threads(1)  # the tensors are too small for threads to help
    gc.set_threshold(100_000)  # a framework has a million objects that stay
    settings = parse_settings(set_ or []) | parse_names(name or [])
    if whole:
        _refuse_with_whole(
            {"--strict": strict, "--all": all_, "--catalogue": whole_catalogue}
            | {"--advantages": advantages is not Advantages.zero}
            | {"--expect with parts": isinstance(expect, ExpectedParts)}
        )
        from .losses import check_whole, report_whole

        needed = any((expect, expect_off_policy, json, markdown, html, settings))  # a record cannot answer these
        results, failures = report_whole(losses or [], settings, json, markdown, html, recorded=not needed, full=full)
        differs = check_whole(results, expect, expect_off_policy)
        return _end(failures, len(results), expected=bool(expect or expect_off_policy), differs=differs)
    console, progress, failures = beside(json, markdown, html), stderr(), Failures()
    if losses and not any((expect, expect_off_policy, strict, json, markdown, html)):
        losses = [loss for loss in losses if not _show_recorded(console, loss)]
        if not losses and not all_:
            return None
    chosen = settings_of(console, FRAMEWORKS, wanted=False) if all_ else []
    chosen += find_losses(losses or [], settings, console, failures)
    if not losses and not all_:
        known = catalogue()
        chosen = list(known.values()) if whole_catalogue else [known[common] for common in COMMON]
    audited: list[tuple[Subject, AuditResult]] = []
    for subject in tracked(chosen, "Auditing", progress):
        with failures.collected(subject.name), first_lines(subject.name, progress), imports_for(subject.name):
            audited.append((subject, audit(subject, advantages=advantages.value)))
    if audited:
        subjects, results = [list(x) for x in zip(*audited, strict=True)]
        deliver(
            console,
            _report(losses or [], audited, console.width, expect, full=full, every=all_ or whole_catalogue),
            (json, lambda: failures.in_json(to_json(results))),
            (markdown, lambda: failures.in_markdown(to_markdown(results))),
            (html, lambda: _page(subjects, results, failures.reasons)),
        )
    differs = _check_expectations(console, [result for _, result in audited], expect, expect_off_policy, strict)
    return _end(failures, len(audited), expected=bool(expect or expect_off_policy or strict), differs=differs)


def _end(failures: Failures, audited: int, *, expected: bool, differs: bool) -> None:
    """Say what was not audited; exit with status 2 if that is an error, and else with 1 if a verdict differs."""
    failures.report(audited, expected=expected)
    if differs:
        raise typer.Exit(1)


def _refuse_with_whole(options: Mapping[str, object]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise MeaningError(
            "--whole with --json, --markdown, --html, --set, --name, --expect or --expect-off-policy",
            f"--whole {' '.join(given)}",
            "leave out the other options, or --whole",
        )


def _show_recorded(console: Console, name: str) -> bool:
    """Print the recorded audit of a framework that is not installed; False if there is none to print."""
    table = recorded_table(name)
    if table is not None:
        console.print(table)
    return table is not None


def _report(
    names: list[str], audited: list[tuple[Subject, AuditResult]], width: int, expect: object, *, full: bool, every: bool
) -> RenderableType:
    """Everything about one loss that was named, or a table of several; with `full` both for several."""
    from ..audit import catalogue, terminal as tables

    results = [result for _, result in audited]
    if not (names or every or full):
        more = f"{len(results)} of {len(catalogue())} losses: `klgrad audit --catalogue` audits them all."
        return Group(tables.by_standing(results, width), Text(more, style="dim"))
    parts = []
    if full or len(audited) == len(names) == 1:
        parts += [tables.in_full(result, subject, width) for subject, result in audited]
    if len(audited) > 1 or not parts:
        wanted = expect if isinstance(expect, ExpectedParts) else {}
        parts.append(tables.overview(results, width, titles=titles(), tags=tags(), wanted=wanted))
    return Group(*parts)


def _page(subjects: list[Subject], results: list[AuditResult], not_audited: Mapping[str, str]) -> str:
    from ..audit.page import to_html
    from .losses import fixes_for

    summaries = [subject.summary for subject in subjects]
    return to_html(results, summaries=summaries, fixes=fixes_for(subjects), tags=tags(), not_audited=not_audited)


def _check_expectations(
    console: Console,
    results: list[AuditResult],
    expect: Target | ExpectedParts | None,
    expect_off_policy: Target | None,
    strict: bool,
) -> bool:
    """Print what differs from the expectations; True if anything does."""
    from ..audit.advice import differences

    first = expect.name if isinstance(expect, Target) else expect
    wanted = (first, expect_off_policy and expect_off_policy.name)
    failed = [f"{r.name}: {difference}" for r in results for difference in differences(r, *wanted, strict=strict)]
    for line in failed:
        console.print(line, style="bold red", soft_wrap=True)
    return bool(failed)
