"""Files that are whole or not there, and JSON that is JSON."""

import glob
import math
import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import OutputError

STDOUT = Path("-")
"""The usual name of standard output among a command's arguments."""
STDOUT_PATHS = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def partial_of(path: Path) -> Path:
    """Where this process writes a file before it is whole: beside what the path points to."""
    target = Path(os.path.realpath(path))
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


def partials_of(path: Path) -> list[Path]:
    """What processes that were killed have left of a file."""
    target = Path(os.path.realpath(path))
    return list(target.parent.glob(f".{glob.escape(target.name)}.*.partial"))


def ensure_folder(path: Path) -> None:
    """Make the folder, or say why not: before the work, not after it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("a folder that can be written", f"{path}: {error.strerror}", "give another path") from error


def is_stdout(path: Path | None) -> bool:
    """Whether a path that a user named is standard output: `-`, or the file system's name for it."""
    return path == STDOUT or (path is not None and os.path.abspath(path) in STDOUT_PATHS)


def write_output(path: Path, content: str | bytes) -> None:
    """Write to a path that a user named; `-` is standard output, in UTF-8 like every file."""
    if not is_stdout(path):
        write_whole(path, content)
        return
    if sys.stdout is None:
        raise OutputError("standard output that is open", "a closed one", "name a file")
    sys.stdout.flush()  # what was printed before comes first
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:  # a notebook's, for one, takes text alone
        sys.stdout.write(content if isinstance(content, str) else content.decode("utf-8", "backslashreplace"))
    else:
        # The command's own stream names the errors of a closed pipe or a full disk.
        write = getattr(sys.stdout, "write_bytes", binary.write)
        write(_encoded(content))
    sys.stdout.flush()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside the file, then move into place: a reader or an interruption never sees half of it.

    A symbolic link stays, and what it points to is replaced, with the permissions that it has. What is not a regular
    file (a pipe, a device, an open descriptor) cannot be replaced and is written to.
    """
    try:
        found = _stat(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise OutputError("a file that can be written", f"{path}, which is a folder", "name a file in it")
        if found is not None and (not stat.S_ISREG(found.st_mode) or _is_descriptor(path)):
            with path.open("ab") as file:  # what an open file holds already is not cut off
                file.write(_encoded(content))
        else:
            _replace(Path(os.path.realpath(path)), _encoded(content), found)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError("a file that can be written", f"{path}: {error.strerror}", "give another path") from error


def _encoded(content: str | bytes) -> bytes:
    """UTF-8; what it cannot hold (bytes of a file's name that are no text) is escaped as in JSON."""
    return content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_descriptor(path: Path) -> bool:
    """Whether the path, or a link on its way, names an open descriptor (`/dev/fd/5`); its file must stay the same."""
    while True:
        folder = os.path.realpath(path.parent)
        if folder == "/dev/fd" or re.fullmatch(r"/proc/\d+(/task/\d+)?/fd", folder):
            return True
        if not path.is_symlink():
            return False
        path = Path(folder, os.readlink(path))


def _replace(target: Path, content: bytes, found: os.stat_result | None) -> None:
    if found is not None and not os.access(target, os.W_OK):
        raise PermissionError(None, "Permission denied")  # a replacement would not ask
    partial = partial_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb", opener=lambda p, flags: os.open(p, flags, 0o666 if found is None else 0o600)) as file:
            file.write(content)
        if found is not None:
            with suppress(OSError, AttributeError):  # only root may give a file to somebody else
                os.chown(partial, found.st_uid, found.st_gid)
            os.chmod(partial, stat.S_IMODE(found.st_mode))
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):  # where no file can be written, perhaps none can be looked for
            partial.unlink(missing_ok=True)
        raise


def finite(data: Any) -> Any:
    """Plain data with null for what is not a finite number, which JSON does not have."""
    if isinstance(data, dict):
        return {k: finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
