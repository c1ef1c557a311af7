"""`klgrad audit`."""

from __future__ import annotations

import gc
import json as json_module
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..errors import (
    KlgradError,
    LossCallError,
    LossImportError,
    MeaningError,
    NotAuditableError,
    UnknownNameError,
)
from ..frameworks import DEFAULTS, FRAMEWORKS, recorded
from ..support import ARGUMENTS, Json
from ..targets import TARGETS, Target
from .console import beside, completing, deliver, first_lines, lines, stderr, tracked

if TYPE_CHECKING:
    from ..audit import AuditResult, Subject
    from ..audit.policy import PolicyResult
    from ..audit.subject import FileLosses
    from ..policy_losses import PolicyLoss


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

    A framework that cannot be audited is an error if it is `wanted`, and a remark on the console otherwise.
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


def recorded_table(name: str, *, whole: bool = False) -> Group | None:
    """What the recorded audit says of a framework or setting, or of its whole policy losses.

    None if it can be audited here, for other names, and where nothing is on record.
    """
    framework = FRAMEWORKS.get(framework_of(name))
    known = recorded(framework.name) if framework is not None and framework.version is None else None
    rows = [] if known is None else known.policy_losses if whole else known.rows
    if known is None or not rows:
        return None
    from ..audit.policy_sentences import COLUMNS
    from ..audit.terminal import CellTable

    shown = matching(name, [row[0] for row in rows])
    columns = COLUMNS if whole else known.columns
    named = [Text.assemble(row[0], (f" ({tag})", "bold") if (tag := tags().get(row[0])) else "") for row in rows]
    table = CellTable(columns, [[name, *row[1:]] for name, row in zip(named, rows, strict=True) if row[0] in shown])
    head = f"{known.framework} is not installed here: audited on {known.date} with version {known.version}."
    remedy = f"Install it to audit your own version: pip install {FRAMEWORKS[known.framework].distribution}"
    return Group(Text(head, style="bold"), table, "", Text(remedy, style="yellow"))


# Find the losses that `klgrad audit` was asked for, and go on where one of them fails.

ERROR = 2
"""The exit status if a loss fails."""

UNMET = (
    ", and all have to be where something is expected: name the losses, as FILE:FUNCTION, or begin the name of what is "
    "none with an underscore"
)
"""What is said of losses of a whole file that were skipped."""


S = TypeVar("S", bound="Subject | PolicyLoss")
R = TypeVar("R")


class Failures:
    """What was not audited: the losses that failed, and what of a whole file was skipped.

    Attributes:
        errors: the name and the error of each loss that could not be found or audited.
        skipped: name to reason.
    """

    def __init__(self) -> None:
        self.errors: list[tuple[str, KlgradError]] = []
        self.skipped: dict[str, str] = {}

    @property
    def reasons(self) -> dict[str, str]:
        """Why each of them was not audited."""
        return self.skipped | {name: str(error) for name, error in self.errors}

    @contextmanager
    def collected(self, name: str) -> Iterator[None]:
        """Keep an error of one loss, so that the others go on."""
        try:
            yield
        except KlgradError as error:
            self.errors.append((name, error))

    def collect(self, losses: Sequence[S], audit: Callable[[S], R]) -> list[tuple[S, R]]:
        """The losses that can be audited, with their results."""
        from ..audit.subject import imports_for

        progress = stderr()
        results: list[tuple[S, R]] = []
        for i, loss in enumerate(tracked(losses, "Auditing", progress), 1):
            now = f"Auditing {loss.name} ({i} of {len(losses)})"
            told = lines(progress, lambda now=now: now)
            with self.collected(loss.name), first_lines(loss.name, progress), told, imports_for(loss.name):
                results.append((loss, audit(loss)))
        return results

    def in_json(self, text: str) -> str:
        """Results as JSON with `not_audited`, if there is anything in it."""
        return (
            json_module.dumps(json_module.loads(text) | {"not_audited": self.reasons}, indent=2) + "\n"
            if self.reasons
            else text
        )

    def in_markdown(self, text: str) -> str:
        """A table in Markdown, with a list of what was not audited below it."""
        lines = [f"- `{name}`: {' '.join(why.split())}\n" for name, why in self.reasons.items()]
        return text + "\nNot audited:\n\n" + "".join(lines) if lines else text

    def report(self, audited: int, *, expected: bool, differs: bool) -> None:
        """Print the failures and how many losses were audited; raise a single failure if it is all there is.

        The exit status is 2 after an error, and else 1 if a verdict `differs`. If something is `expected` of every
        loss, it is an error if one is skipped, too.
        """
        if len(self.errors) == 1 and not audited and not self.skipped:
            raise self.errors[0][1]
        for name, error in self.errors:
            stderr().print(f"{name}: {type(error).__name__}: {error}", style="red", soft_wrap=True)
        if self.errors or self.skipped:
            last = f"{audited} of {audited + len(self.reasons)} audited"
            unmet = expected and self.skipped
            stderr().print(f"{last}{UNMET if unmet else ''}", style="red" if unmet else None, soft_wrap=True)
        if self.errors or (expected and self.skipped):
            raise typer.Exit(ERROR)
        if differs:
            raise typer.Exit(1)


