"""Files that are whole or not there, and JSON that is JSON."""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import OutputError


def partial_of(path: Path) -> Path:
    """Where a file stands while it is written."""
    return path.with_name(f".{path.name}.partial")


def ensure_folder(path: Path) -> None:
    """Make the folder, or say why not: before the work, not after it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("a folder that can be written", f"{path}: {error.strerror}", "give another path") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside the file, then move into place: a reader or an interruption never sees half of it."""
    partial = partial_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):  # where no file can be written, perhaps none can be looked for
            partial.unlink(missing_ok=True)
        raise OutputError("a file that can be written", f"{path}: {error.strerror}", "give another path") from error


def finite(data: Any) -> Any:
    """Plain data with null for what is not a finite number, which JSON does not have."""
    if isinstance(data, dict):
        return {k: finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
