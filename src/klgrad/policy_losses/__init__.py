"""Policy losses as published, by name: for study and for the audit of whole losses.

Each is one short function, written from the published formula, with its source and with what it does on samples of π
and on samples of another policy. A test compares these verdicts with the audit.
"""

from types import ModuleType

from ..errors import UnknownNameError
from . import published
from .published import (
    Does as Does,
    PolicyGradientName as PolicyGradientName,
    PolicyLoss as PolicyLoss,
    WholeVerdict as WholeVerdict,
)


def _entries_of(module: ModuleType) -> dict[str, PolicyLoss]:
    """The losses that the file defines, in its order."""
    return {entry.name: entry for entry in vars(module).values() if isinstance(entry, PolicyLoss)}


POLICY_LOSSES: dict[str, PolicyLoss] = _entries_of(published)
"""All entries by name."""


def get(name: str) -> PolicyLoss:
    """Look up a policy loss.

    Args:
        name: its name, such as `grpo`.

    Returns:
        The entry.

    Raises:
        UnknownNameError: with near matches.

    Example:
        >>> from klgrad import policy_losses
        >>> policy_losses.get("rloo").source
        'arXiv 2402.14740'
    """
    if name not in POLICY_LOSSES:
        raise UnknownNameError("policy loss", name, POLICY_LOSSES)
    return POLICY_LOSSES[name]
