"""One run per output folder: the process that trains holds a lock on a file in it.

The lock belongs to the open file, so the kernel releases it when the process ends, also when it is killed. A lock file
that a killed process left behind does not block another run.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ...errors import OutputError
from ...support.atomic_files import ensure_folder
from ..training_errors import RunError

try:
    import fcntl
except ImportError:  # on Windows only the owner recorded in the file is used
    fcntl = None

FILE = ".klgrad.lock"
SETTLED = 0.5
"""Seconds to wait, on a file system without locks, before reading which of several claims was written last."""
NAMED = 1.0
"""Seconds to wait for the owner to record itself in a lock that it has just taken."""


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the block; raise if another process holds it."""
    file = _take(folder)
    try:
        _refuse_links(folder)
        yield
    finally:
        with suppress(OSError):  # removed while it is held: a process that opened it in between tries again
            (folder / FILE).unlink()
        file.close()


def _take(folder: Path) -> IO[str]:
    path = folder / FILE
    while True:
        ensure_folder(folder)
        try:
            file = open(path, "a+", encoding="utf-8", opener=_without_links)  # noqa: SIM115
        except FileNotFoundError:  # the folder was removed in between
            continue
        except OSError as error:
            if path.is_symlink():
                raise _linked(path) from error
            raise OutputError(
                "a folder that can be written", f"{path}: {error.strerror}", "give another path"
            ) from error
        try:
            if _locked(file, path) and _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _without_links(path: str, flags: int) -> int:
    """Open a file; a link in its place is an error, since what it points to would be truncated."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _refuse_links(folder: Path) -> None:
    """Raise for a link out of a run folder, which may come from somebody else: a run would write to its target."""
    home = folder.resolve()
    for path in (*folder.iterdir(), *folder.glob("*/*")):
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            raise _linked(path)


def _linked(path: Path) -> RunError:
    return RunError("a run folder without links out of it", f"{path}, a link to {os.readlink(path)}", "remove the link")


def _locked(file: IO[str], path: Path) -> bool:
    """Take the lock and record the owner. False if another process has claimed the file, to try again."""
    try:
        if fcntl is None:
            raise OSError
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, _owner(path, wait=NAMED)) from None
    except OSError:  # some network file systems have no locks
        return _claimed(file, path)
    with suppress(OSError):  # on a full disk: the lock works without the record
        _write(file)
    return True


def _claimed(file: IO[str], path: Path) -> bool:
    """On a file system without locks: the recorded owner has the lock as long as its process runs."""
    owner = _owner(path)
    if owner is not None and is_running(owner):
        raise _in_use(path, owner)
    _write(file)
    time.sleep(SETTLED)
    owner = _owner(path)
    if owner is not None and owner != _this_process():
        raise _in_use(path, owner)
    return owner is not None


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether the path still names the file that was locked: its last owner may have removed it in between."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(file: IO[str]) -> None:
    file.truncate(0)
    file.write(json.dumps(_this_process()))
    file.flush()


def _owner(path: Path, wait: float = 0.0) -> dict[str, Any] | None:
    """The owner recorded in the lock; None if there is none after `wait` seconds."""
    until = time.monotonic() + wait
    while True:
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
        if time.monotonic() >= until:
            return None
        time.sleep(0.02)


def _in_use(path: Path, owner: dict[str, Any] | None) -> RunError:
    who = "another process" if owner is None else f"process {owner.get('pid')} on {owner.get('host')}"
    remedy = "wait until that process ends, or stop it, or give another --output_dir"
    if owner is not None and owner.get("host") != socket.gethostname():
        remedy += f"; if it has ended, which this host cannot check, remove {path}"
    return RunError("an output folder that no other run is using", f"{path.parent}, which {who} is using", remedy)


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}


def is_running(owner: dict[str, Any]) -> bool:
    """Whether the recorded process still runs; its start time distinguishes it from a later one of the same number."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname():
        return True  # this host cannot check
    if not isinstance(pid, int):
        return False
    if owner.get("started") is not None:
        return _started(pid) == owner["started"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


def _started(pid: int) -> int | None:
    """Start time in clock ticks since boot; None without /proc, or if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])  # the process name before it, in brackets, may contain spaces
    except (OSError, ValueError, IndexError):
        return None
