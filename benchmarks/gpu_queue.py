"""What is still to be measured on a GPU, in order of value, as far as the time goes.

First the tests that need a GPU, then the benchmark of the exact KL's kernels, then the training runs that the recorded
files do not have, several at once, as many as fit into the GPU's memory. What has been done is not repeated: after a
kill the same call goes on. Rows are added to the CSV files when a run ends, and an archive of these files, the
benchmark's rows and the logs is written each time.

    python benchmarks/gpu_queue.py --minutes 30        all of it, as `make gpu-queue MINUTES=30` does
    python benchmarks/gpu_queue.py --list              the runs that are missing

The archive is build/queue/archive.tar.gz. Its folder `recorded` has the files that `klgrad reproduce` reads.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distill_runs
import exp_async
import exp_fig8
import exp_long
import exp_reuse
import exp_stale_distill
import rl_runs
import trl_distill_runs
from experiment import add, missing
from harness import RECORDED
from packed import Job, Row, Task, run_tasks, shared_gpu

ROOT = Path(__file__).resolve().parents[1]
GPU_TESTS = (
    "tests/kernels/test_gpu.py",
    "tests/kernels/test_hopper_gpu.py",
    "tests/trainer/test_gpu.py",
    "tests/trainer/test_contract.py",
)
"""Files with tests that are marked `gpu`. Other files need packages that a machine with a GPU may not have."""
PARTS = ("tests", "kernels", "model", "runs")
"""The third unpacks the model and writes the students, which may be done beside the others; the runs need them."""
LIMIT_S = 1300.0
"""A run of 300 updates takes about 600 s beside eleven others."""

Work = Callable[[Job, Path], list[Row]]
Needs = dict[str, Any]

LONG_STALE = {"gib": 10.5, "kind": "180 updates", "seconds": 370.0}
REINFORCED = {"gib": 10.5, "kind": "60 updates", "seconds": 115.0}
LONG = {"gib": 10.5, "kind": "300 updates", "seconds": 600.0}
DISTILLED = {"gib": 9.0, "kind": "distillation", "seconds": 80.0}
SMALL = {"gib": 5.0, "kind": "distillation, small batches", "seconds": 200.0}
BY_TRL = {"gib": 19.0, "kind": "distillation by TRL", "seconds": 240.0, "at_once": 2}
SMALL_BY_TRL = {"gib": 9.0, "kind": "distillation by TRL, small batches", "seconds": 330.0, "at_once": 8}
"""As measured on an H200 with about twelve runs at once."""


def runs(given: argparse.Namespace) -> list[tuple[list[Job], Work, str, Needs]]:
    """All runs in order: jobs, what trains them, their file and what they need."""
    long = {job.name: job for job in exp_long.jobs(given)}
    arms = lambda names: [job for job in long.values() if job.settings["arm"] in names]
    sequences, tokens = (exp_fig8.fresh(given, arms) for arms in (exp_fig8.SEQUENCE_LEVEL, exp_fig8.TOKEN_LEVEL))
    trl, small_trl = (made(given) for made in (exp_reuse.trl_seeds, exp_reuse.small_trl))
    return [
        (arms(exp_long.POOR), rl_runs.train, "long.csv", LONG),
        (arms(exp_long.DIVIDED), rl_runs.train, "long.csv", LONG),
        (exp_stale_distill.equal_batches(given), exp_stale_distill.train_stale, "stale_distill.csv", DISTILLED),
        (trl, trl_distill_runs.train, "reuse_trl.csv", BY_TRL),
        (sequences, distill_runs.train, "fig8_seeds.csv", DISTILLED),
        (exp_async.between(given), rl_runs.train, "async.csv", REINFORCED),
        (exp_async.long(given), rl_runs.train, "async_long.csv", LONG_STALE),
        (exp_reuse.small(given), distill_runs.train, "reuse_sweep.csv", SMALL),
        (exp_reuse.small_seeds(given), distill_runs.train, "reuse_seeds.csv", SMALL),
        (small_trl, trl_distill_runs.train, "reuse_trl.csv", SMALL_BY_TRL),
        (tokens, distill_runs.train, "fig8_seeds.csv", DISTILLED),
    ]


def tasks(given: argparse.Namespace) -> list[tuple[Task, Path]]:
    """The runs that the CSV files do not have, each with its file."""
    return [
        (Task(job, work, given.runs / Path(file).stem, **needs), given.out / file)
        for jobs, work, file, needs in runs(given)
        for job in missing(jobs, given.out / file)
        if given.only in job.name
    ]


def train_all(given: argparse.Namespace, until: float) -> None:
    """Run what is missing; a second time what failed, because runs that share a GPU may fail by each other."""
    for _ in range(2):
        found = dict(tasks(given))
        for task, file in found.items():  # a kill may have come between a result and its file
            if task.result.exists():
                add(task.rows(), file)
        found = {task: file for task, file in found.items() if not task.result.exists()}
        left = until - time.monotonic()
        print(f"{len(found)} runs to make in {left:.0f} s", flush=True)

        def keep(task: Task, files: dict[Task, Path] = found) -> None:
            add(task.rows(), files[task])
            archive(given)

        run_tasks(list(found), given.workers, given.gib, left, LIMIT_S, keep)


def archive(given: argparse.Namespace) -> None:
    """Write all that was measured, and the logs, to one file."""
    partial = given.runs / f".archive.{os.getpid()}.partial"
    with tarfile.open(partial, "w:gz", compresslevel=3) as tar:
        for folder, name, pattern in (
            (given.out, "recorded", "*.csv"),
            (given.runs, "results", "kernels_*.csv"),
            (given.runs, "logs", "*.log"),
            (given.runs, "logs", "*/*.log"),
        ):
            for path in sorted(folder.glob(pattern)):
                tar.add(path, f"{name}/{path.relative_to(folder)}")
    os.replace(partial, given.runs / "archive.tar.gz")


def call(given: argparse.Namespace, name: str, seconds: float, *command: str) -> None:
    """Run a command of Python once, with its output in a log, for so many seconds at most."""
    done, log = given.runs / f"{name}.done", given.runs / f"{name}.log"
    if done.exists():
        return
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                [sys.executable, "-u", *command], cwd=ROOT, stdout=file, stderr=file, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} s"
    done.write_text(str(code), encoding="utf-8")
    print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]))
    print(f"{name}: exit status {code}", flush=True)


def prepare(given: argparse.Namespace) -> None:
    """Unpack the model, and write the students that all runs start from."""
    from klgrad.models import resolve

    given.model = given.teacher = Path(resolve(given.model))
    exp_fig8.create_students(given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to do")
    parser.add_argument("--model", default="smollm2", help="`smollm2`, or the folder of the unpacked model")
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the CSV files")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "build" / "queue", help="folder of results, logs and archive"
    )
    parser.add_argument("--gib", type=float, default=132.0, help="memory of the GPU that the runs may share")
    parser.add_argument("--workers", type=int, default=15, help="runs at once, at most")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the runs that are missing, and stop")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    given.out, given.runs = given.out.resolve(), given.runs.resolve()
    given.runs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.list:
        given.model = given.teacher = Path(given.model)
        (given.runs / "teacher-fixed-length").mkdir(exist_ok=True)
        for task, file in tasks(given):
            print(f"{file.name:<20}{task.kind:<36}{task.job.name}")
        return
    left = lambda: until - time.monotonic()
    if "tests" in given.parts:
        call(given, "tests", left(), "-m", "pytest", "-p", "no:benchmark", "-n", "8", "-m", "gpu", "-q", *GPU_TESTS)
    if "kernels" in given.parts:
        bench = str(ROOT / "benchmarks" / "bench_kernels.py")
        call(given, "kernels", left(), bench, "--only", "exact", "--out", str(given.runs))
    archive(given)
    if {"model", "runs"} & {*given.parts}:
        prepare(given)
    if "runs" in given.parts:
        with shared_gpu(given.runs):
            train_all(given, until)
    archive(given)
    print(f"archive: {given.runs / 'archive.tar.gz'}", flush=True)


if __name__ == "__main__":
    main()
