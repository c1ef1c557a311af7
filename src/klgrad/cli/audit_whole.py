"""`klgrad audit --whole`."""

from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Group
from rich.progress import track

from ..adapters import FRAMEWORKS
from ..audit import Subject
from ..audit.whole import WholeResult, audit_whole
from ..audit.whole.render import in_full, overview, to_json, to_markdown
from ..errors import UnknownNameError
from ..policy_losses import POLICY_LOSSES, PolicyLoss
from ..targets import Target
from .console import beside, deliver, stderr
from .printed import first_lines


def report_whole(
    losses: list[str], find: Callable[[str], list[Subject]], json: Path | None, markdown: Path | None
) -> list[WholeResult]:
    """Audit whole losses and show what they do.

    Args:
        losses: names of policy losses, or whatever `find` knows; none of them for all policy losses.
        find: the losses behind a name that is not one of a policy loss.
        json: the file for JSON.
        markdown: the file for a table in Markdown.

    Returns:
        The results.
    """
    subjects: list[PolicyLoss | Subject] = []
    for name in losses or POLICY_LOSSES:
        subjects += [POLICY_LOSSES[name]] if name in POLICY_LOSSES else _found(name, find)
    console, progress = beside(json, markdown), stderr()
    results = []
    for subject in track(subjects, "Auditing", console=progress, transient=True, disable=not progress.is_terminal):
        with first_lines(subject.name, progress):
            results.append(audit_whole(subject))
    few = len(results) == len(losses)
    report = Group(*map(in_full, results)) if few else overview(results)
    deliver(console, report, (json, lambda: to_json(results)), (markdown, lambda: to_markdown(results)))
    return results


def _found(name: str, find: Callable[[str], list[Subject]]) -> list[Subject]:
    """The losses behind a name; if there are none, the error lists the policy losses."""
    framework = FRAMEWORKS.get(name)
    if framework:
        return framework.policy_losses()
    try:
        return find(name)
    except UnknownNameError as error:
        if ":" in name:
            raise
        raise UnknownNameError("policy loss", name, [*POLICY_LOSSES, *FRAMEWORKS]) from error


def check_whole(results: list[WholeResult], expect: Target | None, expect_off_policy: Target | None) -> None:
    """Exit with status 1 if the KL of a whole loss is not the expected one."""
    failed = [
        f"{r.name}: expected {want.name} {where}, found {got}"
        for r in results
        for where, want, got in (
            ("on-policy", expect, r.on_policy.kl),
            ("off-policy", expect_off_policy, r.off_policy.kl),
        )
        if want and want.name != got
    ]
    for line in failed:
        stderr().print(line, style="bold red")
    if failed:
        raise typer.Exit(1)
