"""A run's folder: `run.json` says what it is, `summary.json` what came of it."""

import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..support.atomic_files import ensure_folder, finite, write_whole
from .checkpoint import aside, checkpoints, step_of
from .history import FILE as HISTORY, History, training
from .training_errors import RunError

RUN, SUMMARY, FIGURE, MODEL = "run.json", "summary.json", "run.png", "model"
UNFINISHED = (".model.partial", ".model.old")
"""What a kill leaves while the model is written, or put in the place of an older one."""
SECRET = ("hub_token",)
"""Settings that are not written down."""
PACKAGES = ("torch", "trl", "transformers", "accelerate", "datasets", "peft", "vllm")


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Before anything is loaded: a run that is there is not lost unasked."""
    ensure_folder(folder)
    there = _left(folder)
    if there and not overwrite:
        raise RunError(
            "an output folder without a run",
            f"{folder}, which has {there[0].name}",
            "--resume goes on with it, --overwrite replaces it, --output_dir puts this one elsewhere",
        )


@contextmanager
def nothing_left_by_failure(folder: Path) -> Iterator[None]:
    """Folders that were made on the way, and are still empty, go again if something fails."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


REPLACED, DELETED = ".replaced", ".deleted"
"""Where a run that is to be replaced waits for the new one's first update, and where it goes then."""


def set_aside(folder: Path, keep: tuple[str, ...] = ()) -> None:
    """Make room for a new run. What was there is kept until the new run's first update."""
    for path in _left(folder):
        if path.name not in keep:
            (folder / REPLACED).mkdir(exist_ok=True)
            path.rename(folder / REPLACED / path.name)


def drop_replaced(folder: Path) -> None:
    """After the first update: the run that was replaced is deleted."""
    with suppress(FileNotFoundError):
        (folder / REPLACED).rename(folder / DELETED)  # in one step: a kill leaves all of it or none
    shutil.rmtree(folder / DELETED, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Before a run, and after one that failed: what was set aside for a run that came to no update is as it was."""
    shutil.rmtree(folder / DELETED, ignore_errors=True)
    if not (folder / REPLACED).is_dir():
        return
    for path in (folder / REPLACED).iterdir():
        os.replace(path, folder / path.name)
    (folder / REPLACED).rmdir()


def check_not_replaced(folder: Path, models: Iterable[str | None]) -> None:
    """A run must not delete the model that it starts from or is held to, which a resumption needs too."""
    doomed = [path.resolve() for path in _left(folder)]
    for name in filter(None, models):
        place = Path(name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name)
        if place.exists() and any(place.resolve().is_relative_to(path) for path in doomed):
            raise RunError(
                "a model outside of the run that --overwrite deletes",
                f"{name}, which is a part of it",
                "give another --output_dir, or copy the model elsewhere first",
            )


def check_nothing_lost(folder: Path, again: str) -> None:
    """A run without a sound checkpoint begins again unasked only if nothing is deleted by that."""
    lost = lost_by_beginning(folder)
    if lost:
        raise RunError(
            "a run with a sound checkpoint to go on from, or one that came to no update",
            f"{folder} without one, where beginning again would delete {', '.join(lost)}",
            f"copy what you need, then replace the run by its beginning: {again}",
        )


def lost_by_beginning(folder: Path) -> list[str]:
    """What of a run took training to make. Its settings, and an evaluation before the first update, did not."""
    found = [path.name for path in _left(folder) if path.name not in (RUN, HISTORY)]
    return [*([HISTORY] if training(History(folder).rows()) else []), *found]


def finished(folder: Path, settings: Any) -> int | None:
    """After how many updates a run has ended, with its model and summary there; None if it has not."""
    if not (folder / SUMMARY).is_file() or not any((folder / MODEL).glob("*")):
        return None
    updates = read(folder, SUMMARY).get("updates")
    if not isinstance(updates, int) or any(row["step"] > updates for row in History(folder).rows()):
        return None
    if any(step_of(checkpoint) > updates for checkpoint in checkpoints(folder)):
        return None
    if settings.training.max_steps > 0:
        return updates if updates >= settings.training.max_steps else None
    epochs = read(folder, SUMMARY).get("num_train_epochs")  # of the run that ended; `run.json` may be of a longer one
    return updates if isinstance(epochs, int | float) and epochs >= settings.training.num_train_epochs else None


def _left(folder: Path) -> list[Path]:
    files = [folder / name for name in (RUN, HISTORY, SUMMARY, FIGURE, MODEL, *UNFINISHED)]
    return [path for path in (*files, *checkpoints(folder), *aside(folder)) if path.exists()]


def write_run(folder: Path, command: str, settings: dict[str, Any], objective: dict[str, Any]) -> None:
    """What would start the same run again."""
    kept = {name: value for name, value in settings.items() if name not in SECRET}
    content = {"command": command, "settings": kept, "objective": objective, "versions": versions()}
    write_whole(folder / RUN, json.dumps(finite(content), indent=1, default=str, ensure_ascii=False))


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """For programs."""
    write_whole(folder / SUMMARY, json.dumps(finite(summary), indent=1, ensure_ascii=False))


def read(folder: Path, name: str) -> dict[str, Any]:
    """One of a run's files."""
    path = folder / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "name the output folder of klgrad train or distill"
        raise RunError(f"a run's folder, with {name}", str(folder), remedy) from None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{name} that can be read", f"{path}: {error}", "take it from a backup, or train anew"
        ) from error
    if not isinstance(found, dict):
        raise RunError(f"{name} of a run", f"{path} with a {type(found).__name__}", "train anew")
    return found


def recorded_settings(folder: Path, command: str) -> dict[str, Any]:
    """Those that a run was started with, if it was one of this command's."""
    found = read(folder, RUN)
    theirs = found.get("command", command)
    if theirs != command:
        raise RunError(f"a run of klgrad {command}", f"{folder}, of klgrad {theirs}", f"klgrad {theirs} --resume")
    settings = found.get("settings", {})
    if not isinstance(settings, dict):
        raise RunError(
            "the settings of a run, by name",
            f"{folder / RUN} with {json.dumps(settings)} for them",
            "take the file from a backup, or train anew with --overwrite",
        )
    return settings


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {"klgrad": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
