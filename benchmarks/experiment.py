"""The command line of an experiment: a list of jobs, and one CSV file that several calls fill."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from harness import RECORDED, provenance, read, write
from packed import Job, Row, run_all


def command(
    description: str | None,
    jobs: Callable[[argparse.Namespace], list[Job]],
    train: Callable[[Job, Path], list[Row]],
    file: str,
    prepare: Callable[[argparse.Namespace], object] = lambda given: None,
) -> None:
    """Run the jobs of an experiment that its CSV file does not have, and add their rows.

    Args:
        description: shown by `--help`.
        jobs: all jobs, for the parsed arguments.
        train: runs one job in a separate process; rows with a `problem` are not kept.
        file: the name of the CSV file.
        prepare: called once, before the jobs start.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the unpacked model")
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the CSV file")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of unfinished work")
    parser.add_argument("--workers", type=int, default=8, help="jobs at once; each takes 13 to 15 GiB")
    parser.add_argument("--only", default="", help="only jobs whose name contains this")
    given = parser.parse_args()
    path = given.out / file
    prepare(given)
    chosen = [each for each in missing(jobs(given), path) if given.only in each.name]
    add(run_all(chosen, train, given.runs / path.stem, given.workers), path)


def missing(jobs: Iterable[Job], path: Path) -> list[Job]:
    """The jobs that a CSV file does not have, by their names, or if it has no names by all settings."""
    measured = read(path)
    names = {row["job"] for row in measured if "job" in row}
    known = lambda job: any(all(row.get(key) == str(x) for key, x in job.settings.items()) for row in measured)
    return [job for job in jobs if not (job.name in names if names else known(job))]


def add(rows: Iterable[Row], path: Path) -> None:
    """Add the rows of jobs to a CSV file, without those that have a `problem`."""
    write([*read(path), *({**row, **provenance()} for row in rows if not row.get("problem"))], path)
