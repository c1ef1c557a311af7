"""`klgrad train`."""

import typer

from .train_or_distill import SETTINGS, train_or_distill


def command(context: typer.Context) -> None:
    """Train a model with rewards, under the KL that was meant, on TRL."""
    train_or_distill("train", context.args)


__all__ = ["SETTINGS", "command"]
