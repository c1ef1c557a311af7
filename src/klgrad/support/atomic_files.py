"""Write files completely or not at all, and make data valid JSON."""

import glob
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import OutputError

STDOUT = Path("-")
"""The conventional name of standard output in a command's arguments."""
STDOUT_PATHS = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def _partial_of(target: Path) -> Path:
    """A new temporary file of this process beside a file. Nobody can foresee its name, and put a link there."""
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(8)}.partial")


def partials_of(path: Path, processes: Iterable[int]) -> list[Path]:
    """Temporary files that killed processes have left for a path."""
    target = Path(os.path.realpath(path))
    name = glob.escape(target.name)
    return [found for process in processes for found in target.parent.glob(f".{name}.{process}.*.partial")]


def ensure_folder(path: Path) -> None:
    """Create a folder, or raise an `OutputError`. Call it before long work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("a folder that can be written", f"{path}: {error.strerror}", "give another path") from error


def is_stdout(path: Path | None) -> bool:
    """Whether a path given by a user is standard output: `-`, or `/dev/stdout` and its equivalents.

    Example:
        >>> is_stdout(Path("-")), is_stdout(Path("report.json"))
        (True, False)
    """
    return path == STDOUT or (path is not None and os.path.abspath(path) in STDOUT_PATHS)


def write_output(path: Path, content: str | bytes) -> None:
    """Write text (as UTF-8) or bytes to a path given by a user; `-` is standard output."""
    if not is_stdout(path):
        write_whole(path, content)
        return
    if sys.stdout is None:
        raise OutputError("standard output that is open", "a closed one", "name a file")
    sys.stdout.flush()  # keep the order with what was printed before
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:  # for example in a notebook, which accepts text only
        sys.stdout.write(content if isinstance(content, str) else content.decode("utf-8", "backslashreplace"))
    else:
        # The commands replace sys.stdout by a stream that reports a closed pipe or a full disk.
        write = getattr(sys.stdout, "write_bytes", binary.write)
        write(_encoded(content))
    sys.stdout.flush()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a temporary file and rename it, so that neither a reader nor an interruption sees an incomplete file.

    A symbolic link is kept: the file that it points to is replaced, with its permissions. A pipe, a device or an open
    descriptor cannot be replaced and is written to directly.
    """
    try:
        found = _stat(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise OutputError("a file that can be written", f"{path}, which is a folder", "name a file in it")
        if found is not None and (not stat.S_ISREG(found.st_mode) or _is_descriptor(path)):
            with path.open("ab") as file:  # append, to keep what an open file contains
                file.write(_encoded(content))
        else:
            _replace(Path(os.path.realpath(path)), _encoded(content), found)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError("a file that can be written", f"{path}: {error.strerror}", "give another path") from error


def _encoded(content: str | bytes) -> bytes:
    """UTF-8; what it cannot encode, such as undecodable bytes of a file name, is escaped as in JSON."""
    return content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_descriptor(path: Path) -> bool:
    """Whether the path, directly or through links, is an open descriptor (`/dev/fd/5`), whose file must be kept."""
    while True:
        folder = os.path.realpath(path.parent)
        if folder == "/dev/fd" or re.fullmatch(r"/proc/\d+(/task/\d+)?/fd", folder):
            return True
        if not path.is_symlink():
            return False
        path = Path(folder, os.readlink(path))


def _replace(target: Path, content: bytes, found: os.stat_result | None) -> None:
    if found is not None and not os.access(target, os.W_OK):
        raise PermissionError(None, "Permission denied")  # renaming would succeed without this permission
    partial = _partial_of(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o666 if found is None else 0o600
    file = open(partial, "xb", opener=lambda p, flags: os.open(p, flags, mode))  # noqa: SIM115  x follows no link
    try:
        with file:
            file.write(content)
        if found is not None:
            with suppress(OSError, AttributeError):  # only root may change the owner
                os.chown(partial, found.st_uid, found.st_gid)
            os.chmod(partial, stat.S_IMODE(found.st_mode))
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):  # if writing failed, this may fail too
            partial.unlink(missing_ok=True)
        raise


def finite(data: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None.

    Returns:
        A copy of nested dictionaries and lists; tuples become lists.

    Example:
        >>> finite({"mean": 1.5, "error": float("nan")})
        {'mean': 1.5, 'error': None}
    """
    if isinstance(data, dict):
        return {k: finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
