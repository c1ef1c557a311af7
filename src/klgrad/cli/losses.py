"""Find the losses that `klgrad audit` was asked for, and go on where one of them fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ..adapters import FRAMEWORKS
from ..audit import Subject, catalogue, load_every
from ..audit.calling import OwnLoss, own_settings
from ..audit.every_loss import Found
from ..audit.loading import find
from ..audit.subject import as_subject
from ..errors import KlgradError, LossCallError, LossImportError, UnknownNameError
from .console import lines, stderr
from .frameworks import framework_of, settings_of
from .printed import first_lines

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
        found: the name and the error of each loss that could not be found or audited.
        skipped: name to reason.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, KlgradError]] = []
        self.skipped: dict[str, str] = {}

    @property
    def reasons(self) -> dict[str, str]:
        """Why each of them was not audited."""
        return self.skipped | {name: str(error) for name, error in self.found}

    @contextmanager
    def collected(self, name: str) -> Iterator[None]:
        """Keep an error of one loss, so that the others go on."""
        try:
            yield
        except KlgradError as error:
            self.found.append((name, error))

    def report(self, audited: int, *, expected: bool) -> None:
        """Print the failures and how many losses were audited; raise a single failure if it is all there is.

        Args:
            audited: the number of losses that were.
            expected: whether something is expected of every loss; then it is an error if one is skipped, too.

        Raises:
            typer.Exit: with status 2, after an error.
        """
        if len(self.found) == 1 and not audited and not self.skipped:
            raise self.found[0][1]
        for name, error in self.found:
            stderr().print(f"{name}: {type(error).__name__}: {error}", style="red", soft_wrap=True)
        if self.found or self.skipped:
            last = f"{audited} of {audited + len(self.reasons)} audited"
            unmet = expected and self.skipped
            stderr().print(f"{last}{UNMET if unmet else ''}", style="red" if unmet else None, soft_wrap=True)
        if self.found or (expected and self.skipped):
            raise typer.Exit(ERROR)


def find_losses(names: list[str], settings: dict[str, Any], console: Console, failures: Failures) -> list[Subject]:
    """The losses of all names.

    Args:
        names: of the catalogue, of frameworks, of functions in files or modules, or of whole files.
        settings: values of the losses' own parameters. Each loss gets those that it has; one that no loss has is an
            error.
        console: for remarks about frameworks.
        failures: collects what cannot be found, and what is skipped.

    Returns:
        The losses, in order.
    """
    found: list[Subject] = []
    messages = stderr()
    for name in names:
        loading = f"Loading {name}"  # and calling it, to see what it takes
        with failures.collected(name), first_lines(name, messages), lines(messages, lambda now=loading: now):
            subjects, skipped = _find(name, settings, console, alone=len(names) == 1)
            found += subjects
            for other, why in skipped.items():
                failures.skipped[f"{name}:{other}"] = why
                messages.print(f"{name}:{other} is not audited: {why}", style="dim", soft_wrap=True)
    taken = {s for subject in found if isinstance(subject.loss, OwnLoss) for s in subject.loss.settings}
    stray = [name for name in settings if name not in taken]
    if stray and found:
        raise LossCallError(
            "settings that are parameters of one of the losses",
            f"--set {', '.join(stray)}",
            "check the spelling; losses of the catalogue and of frameworks have no settings",
        )
    return found


def _find(name: str, settings: dict[str, Any], console: Console, *, alone: bool) -> Found:
    if framework_of(name):
        return Found(settings_of(console, [name], wanted=True), {})
    known = catalogue()
    if name in known:
        return Found([known[name]], {})
    if ":" in name:
        loss = find(name)
        return Found([as_subject(loss, name, settings if alone else own_settings(loss, settings))], {})
    if name.endswith(".py"):
        return load_every(name, settings)
    if Path(f"{name}.py").is_file():
        raise LossImportError("a name of the catalogue or of a framework, or a Python file", name, f"write {name}.py")
    raise UnknownNameError("loss", name, [*known, *FRAMEWORKS])
