"""Run many `klgrad` commands fast: import everything once, then fork one child process per command."""

import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        status: exit status; minus the signal's number if a signal ended it; None if it ran into the time limit.
        output: standard output and standard error.
    """

    status: int | None
    output: str

    @property
    def is_clean(self) -> bool:
        """Whether the command ended correctly: in time, with a documented status, and without a traceback."""
        return self.status in (0, 1, 2, 130, 141, 143) and "Traceback (most recent call last)" not in self.output


def preload() -> None:
    """Import everything that the commands import, so that a child process need not."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401

    import klgrad.cli
    import klgrad.training.run  # noqa: F401


def start(arguments: list[str], folder: Path, log: Path, encoding: str = "utf-8") -> int:
    """Start a command in a child process, in `folder`, with its output in `log`, and return the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(to, 1)
        os.dup2(to, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (open(fd, "w", encoding=encoding, closefd=False) for fd in (1, 2))  # noqa: SIM115
        sys.argv = ["klgrad", *arguments]
        status = _main()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _main() -> int:
    from klgrad.cli import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
    return 0


def run(arguments: list[str], folder: Path, log: Path, seconds: float = 60.0, encoding: str = "utf-8") -> Outcome:
    """Run a command to its end, or until the time limit."""
    child, end = start(arguments, folder, log, encoding), time.monotonic() + seconds
    while time.monotonic() < end:
        done, raw = os.waitpid(child, os.WNOHANG)
        if done:
            return Outcome(os.waitstatus_to_exitcode(raw), _text(log))
        time.sleep(0.01)
    kill(child)
    return Outcome(None, _text(log))


def kill(child: int) -> None:
    """Send SIGKILL to the child and all processes that it started."""
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            send(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
