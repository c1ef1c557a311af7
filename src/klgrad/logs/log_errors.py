"""The error of everything that reads a log."""

from ..errors import KlgradError


class LogError(KlgradError, ValueError):
    """A log that cannot be read, or whose rows cannot be sampled completions; it names the row."""
