"""Several results at a time, each in a process of its own."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from ..files import partial_of
from .run import Outcome, files_of, reproduce
from .study import Settings, Study

_studies: dict[str, Study] = {}
"""What a forked worker finds by name; modules cannot be sent to it."""


def every_outcome(
    studies: Sequence[Study], settings: Settings, out: Path, *, fresh: bool = False, jobs: int = 1
) -> Iterator[Outcome]:
    """Outcomes as they come; interrupted, the workers end at once and no partial file stays."""
    if jobs == 1 or len(studies) == 1 or "fork" not in multiprocessing.get_all_start_methods():
        for study in studies:
            yield reproduce(study, settings, out, fresh=fresh)
        return
    _studies.update({study.name: study for study in studies})
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), initializer=_leave_interrupts_to_the_parent)
    try:
        waiting = [pool.submit(_one, study.name, settings, out, fresh) for study in studies]
        for done in as_completed(waiting):
            yield done.result()
    except BaseException:
        for worker in (pool._processes or {}).values():
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for path in (path for study in studies for path in files_of(study, out)):
            partial_of(path).unlink(missing_ok=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _one(name: str, settings: Settings, out: Path, fresh: bool) -> Outcome:
    return reproduce(_studies[name], settings, out, fresh=fresh)