def find_losses(names: list[str], settings: Json, console: Console, failures: Failures) -> list[Subject]:
    """The losses of all names: of the catalogue, of frameworks, of functions in files or modules, or of whole files.

    Each loss gets those of the settings that are its parameters; one that no loss has is an error.
    """
    from ..audit.call import UserLoss

    losses: list[Subject] = []
    messages = stderr()
    for name in names:
        with failures.collected(name), first_lines(name, messages):
            subjects, skipped = _find(name, settings, console, alone=len(names) == 1)
            losses += subjects
            for other, why in skipped.items():
                failures.skipped[f"{name}:{other}"] = why
                messages.print(f"{name}:{other} is not audited: {why}", style="dim", soft_wrap=True)
    taken = {s for loss in losses if isinstance(loss.loss, UserLoss) for s in loss.loss.settings}
    stray = [name for name in settings if name not in taken]
    if stray and losses:
        raise LossCallError(
            "settings and names that are parameters of one of the losses",
            ", ".join(stray),
            "check the spelling; losses of the catalogue and of frameworks have no settings",
        )
    return losses


def _find(name: str, settings: Json, console: Console, *, alone: bool) -> FileLosses:
    from ..audit import catalogue, load_every
    from ..audit.call import settings_for
    from ..audit.subject import FileLosses, as_subject, locate

    if framework_of(name):
        return FileLosses(settings_of(console, [name], wanted=True), {})
    if ":" in name:
        loss = locate(name)
        return FileLosses([as_subject(loss, name, settings if alone else settings_for(loss, settings))], {})
    if name.endswith(".py"):
        return load_every(name, settings)
    known = catalogue()
    if name in known:
        return FileLosses([known[name]], {})
    if Path(f"{name}.py").is_file():
        raise LossImportError("a name of the catalogue or of a framework, or a Python file", name, f"write {name}.py")
    raise UnknownNameError("loss", name, [*known, *FRAMEWORKS])


