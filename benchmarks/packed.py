"""Run many small training jobs at once on one GPU, and continue where an earlier call stopped.

Each job writes one JSON file when it is finished, and a job whose file exists is skipped: after a kill the same call
runs the missing jobs. Every job has a separate process, so that a failed CUDA context or a job that hangs affects no
other job. On a GPU the jobs share it through NVIDIA MPS, with one CPU thread each: without both, eight jobs take twice
as long.
"""

import json
import os
import shutil
import subprocess
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        name: unique; also the name of its result file.
        settings: columns that are added to the rows of its result.
        flags: arguments of the training command.
    """

    name: str
    settings: Row
    flags: list[str] = field(default_factory=list)


def run_all(
    jobs: Sequence[Job], work: Callable[[Job, Path], list[Row]], folder: Path, workers: int, limit_s: float = 900.0
) -> list[Row]:
    """Run the jobs that have no result in `folder` yet, and return the rows of all that have one.

    Args:
        jobs: in the order in which they are started.
        work: trains one job; it runs in a separate process, so it must be a function of a module.
        folder: for result files, logs and the jobs' own files.
        workers: number of jobs that run at once.
        limit_s: a job that takes longer is stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [job for job in jobs if not _result(folder, job).exists()]
    done = len(jobs) - len(missing)
    print(f"{done} of {len(jobs)} jobs are done; {len(missing)} to run, {workers} at once", flush=True)
    waiting, running, ended = deque(missing), {}, 0
    started, spawn = time.monotonic(), get_context("spawn")
    with shared_gpu(folder):
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                process = spawn.Process(target=_guarded, args=(work, job, folder))
                process.start()
                running[job.name] = (process, time.monotonic(), job)
            time.sleep(0.5)
            for name, (process, since, job) in list(running.items()):
                seconds = time.monotonic() - since
                if process.is_alive() and seconds < limit_s:
                    continue
                process.kill()  # no-op for one that has ended
                process.join()
                del running[name]
                ended += 1
                state = "done" if _result(folder, job).exists() else _last_line(folder / f"{name}.log")
                print(f"[{time.monotonic() - started:5.0f} s] {ended}/{len(missing)} {name}: {state}, {seconds:.0f} s",
                      flush=True)  # fmt: skip
    return collect(jobs, folder)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"FAILED, {lines[-1][:200] if lines else 'without output'}"


def collect(jobs: Sequence[Job], folder: Path) -> list[Row]:
    """The rows of every job that has a result, each with its job's settings in front."""
    found = []
    for job in jobs:
        path = _result(folder, job)
        if path.exists():
            found += [{**job.settings, **row} for row in json.loads(path.read_text(encoding="utf-8"))]
    return found


def _result(folder: Path, job: Job) -> Path:
    return folder / f"{job.name}.json"


def _guarded(work: Callable[[Job, Path], list[Row]], job: Job, folder: Path) -> None:
    """Run one job with its output in a log file."""
    own = folder / "runs" / job.name
    own.mkdir(parents=True, exist_ok=True)
    log = (folder / f"{job.name}.log").open("a", encoding="utf-8")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        rows = work(job, own)
    except Exception as error:
        traceback.print_exc(file=log)
        print(f"{type(error).__name__}: {str(error)[:200]}", file=log)
        return
    finally:
        log.flush()
        shutil.rmtree(own, ignore_errors=True)  # models of many runs would fill the disk
    partial = folder / f".{job.name}.partial"
    partial.write_text(json.dumps(rows), encoding="utf-8")
    os.replace(partial, _result(folder, job))


@contextmanager
def shared_gpu(folder: Path) -> Iterator[None]:
    """Start NVIDIA MPS, if it is installed, for processes started within the context; set one CPU thread for each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    for name in ("PIPE", "LOG"):
        place = folder.resolve() / f"mps-{name.lower()}"
        place.mkdir(parents=True, exist_ok=True)
        os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = str(place)
    subprocess.run([control, "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run([control], input="quit\n", text=True, check=False)
