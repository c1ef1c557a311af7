"""Sentences and errors about a run: what it does at the start, what is saved when it stops, why it cannot continue."""

from pathlib import Path
from typing import Any

from rich.text import Text

from ..build import Models
from ..checkpoint.integrity import checkpoints, last_sound, step_of
from ..checkpoint.run_trainer import RunTrainer
from ..run_folder import record
from ..run_folder.history import FILE as HISTORY, in_updates
from ..run_folder.replace import lost_by_starting_again
from ..settings.named_code import resume_command
from ..settings.run_config import Settings
from ..training_errors import RunError
from .describe import objective
from .dry_run import objective_lines


def announcement(settings: Settings, models: Models, checkpoint: Path | None) -> list[Text]:
    """What is printed when training starts."""
    where = "" if checkpoint is None else f", continuing from {checkpoint.name}"
    first = f"{settings.command} {models.name}{where}: maximises {objective(settings)}"
    return [Text(first, style="bold"), *(Text(line, style="dim") for line in objective_lines(settings)[1:])]


def how_to_continue(settings: Settings, folder: Path) -> str:
    """What of the run is on disk, and the command that continues it."""
    found, _ = last_sound(folder)
    if found is not None:
        again = resume_command(settings.command, folder, settings.given)
        return f"The run is saved after {in_updates(step_of(found))} in {found}. Continue with: {again}"
    more = ["--overwrite"] if lost_by_starting_again(folder) else []
    again = resume_command(settings.command, folder, settings.given, *more)
    return f"Nothing has been saved yet. Start again with: {again}"


NO_CHECKPOINT = "There is no complete checkpoint to make the run longer from: --weights_only false keeps them"


def finished(folder: Path, updates: int) -> str:
    """What is said of a run that is finished; it can be made longer only from a complete checkpoint."""
    sound, _ = last_sound(folder)
    longer = NO_CHECKPOINT if sound is None else "To make it longer, give a larger --max_steps with --resume"
    return f"The run in {folder} is finished, after {in_updates(updates)}; nothing was changed. {longer}."


def kept(folder: Path) -> str:
    """What a finished run has left in its folder, with sizes."""
    names = (record.MODEL, *record.FIGURES, record.SUMMARY, HISTORY)
    found = [f"{name}{_size(folder / name)}" for name in names if (folder / name).exists()]
    saved = checkpoints(folder)
    if saved:
        found.append(f"{len(saved)} checkpoint{'s' * (len(saved) > 1)}{_size(*saved)}")
    more = "" if saved else f". {NO_CHECKPOINT}"
    return f"In {folder}/: {', '.join(found)}{more}"


def _size(*paths: Path) -> str:
    """In MB, for folders."""
    files = [file for path in paths if path.is_dir() for file in path.rglob("*") if file.is_file()]
    return f" ({sum(file.stat().st_size for file in files) / 1e6:,.1f} MB)" if files else ""


def unloadable(checkpoint: Path, error: Exception) -> RunError:
    """The error for a checkpoint that another library cannot load."""
    detail = str(error).strip().splitlines() or [""]
    return RunError(
        "a checkpoint that these settings can continue from",
        f"{checkpoint}: {type(error).__name__}: {detail[0]}",
        "resume with the settings that the run was started with; nothing in its folder was changed",
    )


def no_updates(trainer: RunTrainer, start: int) -> RunError:
    """The error for a training that has ended without an update."""
    args: Any = trainer.args
    dataset: Any = trainer.train_dataset
    return RunError(
        "at least one update",
        f"none, after {start}, of {len(dataset)} prompts with {args.generation_batch_size} completions a generation, "
        f"{args.num_generations} of each prompt",
        "give more prompts, or a smaller batch (per_device_train_batch_size, gradient_accumulation_steps, "
        "steps_per_generation)",
    )