# The command.


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
            autocompletion=completing(lambda: FRAMEWORKS),  # names of the catalogue would need torch, and so seconds
        ),
    ] = None,
    expect: Annotated[
        Any,
        typer.Option(
            metavar="VERDICT|PART=VALUE,...",
            parser=_target_or_parts,
            autocompletion=completing(lambda: TARGETS),
            help="Exit with status 1 if a part differs, as in `divergence=reverse-kl,horizon=all`, or if an on-policy "
            f"{DIFFERS} With status 2 if anything of a whole file is skipped.",
        ),
    ] = None,
    expect_off_policy: Annotated[
        Target | None,
        typer.Option(
            metavar="VERDICT",
            parser=_target,
            autocompletion=completing(lambda: TARGETS),
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
    from ..audit.subject import COMMON
    from ..audit.terminal import to_json, to_markdown

    torch.set_num_threads(1)  # the tensors are too small for threads to help
    gc.set_threshold(100_000)  # a framework has a million objects that stay
    settings = parse_settings(set_ or []) | parse_names(name or [])
    if whole:
        options = {"--strict": strict, "--all": all_, "--catalogue": whole_catalogue}
        options |= {"--advantages": advantages is not Advantages.zero}
        options |= {"--expect with parts": isinstance(expect, ExpectedParts)}
        if refused := [option for option, value in options.items() if value]:
            raise MeaningError(
                "--whole with --json, --markdown, --html, --set, --name, --expect or --expect-off-policy",
                f"--whole {' '.join(refused)}",
                "leave out the other options, or --whole",
            )
        needed = any((expect, expect_off_policy, json, markdown, html, settings))  # a record cannot answer these
        results, failures = report_whole(losses or [], settings, json, markdown, html, use_record=not needed, full=full)
        differs = check_whole(results, expect, expect_off_policy)
        return failures.report(len(results), expected=bool(expect or expect_off_policy), differs=differs)
    console, failures = beside(json, markdown, html), Failures()
    if losses and not any((expect, expect_off_policy, strict, json, markdown, html)):
        tables = [recorded_table(loss) for loss in losses]
        for table in filter(None, tables):
            console.print(table)
        losses = [loss for loss, table in zip(losses, tables, strict=True) if table is None]
        if not losses and not all_:
            return None
    chosen = settings_of(console, FRAMEWORKS, wanted=False) if all_ else []
    chosen += find_losses(losses or [], settings, console, failures)
    if not losses and not all_:
        known = catalogue()
        chosen = list(known.values()) if whole_catalogue else [known[common] for common in COMMON]
    audited = failures.collect(chosen, lambda subject: audit(subject, advantages=advantages.value))
    if audited:
        subjects, results = [list(x) for x in zip(*audited, strict=True)]
        deliver(
            console,
            _report(losses or [], audited, expect, full=full, every=all_ or whole_catalogue),
            (json, lambda: failures.in_json(to_json(results))),
            (markdown, lambda: failures.in_markdown(to_markdown(results))),
            (html, lambda: _page(subjects, results, failures.reasons)),
        )
    differs = _check_expectations(console, audited, expect, expect_off_policy, strict)
    return failures.report(len(audited), expected=bool(expect or expect_off_policy or strict), differs=differs)


def _report(
    names: list[str], audited: list[tuple[Subject, AuditResult]], expect: object, *, full: bool, every: bool
) -> RenderableType:
    """Everything about one loss that was named, or a table of several; with `full` both for several."""
    from ..audit import catalogue, terminal as tables

    results = [result for _, result in audited]
    if not (names or every or full):
        more = f"{len(results)} of {len(catalogue())} losses: `klgrad audit --catalogue` audits them all."
        return Group(tables.overview(results), Text(more, style="dim"))
    parts = []
    if full or len(audited) == len(names) == 1:
        parts += [tables.in_full(result, subject) for subject, result in audited]
    if len(audited) > 1 or not parts:
        wanted = expect if isinstance(expect, ExpectedParts) else {}
        parts.append(tables.overview(results, titles=titles(), tags=tags(), wanted=wanted))
    return Group(*parts)


def _page(subjects: list[Subject], results: list[AuditResult], not_audited: dict[str, str]) -> str:
    from ..audit.page import to_html

    summaries = [subject.summary for subject in subjects]
    return to_html(results, summaries=summaries, tags=tags(), not_audited=not_audited)


def _check_expectations(
    console: Console,
    audited: list[tuple[Subject, AuditResult]],
    expect: Target | ExpectedParts | None,
    expect_off_policy: Target | None,
    strict: bool,
) -> bool:
    """Print what differs from the expectations; True if anything does."""
    from ..audit.advice import differences

    first = expect.name if isinstance(expect, Target) else expect
    wanted = (first, expect_off_policy and expect_off_policy.name)
    failed = [
        (subject, f"{result.name}: {difference}")
        for subject, result in audited
        for difference in differences(result, *wanted, strict=strict)
    ]
    for subject, line in failed:
        console.print(line, style="bold red", soft_wrap=True)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            console.out(_annotation(subject, line), highlight=False)
    return bool(failed)


def _annotation(subject: Subject, text: str) -> str:
    """A line by which a workflow of GitHub shows a text at the definition of the loss."""
    place = subject.place
    at = f"file={os.path.relpath(place[0])},line={place[1]}," if place else ""
    return f"::error {at}title=klgrad::{text.replace('%', '%25')}"


# `klgrad audit --whole`.


def report_whole(
    losses: list[str],
    settings: Json,
    json: Path | None,
    markdown: Path | None,
    html: Path | None,
    *,
    use_record: bool,
    full: bool,
) -> tuple[list[PolicyResult], Failures]:
    """Audit whole losses, without names all policy losses, and show what they do.

    With `use_record` the record of a framework that is not installed is shown instead.
    """
    from ..audit.page import policies_to_html
    from ..audit.policy import audit_whole
    from ..audit.policy_sentences import in_full, overview, to_markdown
    from ..audit.terminal import to_json
    from ..policy_losses import POLICY_LOSSES

    console, failures = beside(json, markdown, html), Failures()
    subjects: list[PolicyLoss | Subject] = []
    for name in losses or POLICY_LOSSES:
        if use_record and (table := recorded_table(name, whole=True)) is not None:
            console.print(table)
            continue
        with failures.collected(name):
            subjects += _find_whole(name, settings, failures)
    results = [result for _, result in failures.collect(subjects, audit_whole)]
    if results:
        alone = len(results) == len(losses) == 1
        tables = [in_full(r) for r in results if full or alone] + [overview(results)] * (not alone)
        deliver(
            console,
            Group(*tables),
            (json, lambda: failures.in_json(to_json(results))),
            (markdown, lambda: failures.in_markdown(to_markdown(results))),
            (html, lambda: policies_to_html(results, failures.reasons)),
        )
    return results, failures


def _find_whole(name: str, settings: Json, failures: Failures) -> Sequence[PolicyLoss | Subject]:
    from ..audit import catalogue
    from ..policy_losses import POLICY_LOSSES

    if name in POLICY_LOSSES:
        return [POLICY_LOSSES[name]]
    if framework_of(name):
        every = {subject.name: subject for subject in FRAMEWORKS[framework_of(name)].policy_losses()}
        return [every[each] for each in matching(name, list(every))]
    if name in catalogue() or ":" in name or name.endswith(".py"):
        return find_losses([name], settings, stderr(), failures)
    raise UnknownNameError("policy loss", name, [*POLICY_LOSSES, *FRAMEWORKS])


def check_whole(results: list[PolicyResult], expect: Target | None, expect_off_policy: Target | None) -> bool:
    """Print where the KL of a whole loss is not the expected one; True if there is one."""
    failed = [
        f"{r.name}: expected {want.name} {where}, found {got}"
        for r in results
        for where, want, got in (
            ("on-policy", expect, r.kl_verdict),
            ("off-policy", expect_off_policy, r.kl_verdict_off_policy),
        )
        if want and want.name != got
    ]
    for line in failed:
        stderr().print(line, style="bold red")
    return bool(failed)
