"""Run many small training jobs at once on one GPU, and continue where an earlier call stopped.

Each job writes one JSON file when it is finished, and a job whose file exists is not run again: after a kill the same
call runs the missing jobs. Every job has a separate process, so that a failed CUDA context or a job that hangs affects
no other job. On a GPU the jobs share it through NVIDIA MPS, with one CPU thread each: without both, eight jobs take
twice as long.
"""

import json
import math
import os
import shutil
import subprocess
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from statistics import fmean
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


@dataclass(frozen=True, eq=False)
class Task:
    """A job with all that is needed to run it beside others.

    Attributes:
        job: the job.
        work: trains it; it runs in a separate process, so it must be a function of a module.
        folder: for the result file, the log and the job's own files.
        gib: memory of the GPU that it takes.
        kind: tasks of one kind take about as long.
        seconds: how long it takes beside others, until one of its kind has ended.
        at_once: how many of its kind may run.
    """

    job: Job
    work: Callable[[Job, Path], list[Row]]
    folder: Path
    gib: float = 0.0
    kind: str = ""
    seconds: float = 0.0
    at_once: float = math.inf

    @property
    def result(self) -> Path:
        """The file with the rows of the job, once it has ended."""
        return self.folder / f"{self.job.name}.json"

    def rows(self) -> list[Row]:
        """The rows of the result, each with the job's settings in front; none if there is no result."""
        found = json.loads(self.result.read_text(encoding="utf-8")) if self.result.exists() else []
        return [{**self.job.settings, **row} for row in found]


def run_all(jobs: Sequence[Job], work: Callable[[Job, Path], list[Row]], folder: Path, workers: int) -> list[Row]:
    """Run the jobs that have no result in `folder` yet, and return the rows of all that have one.

    Args:
        jobs: in the order in which they are started.
        work: trains one job, as in `Task`.
        folder: for result files, logs and the jobs' own files.
        workers: number of jobs that run at once.
    """
    tasks = [Task(job, work, folder) for job in jobs]
    missing = [task for task in tasks if not task.result.exists()]
    print(
        f"{len(jobs) - len(missing)} of {len(jobs)} jobs are done; {len(missing)} to run, {workers} at once", flush=True
    )
    with shared_gpu(folder):
        run_tasks(missing, workers)
    return [row for task in tasks for row in task.rows()]


def run_tasks(
    tasks: Sequence[Task],
    workers: int,
    gib: float = math.inf,
    seconds: float = math.inf,
    limit_s: float = 900.0,
    after: Callable[[Task], object] = lambda task: None,
) -> None:
    """Run tasks at once, as many as fit.

    They start in their order. One that does not fit into the free memory waits, and so do those after it; one that
    would not end in time, or of whose kind enough run, is passed over for now.

    Args:
        tasks: all of them are run, whether they have a result or not.
        workers: number of tasks that run at once.
        gib: memory of the GPU that they share.
        seconds: those that have not ended by then are stopped.
        limit_s: a task that takes longer is stopped.
        after: called with each task that has ended with a result.
    """
    waiting, running, took = list(tasks), {}, defaultdict(list)
    started, spawn, ended = time.monotonic(), get_context("spawn"), 0
    now = lambda: time.monotonic() - started
    expected = lambda task: fmean(took[task.kind]) if took[task.kind] else task.seconds
    while True:
        while task := _next(
            waiting, [each for each, _, _ in running.values()], workers, gib, seconds - now(), expected
        ):
            waiting.remove(task)
            task.folder.mkdir(parents=True, exist_ok=True)
            process = spawn.Process(target=_guarded, args=(task,))
            process.start()
            running[process.pid] = (task, process, now())
        if not running:
            break
        time.sleep(0.5)
        for pid, (task, process, since) in list(running.items()):
            lasted = now() - since
            if process.is_alive() and lasted < limit_s and now() < seconds:
                continue
            process.kill()  # no-op for one that has ended
            process.join()
            del running[pid]
            ended += 1
            done = task.result.exists()
            if done:
                took[task.kind].append(lasted)
                after(task)
            state = "done" if done else _last_line(task.folder / f"{task.job.name}.log")
            print(f"[{now():5.0f} s] {ended}/{len(tasks)} {task.job.name}: {state}, {lasted:.0f} s", flush=True)
    if waiting:
        print(f"no time for {len(waiting)} of {len(tasks)} jobs", flush=True)


def _next(
    waiting: list[Task],
    running: list[Task],
    workers: int,
    gib: float,
    seconds: float,
    expected: Callable[[Task], float],
) -> Task | None:
    """The task that starts now; None if none does."""
    if len(running) >= workers:
        return None
    for task in waiting:
        if expected(task) > seconds or sum(each.kind == task.kind for each in running) >= task.at_once:
            continue
        return task if sum(each.gib for each in running) + task.gib <= gib or not running else None
    return None


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"FAILED, {lines[-1][:200] if lines else 'without output'}"


def _guarded(task: Task) -> None:
    """Run one job with its output in a log file; if the call is killed that runs all jobs, the job ends too."""
    caller = parent_process()
    assert caller is not None
    threading.Thread(target=lambda: (caller.join(), os._exit(1)), daemon=True).start()
    job, folder = task.job, task.folder
    own = folder / "runs" / job.name
    own.mkdir(parents=True, exist_ok=True)
    log = (folder / f"{job.name}.log").open("a", encoding="utf-8")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        rows = task.work(job, own)
    except Exception as error:
        traceback.print_exc(file=log)
        print(f"{type(error).__name__}: {str(error)[:200]}", file=log)
        return
    finally:
        log.flush()
        shutil.rmtree(own, ignore_errors=True)  # models of many runs would fill the disk
    partial = folder / f".{job.name}.partial"
    partial.write_text(json.dumps(rows), encoding="utf-8")
    os.replace(partial, task.result)


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
    if subprocess.run([control, "-d"], check=False).returncode:
        print("NVIDIA MPS did not start; after a kill it may still run", flush=True)
    try:
        yield
    finally:
        subprocess.run([control], input="quit\n", text=True, check=False)
