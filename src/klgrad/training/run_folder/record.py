"""The JSON files of a run: `run.json` has its settings, `summary.json` its results."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ... import __version__
from ...support.atomic_files import finite, write_whole
from ..checkpoint.integrity import checkpoints, step_of
from ..training_errors import RunError
from .history import History

RUN, SUMMARY, MODEL = "run.json", "summary.json", "model"
FIGURES = ("run.png", "run.svg")
SECRET = ("hub_token",)
"""Settings that are not written to `run.json`."""
PACKAGES = ("torch", "trl", "transformers", "accelerate", "datasets", "peft", "vllm")


def write_run(folder: Path, command: str, settings: dict[str, Any], objective: dict[str, Any]) -> None:
    """Write everything that is needed to start the same run again."""
    kept = {name: value for name, value in settings.items() if name not in SECRET}
    content = {"command": command, "settings": kept, "objective": objective, "versions": versions()}
    write_whole(folder / RUN, json.dumps(finite(content), indent=1, default=str, ensure_ascii=False))


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write the results for programs to read."""
    write_whole(folder / SUMMARY, json.dumps(finite(summary), indent=1, ensure_ascii=False))


def read(folder: Path, name: str) -> dict[str, Any]:
    """Read `run.json` or `summary.json`."""
    path = folder / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "name the output folder of klgrad train or distill"
        raise RunError(f"a run's folder, with {name}", str(folder), remedy) from None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{name} that can be read", f"{path}: {error}", "restore it from a backup, or train again"
        ) from error
    if not isinstance(found, dict):
        raise RunError(f"{name} of a run", f"{path} with a {type(found).__name__}", "train again")
    return found


def recorded_settings(folder: Path, command: str) -> dict[str, Any]:
    """The settings in `run.json`; raises if the run belongs to another command."""
    found = read(folder, RUN)
    theirs = found.get("command", command)
    if theirs != command:
        raise RunError(f"a run of klgrad {command}", f"{folder}, of klgrad {theirs}", f"klgrad {theirs} --resume")
    settings = found.get("settings", {})
    if not isinstance(settings, dict):
        raise RunError(
            "the settings of a run, by name",
            f"{folder / RUN} with {json.dumps(settings)} for them",
            "restore the file from a backup, or train again with --overwrite",
        )
    return settings


def updates_if_finished(folder: Path, settings: Any) -> int | None:
    """The number of updates of a run that is finished, with its model and summary written; None if it is not."""
    if not (folder / SUMMARY).is_file() or not any((folder / MODEL).glob("*")):
        return None
    summary = read(folder, SUMMARY)
    updates = summary.get("updates")
    if not isinstance(updates, int) or any(row["step"] > updates for row in History(folder).rows()):
        return None
    if any(step_of(checkpoint) > updates for checkpoint in checkpoints(folder)):
        return None
    if settings.training.max_steps > 0:
        return updates if updates >= settings.training.max_steps else None
    epochs = summary.get("num_train_epochs")  # of the finished run; `run.json` may plan a longer one
    return updates if isinstance(epochs, int | float) and epochs >= settings.training.num_train_epochs else None


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    found = {"klgrad": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
