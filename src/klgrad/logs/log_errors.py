"""The error that reading a log raises."""

from ..errors import KlgradError


class LogError(KlgradError, ValueError):
    """A log cannot be read, or a row cannot be a sampled completion. The message names the file or the row.

    Example:
        >>> from pathlib import Path
        >>> from klgrad.logs import LogError, examine
        >>> try:
        ...     examine(Path("missing.parquet"))
        ... except LogError as error:
        ...     print(error.expected, "/", error.received)
        an existing file or folder / missing.parquet
    """
