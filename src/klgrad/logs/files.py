"""The files that a user names: single ones, folders and patterns."""

import glob
from collections.abc import Sequence
from pathlib import Path

from .log_errors import LogError
from .read import READERS


def files_of(given: Sequence[Path]) -> list[Path]:
    """The log files, in the order in which they were named, those of a folder or a pattern by name; each once.

    Args:
        given: files, folders (all log files directly in them) and patterns with `*`, `?` or `[...]`.
    """
    found = [path for each in given for path in _expanded(each)]
    return list(dict.fromkeys(found))


def describe(given: Sequence[Path], files: Sequence[Path]) -> str:
    """What was read, for the head of a report."""
    if len(given) == 1:
        return str(given[0]) + (f" ({_count(len(files))})" if list(files) != list(given) else "")
    return f"{given[0]} and {len(given) - 1} more ({_count(len(files))})"


def _count(files: int) -> str:
    return f"{files} file{'s' * (files != 1)}"


def _expanded(path: Path) -> list[Path]:
    if path.is_dir():
        # A file whose name begins with a dot is still being written.
        inside = [x for x in path.iterdir() if x.suffix.lower() in READERS and not x.name.startswith(".")]
        return sorted(inside) or _refuse(f"{path}, a folder without any")
    if not path.exists() and glob.has_magic(str(path)):
        matching = [Path(x) for x in glob.glob(str(path), recursive=True)]
        return sorted(x for x in matching if x.is_file()) or _refuse(f"no file that matches {path}")
    return [path]


def _refuse(received: str) -> list[Path]:
    raise LogError(f"files that end in {', '.join(READERS)}", received, "check the path")
