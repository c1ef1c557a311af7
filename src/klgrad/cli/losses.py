"""Find the losses that `klgrad audit` was asked for, and go on where one of them fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from ..adapters import FRAMEWORKS
from ..audit import Subject, catalogue, load_every
from ..audit.calling import OwnLoss, own_settings
from ..audit.every_loss import Found
from ..audit.loading import find
from ..audit.subject import as_subject
from ..errors import KlgradError, LossCallError, UnknownNameError
from .console import stderr
from .frameworks import framework_of, settings_of
from .printed import first_lines

ERROR = 2
"""The exit status if a loss fails."""


class Failures:
    """The losses that could not be found or audited."""

    def __init__(self) -> None:
        self.found: list[tuple[str, KlgradError]] = []

    @contextmanager
    def collected(self, name: str) -> Iterator[None]:
        """Keep an error of one loss, so that the others go on."""
        try:
            yield
        except KlgradError as error:
            self.found.append((name, error))

    def report(self, *, others: bool) -> None:
        """Print the failures and exit with status 2, if there are any; raise a single one without `others`."""
        if len(self.found) == 1 and not others:
            raise self.found[0][1]
        for name, error in self.found:
            stderr().print(f"{name}: {type(error).__name__}: {error}", style="red", soft_wrap=True)
        if self.found:
            raise typer.Exit(ERROR)


def find_losses(names: list[str], settings: dict[str, Any], console: Console, failures: Failures) -> list[Subject]:
    """The losses of all names.

    Args:
        names: of the catalogue, of frameworks, of functions in files or modules, or of whole files.
        settings: values of the losses' own parameters. Each loss gets those that it has; one that no loss has is an
            error.
        console: for remarks about frameworks.
        failures: collects what cannot be found.

    Returns:
        The losses, in order.
    """
    found: list[Subject] = []
    messages = stderr()
    for name in names:
        with failures.collected(name), first_lines(name, messages):
            subjects, skipped = _find(name, settings, console, alone=len(names) == 1)
            found += subjects
            for other, why in skipped.items():
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
    raise UnknownNameError("loss", name, [*known, *FRAMEWORKS])
