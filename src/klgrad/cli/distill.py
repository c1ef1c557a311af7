"""`klgrad distill`."""

import typer

from .train_or_distill import SETTINGS, train_or_distill


def command(context: typer.Context) -> None:
    """Train a student towards its teacher, on the student's own completions, using TRL."""
    train_or_distill("distill", context.args)


__all__ = ["SETTINGS", "command"]
