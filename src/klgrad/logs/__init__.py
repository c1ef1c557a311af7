"""Examines the logs of a run: KL estimates, whether trainer and sampler agree, and the symptoms in its scalars."""

from typing import TYPE_CHECKING

from ..errors import LogError as LogError

if TYPE_CHECKING:
    from .examination import LogReport as LogReport, examine as examine


def __getattr__(name: str) -> object:
    """Import torch for rollouts only: scalar logs need none."""
    if name not in ("LogReport", "examine"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import examination

    return getattr(examination, name)
