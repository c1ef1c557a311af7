"""Errors of a run. Each message says what was expected, what was received, and the remedy."""

from ..errors import KlgradError, ModelError as ModelError, RunError as RunError


class SettingError(KlgradError, ValueError):
    """A setting, on the command line or in a file, that cannot be used."""


class DataError(KlgradError, ValueError):
    """Prompts that cannot be trained on."""


class RewardError(KlgradError, RuntimeError):
    """A reward function that raised, or that returned something other than one finite number per completion."""
