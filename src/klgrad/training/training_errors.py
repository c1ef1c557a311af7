"""What can be wrong with a run, each an error that says what to do."""

from ..errors import KlgradError


class SettingError(KlgradError, ValueError):
    """A setting, on the command line or in a file, that cannot be used."""


class ModelError(KlgradError, OSError):
    """A model that cannot be found or loaded."""


class DataError(KlgradError, ValueError):
    """Prompts that cannot be trained on."""


class RewardError(KlgradError, RuntimeError):
    """A reward function that raised, or gave something that is no reward."""


class RunError(KlgradError, OSError):
    """A run's folder that cannot be written to, gone on with, or read."""
