"""Compute several results at a time, each in its own process."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path

import torch

from ..support.atomic_files import partials_of
from .study import Settings, Study
from .study_runner import Outcome, files_of, reproduce


def every_outcome(
    studies: Sequence[Study], settings: Settings, out: Path, *, fresh: bool = False, jobs: int = 1
) -> Iterator[Outcome]:
    """Compute results with `jobs` processes.

    On an interrupt the workers end at once, and no partial file remains.

    Returns:
        An iterator over outcomes, in the order in which they finish.
    """
    jobs = min(jobs, len(studies))
    if jobs == 1:
        for study in studies:
            yield reproduce(study, settings, out, fresh=fresh)
        return
    # Spawn, because a fork copies locks that other threads hold, such as that of a progress bar.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(torch.get_num_threads(),))
    try:
        with _without_interrupts():
            names = [(study.name, study.module.__name__) for study in studies]
            waiting = [pool.submit(_one, *name, settings, out, fresh) for name in names]
        for done in as_completed(waiting):
            yield done.result()
    except BaseException:
        for worker in (pool._processes or {}).values():
            worker.terminate()
        raise
    finally:
        workers = list(pool._processes or {})
        pool.shutdown(wait=True, cancel_futures=True)
        for path in (path for study in studies for path in files_of(study, out)):
            for partial in partials_of(path, workers):
                partial.unlink(missing_ok=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started in this block ignore Ctrl-C from the beginning; the parent decides whether to stop.

    A process inherits the blocked signals of the thread that starts it.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # otherwise it starts with the first worker, and unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(threads: int) -> None:
    """In a worker: use the parent's number of threads, ignore interrupts, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    """Exit when the parent exits: a parent that was killed cannot end its workers, which would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _one(name: str, module: str, settings: Settings, out: Path, fresh: bool) -> Outcome:
    return reproduce(Study(name, import_module(module)), settings, out, fresh=fresh)
