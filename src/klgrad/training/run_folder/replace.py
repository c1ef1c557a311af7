"""Replace the run that is in an output folder, without losing it before the new one has made an update."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...support.atomic_files import ensure_folder
from ..checkpoint.integrity import checkpoints, damaged
from ..training_errors import RunError
from .history import FILE as HISTORY, History, training
from .record import FIGURES, MODEL, RUN, SUMMARY

UNFINISHED = (".model.partial", ".model.old")
"""What remains if the process is killed while it writes or replaces the model."""
REPLACED, DELETED = ".replaced", ".deleted"
"""Where the replaced run is kept until the new run's first update, and where it is moved to be deleted."""


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Create the folder; raise if it has a run and `overwrite` is not set."""
    ensure_folder(folder)
    there = _files_of_a_run(folder)
    if there and not overwrite:
        raise RunError(
            "an output folder without a run",
            f"{folder}, which has {there[0].name}",
            "--resume continues it, --overwrite replaces it, --output_dir names another folder",
        )


@contextmanager
def nothing_left_by_failure(folder: Path) -> Iterator[None]:
    """On an error, remove the folders that were created inside the block and are still empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


def set_aside(folder: Path, keep: tuple[str, ...] = ()) -> None:
    """Move the files of the old run, except those in `keep`, to `.replaced`."""
    for path in _files_of_a_run(folder):
        if path.name not in keep:
            (folder / REPLACED).mkdir(exist_ok=True)
            path.rename(folder / REPLACED / path.name)


def drop_replaced(folder: Path) -> None:
    """Delete the old run, after the first update of the new one."""
    with suppress(FileNotFoundError):
        (folder / REPLACED).rename(folder / DELETED)  # in one step: a kill leaves all of it or nothing
    shutil.rmtree(folder / DELETED, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Restore the old run, if the run that was to replace it made no update."""
    shutil.rmtree(folder / DELETED, ignore_errors=True)
    if not (folder / REPLACED).is_dir():
        return
    for path in (folder / REPLACED).iterdir():
        os.replace(path, folder / path.name)
    (folder / REPLACED).rmdir()


def check_not_replaced(folder: Path, models: Iterable[str | None]) -> None:
    """Raise if one of the models is a part of the run that would be deleted; resuming would need it too."""
    doomed = [path.resolve() for path in _files_of_a_run(folder)]
    for name in filter(None, models):
        place = Path(name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name)
        if place.exists() and any(place.resolve().is_relative_to(path) for path in doomed):
            raise RunError(
                "a model outside of the run that --overwrite deletes",
                f"{name}, which is a part of it",
                "give another --output_dir, or copy the model elsewhere first",
            )


def check_nothing_lost(folder: Path, again: str) -> None:
    """Raise if starting a run without a complete checkpoint again would delete results; `again` is the command."""
    lost = lost_by_starting_again(folder)
    if lost:
        raise RunError(
            "a run with a complete checkpoint to continue from, or one that has made no update",
            f"{folder} without one, where starting again would delete {', '.join(lost)}",
            f"copy what you need, then start the run again from the beginning: {again}",
        )


def lost_by_starting_again(folder: Path) -> list[str]:
    """Files that training has produced. Settings, and an evaluation before the first update, are not counted."""
    found = [path.name for path in _files_of_a_run(folder) if path.name not in (RUN, HISTORY)]
    return [*([HISTORY] if training(History(folder).rows()) else []), *found]


def _files_of_a_run(folder: Path) -> list[Path]:
    files = [folder / name for name in (RUN, HISTORY, SUMMARY, *FIGURES, MODEL, *UNFINISHED)]
    return [path for path in (*files, *checkpoints(folder), *damaged(folder)) if path.exists()]
