"""The losses that `klgrad audit` is asked for, their fixes, and the audit of whole losses. It needs torch."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console, Group

from ..audit import Subject, catalogue, load_every
from ..audit.call import UserLoss, settings_for
from ..audit.page import Fix, Fixes
from ..audit.policy import PolicyResult, audit_whole
from ..audit.policy_page import in_full, overview, to_html, to_json, to_markdown
from ..audit.subject import FileLosses, as_subject, imports_for, locate
from ..errors import KlgradError, LossCallError, LossImportError, UnknownNameError
from ..frameworks import FRAMEWORKS, HOMES, SETTINGS
from ..frameworks.recommendation import TARGET_OF, Meaning, expresses
from ..policy_losses import POLICY_LOSSES, PolicyLoss
from ..support import Json
from ..targets import Target
from .audit import framework_of, matching, recorded_policy_losses, settings_of
from .console import beside, deliver, first_lines, lines, stderr, tracked

# Find the losses that `klgrad audit` was asked for, and go on where one of them fails.

ERROR = 2
"""The exit status if a loss fails."""

UNMET = (
    ", and all have to be where something is expected: name the losses, as FILE:FUNCTION, or begin the name of what is "
    "none with an underscore"
)
"""What is said of losses of a whole file that were skipped."""


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

    def in_json(self, text: str) -> str:
        """Results as JSON with `not_audited`, if there is anything in it."""
        return json.dumps(json.loads(text) | {"not_audited": self.reasons}, indent=2) + "\n" if self.reasons else text

    def in_markdown(self, text: str) -> str:
        """A table in Markdown, with a list of what was not audited below it."""
        lines = [f"- `{name}`: {' '.join(why.split())}\n" for name, why in self.reasons.items()]
        return text + "\nNot audited:\n\n" + "".join(lines) if lines else text

    def report(self, audited: int, *, expected: bool) -> None:
        """Print the failures and how many losses were audited; raise a single failure if it is all there is.

        Args:
            audited: the number of losses that were.
            expected: whether something is expected of every loss; then it is an error if one is skipped, too.

        Raises:
            typer.Exit: with status 2, after an error.
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


def find_losses(names: list[str], settings: Json, console: Console, failures: Failures) -> list[Subject]:
    """The losses of all names.

    Args:
        names: of the catalogue, of frameworks, of functions in files or modules, or of whole files.
        settings: values of the losses' own parameters, and roles. Each loss gets those that it has; one that no loss
            has is an error.
        console: for remarks about frameworks.
        failures: collects what cannot be found, and what is skipped.

    Returns:
        The losses, in order.
    """
    losses: list[Subject] = []
    messages = stderr()
    for name in names:
        loading = f"Loading {name}"  # and calling it, to see what it takes
        with failures.collected(name), first_lines(name, messages), lines(messages, lambda now=loading: now):
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


# The settings and code to write in each framework, for the HTML page of an audit.

MEANINGS: tuple[Meaning, ...] = (("reverse", "token"), ("reverse", "sequence"), ("forward", "token"))
"""The meanings with a panel on the page."""


def fixes_for(subjects: Sequence[Subject]) -> Fixes:
    """The settings and code for every framework among the subjects that there is advice for."""
    names = dict.fromkeys(subject.framework for subject in subjects)
    return {name: fixes_of(name) for name in names if name in SETTINGS}


def fixes_of(framework: str) -> list[Fix]:
    """A framework's settings by meaning; for the reverse KLs also code, if no setting is correct on all problems."""
    fixes = []
    for meaning in MEANINGS:
        setting, target = SETTINGS[framework].get(meaning), TARGET_OF[meaning]
        if setting is not None:
            fixes.append(Fix(target, setting.lines, *setting.descends, subject=setting.subject, note=setting.note))
        if meaning[0] == "reverse" and (setting is None or not expresses(setting, meaning, off_policy=False)):
            lines, place = HOMES[framework].lines(meaning, off_policy=False), HOMES[framework].place
            fixes.append(Fix(target, lines, target, "unknown", place=place))
    return fixes


# `klgrad audit --whole`.


def report_whole(
    losses: list[str],
    settings: Json,
    json: Path | None,
    markdown: Path | None,
    html: Path | None,
    *,
    recorded: bool,
    full: bool,
) -> tuple[list[PolicyResult], Failures]:
    """Audit whole losses and show what they do.

    Args:
        losses: names of policy losses, of frameworks, or as in `find_losses`; none of them for all policy losses.
        settings: values of the losses' own parameters.
        json: the file for JSON.
        markdown: the file for a table in Markdown.
        html: the file for a page with the curves of the weights.
        recorded: whether the record of a framework that is not installed may be shown instead.
        full: whether everything about each of several is printed.

    Returns:
        The results, and what was not audited.
    """
    console, progress, failures = beside(json, markdown, html), stderr(), Failures()
    subjects: list[PolicyLoss | Subject] = []
    for name in losses or POLICY_LOSSES:
        if recorded and (table := recorded_policy_losses(name)) is not None:
            console.print(table)
            continue
        with failures.collected(name):
            subjects += _found(name, settings, failures)
    results: list[PolicyResult] = []
    for subject in tracked(subjects, "Auditing", progress):
        with failures.collected(subject.name), first_lines(subject.name, progress), imports_for(subject.name):
            results.append(audit_whole(subject))
    if results:
        alone = len(results) == len(losses) == 1
        tables = [in_full(r) for r in results if full or alone] + [overview(results)] * (not alone)
        deliver(
            console,
            Group(*tables),
            (json, lambda: failures.in_json(to_json(results))),
            (markdown, lambda: failures.in_markdown(to_markdown(results))),
            (html, lambda: to_html(results, failures.reasons)),
        )
    return results, failures


def _found(name: str, settings: Json, failures: Failures) -> Sequence[PolicyLoss | Subject]:
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
