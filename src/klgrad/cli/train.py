"""`klgrad train`."""

import typer

from .train_or_distill import SETTINGS, train_or_distill


def command(context: typer.Context) -> None:
    """Train a model on rewards with a declared KL term, using TRL."""
    train_or_distill("train", context.args)


__all__ = ["SETTINGS", "command"]
