"""`klgrad audit --whole`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group

from ..adapters import FRAMEWORKS
from ..audit import Subject, catalogue
from ..audit.loading import imports_for
from ..audit.whole import WholeResult, audit_whole
from ..audit.whole.render import in_full, overview, to_json, to_markdown
from ..errors import UnknownNameError
from ..policy_losses import POLICY_LOSSES, PolicyLoss
from ..targets import Target
from .console import beside, deliver, stderr, tracked
from .frameworks import framework_of, matching, recorded_policy_losses
from .losses import Failures, find_losses
from .printed import first_lines


def report_whole(
    losses: list[str], settings: dict[str, Any], json: Path | None, markdown: Path | None, *, recorded: bool
) -> tuple[list[WholeResult], Failures]:
    """Audit whole losses and show what they do.

    Args:
        losses: names of policy losses, of frameworks, or as in `find_losses`; none of them for all policy losses.
        settings: values of the losses' own parameters.
        json: the file for JSON.
        markdown: the file for a table in Markdown.
        recorded: whether the record of a framework that is not installed may be shown instead.

    Returns:
        The results, and what was not audited.
    """
    console, progress, failures = beside(json, markdown), stderr(), Failures()
    subjects: list[PolicyLoss | Subject] = []
    for name in losses or POLICY_LOSSES:
        if recorded and (table := recorded_policy_losses(name)) is not None:
            console.print(table)
            continue
        with failures.collected(name):
            subjects += _found(name, settings, failures)
    results: list[WholeResult] = []
    for subject in tracked(subjects, "Auditing", progress):
        with failures.collected(subject.name), first_lines(subject.name, progress), imports_for(subject.name):
            results.append(audit_whole(subject))
    if results:
        few = len(results) <= len(losses)
        report = Group(*map(in_full, results)) if few else overview(results)
        deliver(console, report, (json, lambda: to_json(results)), (markdown, lambda: to_markdown(results)))
    return results, failures


def _found(name: str, settings: dict[str, Any], failures: Failures) -> Sequence[PolicyLoss | Subject]:
    if name in POLICY_LOSSES:
        return [POLICY_LOSSES[name]]
    if framework_of(name):
        every = {subject.name: subject for subject in FRAMEWORKS[framework_of(name)].policy_losses()}
        return [every[each] for each in matching(name, list(every))]
    if name in catalogue() or ":" in name or name.endswith(".py"):
        return find_losses([name], settings, stderr(), failures)
    raise UnknownNameError("policy loss", name, [*POLICY_LOSSES, *FRAMEWORKS])


def check_whole(results: list[WholeResult], expect: Target | None, expect_off_policy: Target | None) -> bool:
    """Print where the KL of a whole loss is not the expected one; True if there is one."""
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
    return bool(failed)
