"""The files of a run: history, records, lock, and the run that it replaces."""

import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock, Timeout

from .. import __version__
from ..errors import OutputError, RunError
from ..support import Json, ensure_folder, finite, write_whole
from .checkpoint import checkpoints

# `history.jsonl`: one line of JSON for each update and each evaluation.

HISTORY = "history.jsonl"


class History:
    """The history of a run. A row has a `step`, and either training metrics or an `evaluation`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HISTORY

    def append(self, row: Json) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")

    def cut(self, step: int) -> None:
        """Delete the rows after `step`, which will be computed again."""
        if self.path.is_file():
            rows = [row for row in self.rows() if row["step"] <= step]
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def rows(self) -> list[Json]:
        """All rows in the file, without an incomplete last line, as after a kill."""
        lines = self.path.read_bytes().splitlines() if self.path.is_file() else []
        rows = list[Json]()
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                rows.append(row | {"step": int(row["step"])})
            except (ValueError, TypeError, LookupError) as error:
                if number < len(lines):
                    received = f"{self.path}: line {number} is not a row of a history"
                    raise RunError("a history that can be read", received, "remove that line") from error
        return rows


def training(rows: list[Json]) -> list[Json]:
    return [row for row in rows if "evaluation" not in row]


def in_updates(count: int) -> str:
    """A number of updates in words, such as "1 update"."""
    return f"{count} update{'s' * (count != 1)}"


def evaluations(rows: list[Json]) -> list[Json]:
    return [row for row in rows if "evaluation" in row]


def kl_of(row: Json, unit: str = "per_sequence") -> float | None:
    """KL(π‖ref) of an update's completions: the exact value if it was logged, else k3."""
    names = [f"kl/reverse/{kind}/{unit}" for kind in ("exact", "k3")]
    if unit == "per_sequence":
        names.append("rewards/kl_to_reference/mean")  # with the KL in the reward only this is logged
    return next((row[name] for name in names if row.get(name) is not None), None)


def length_of(row: Json) -> float | None:
    """Mean tokens per completion of an update."""
    return row.get("length/mean", row.get("completions/mean_length"))


# The JSON files of a run: `run.json` has its settings, `summary.json` its results.

RUN, SUMMARY, MODEL = "run.json", "summary.json", "model"
FIGURES = ("run.png", "run.svg")
SECRET = ("hub_token",)
"""Settings that are not written to `run.json`."""
PACKAGES = ("torch", "trl", "transformers", "accelerate", "datasets", "peft", "vllm")


def write_run(folder: Path, command: str, settings: Json, objective: Json) -> None:
    """Write everything that is needed to start the same run again."""
    public = {name: value for name, value in settings.items() if name not in SECRET}
    content = {"command": command, "settings": public, "objective": objective, "versions": versions()}
    write_json(folder / RUN, content)


def write_json(path: Path, content: Json) -> None:
    write_whole(path, json.dumps(finite(content), indent=1, default=str, ensure_ascii=False))


def read(folder: Path, name: str) -> Json:
    """Read `run.json` or `summary.json`."""
    try:
        return dict(json.loads((folder / name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        remedy = "name the output folder of klgrad train or distill, or train again"
        raise RunError(f"a run's folder, with {name} that can be read", f"{folder}: {error}", remedy) from error


def recorded_settings(folder: Path, command: str) -> Json:
    """The settings in `run.json`; raises if the run belongs to another command."""
    content = read(folder, RUN)
    if (theirs := content.get("command", command)) != command:
        raise RunError(f"a run of klgrad {command}", f"{folder}, of klgrad {theirs}", f"klgrad {theirs} --resume")
    if not isinstance(settings := content.get("settings"), dict):
        received = f"{folder / RUN} with {settings!r}"
        raise RunError("the settings of a run, by name", received, "train again with --overwrite")
    return settings


def updates_if_finished(folder: Path, max_steps: int, num_train_epochs: float) -> int | None:
    """The number of updates of a run that is finished, with its model and summary written; None if it is not."""
    if not (folder / SUMMARY).is_file() or not (folder / MODEL).is_dir():
        return None
    summary = read(folder, SUMMARY)
    if max_steps > 0:
        return summary["updates"] if summary["updates"] >= max_steps else None
    epochs = summary.get("num_train_epochs")  # of the finished run; `run.json` may plan a longer one
    return summary["updates"] if epochs is not None and epochs >= num_train_epochs else None


def versions() -> dict[str, str]:
    versions = {"klgrad": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


# Replace the run that is in an output folder, if that is asked for.

UNFINISHED = (".model.partial", ".model.old")
"""What remains if the process is killed while it writes or replaces the model."""


def files_of_a_run(folder: Path) -> list[Path]:
    files = [folder / name for name in (RUN, HISTORY, SUMMARY, *FIGURES, MODEL, *UNFINISHED)]
    return [path for path in (*files, *checkpoints(folder)) if path.exists()]


def results_of_a_run(folder: Path) -> list[str]:
    """Files that training has produced. Settings, and an evaluation before the first update, are not counted."""
    names = [path.name for path in files_of_a_run(folder) if path.name not in (RUN, HISTORY)]
    return [*([HISTORY] if training(History(folder).rows()) else []), *names]


def delete_run(folder: Path) -> None:
    for path in files_of_a_run(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_not_replaced(folder: Path, models: Iterable[str | None]) -> None:
    """Raise if one of the models is a part of the run that would be deleted; resuming would need it too."""
    doomed = [path.resolve() for path in files_of_a_run(folder)]
    for name in filter(None, models):
        place = Path(name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name)
        if place.exists() and any(place.resolve().is_relative_to(path) for path in doomed):
            raise RunError(
                "a model outside of the run that --overwrite deletes",
                f"{name}, which is a part of it",
                "give another --output_dir, or copy the model elsewhere first",
            )


# One run per output folder: the process that trains holds a lock on a file in it.
#
# The system releases the lock when the process ends, also when it is killed. A lock file that remains blocks nobody.

LOCK = ".klgrad.lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the block; raise if another process holds it."""
    ensure_folder(folder)
    _refuse_links(folder)  # before the lock is taken, which empties its file
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RunError(
            "an output folder that no other run is using",
            f"{folder}, which another process is using",
            "wait until that process ends, or stop it, or give another --output_dir",
        ) from None
    except OSError as error:
        raise OutputError("a folder that can be written", f"{folder / LOCK}: {error}", "give another path") from error
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()


def _refuse_links(folder: Path) -> None:
    """Raise for a link out of a run folder, which may come from somebody else: a run would write to its target."""
    home = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            received = f"{path}, a link to {os.readlink(path)}"
            raise RunError("a run folder without links out of it", received, "remove the link")
