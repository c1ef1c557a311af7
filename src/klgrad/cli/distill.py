"""`klgrad distill`."""

import typer

from .train_or_distill import SETTINGS, train_or_distill


def command(context: typer.Context) -> None:
    """Bring a student near its teacher, on the student's own completions, on TRL."""
    train_or_distill("distill", context.args)


__all__ = ["SETTINGS", "command"]
