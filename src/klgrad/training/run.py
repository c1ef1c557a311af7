"""A run from its settings to its summary."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..errors import KlgradError
from . import disk, run_folder as record
from .adopt import Adoption
from .build import Models, build, models_of
from .checkpoint import epochs, is_over, last_sound, step_of
from .checkpoint_state import check_fits
from .crash_checkpoint import Boundary
from .describe import objective
from .dry_run import described, told
from .evaluate import Evaluator
from .figures import Drawn, draw
from .history import History
from .lock import owned
from .named_code import resume_command
from .progress import Recorder
from .refusals import refusal, refusals_in_one_line
from .run_trainer import RunTrainer
from .settings import Settings
from .silence import one_voice
from .stop import Stopping
from .summary import summarise, table_of
from .training_errors import RunError


def run(settings: Settings, out: Console, err: Console) -> int:
    """Train, and give the exit status: 0, or 128 + the signal that stopped it."""

    def warn(text: str) -> None:
        err.print(Text(text, style="yellow"))

    with one_voice(warn):
        models = models_of(settings)
        if settings.run.dry_run:
            out.print(described(settings, models))
            return 0
        return _Run(settings, models, out, err, warn).go()


class _Run:
    def __init__(self, settings: Settings, models: Models, out: Console, err: Console, warn: Any) -> None:
        self.settings, self.models, self.out, self.err, self.warn = settings, models, out, err, warn
        self.folder = Path(str(settings.training.output_dir))
        self.history = History(self.folder)
        self.main = settings.training.process_index == 0

    def go(self) -> int:
        """All of it; only the main process holds the folder, for all processes of the run."""
        with record.nothing_left_by_failure(self.folder), owned(self.folder) if self.main else nullcontext():
            if self.main and not self.settings.run.resume:  # which begins the run again that is replacing another
                record.put_back(self.folder)
            if self.settings.run.resume and (updates := record.finished(self.folder, self.settings)) is not None:
                self._say_finished(updates)
                return 0
            checkpoint = self._checkpoint()
            if self.main and checkpoint is None:
                self._check_folder()
            with refusals_in_one_line():
                trainer, evaluator = build(self.settings, self.models)
            if checkpoint is not None:
                check_fits(trainer, checkpoint)
            try:
                return self._train(trainer, evaluator, checkpoint)
            except Exception as error:
                reason = disk.reason(error)
                if reason is None:
                    raise
                what = "a disk with room for what the run writes"
                raise RunError(what, reason, f"make room on it, or use another. {self._what_is_safe()}") from error

    def _checkpoint(self) -> Path | None:
        """Where to go on from; None to begin."""
        if not self.settings.run.resume:
            return None
        found, passed = last_sound(self.folder)
        for sentence in passed if self.main else []:
            self.warn(f"{sentence}; the one before it is used, if there is one.")
        return found

    def _check_folder(self) -> None:
        """Before anything is loaded: what is there is deleted only if that was asked for, or if it is nothing."""
        run = self.settings.run
        if not run.resume or run.overwrite:
            record.check_free(self.folder, overwrite=run.overwrite)
            record.check_not_replaced(self.folder, self._starts_from())
        else:
            record.check_nothing_lost(self.folder, self._resume("--overwrite"))
        if run.resume:
            self.warn(f"No sound checkpoint is in {self.folder}; the run begins again, with the same settings.")

    def _starts_from(self) -> list[str | None]:
        """The models that are trained and held to, by name and by path."""
        given = self.settings.policy.model_name_or_path, self.settings.training.teacher
        return [*given, self.models.path, self.models.reference]

    def _train(self, trainer: RunTrainer, evaluator: Evaluator, checkpoint: Path | None) -> int:
        adoption = Adoption(self.settings, self.history, checkpoint)
        if self.main:
            adoption.prepare()
            self._announce(checkpoint)
        start = 0 if checkpoint is None else step_of(checkpoint)
        recorder = Recorder(trainer, self.history, evaluator, self.settings.run.eval_every, self.err, start)
        if checkpoint is not None and self._is_over(checkpoint):
            return self._ended(trainer, checkpoint, recorder, adoption)
        stopping, boundary = Stopping(trainer, self.warn), Boundary(trainer)
        for callback in (boundary, *([adoption] if self.main else []), recorder, stopping):
            trainer.add_callback(callback)
        # In this order: an evaluation that fails costs nothing of what was trained.
        trainer.after_update = [boundary.note, recorder.evaluate_on_schedule]
        started = time.monotonic()
        try:
            with stopping.listening(), recorder.bar:
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except KeyboardInterrupt:
            boundary.save()
            return self._stopped(stopping.received or 2)
        except Exception as error:
            adoption.withdraw()
            self._failed(error, trainer, boundary)
            if checkpoint is not None and not boundary.began and not isinstance(error, KlgradError):
                raise _unloadable(checkpoint, error) from error
            if trainer.state.global_step == start and (refused := refusal(error)) is not None:
                raise refused from error
            raise
        if stopping.received is not None and trainer.state.global_step < trainer.state.max_steps:
            return self._stopped(stopping.received)
        if trainer.state.global_step == start:
            adoption.withdraw()
            raise _no_updates(trainer, start)
        return self._finish(trainer, time.monotonic() - started)

    def _is_over(self, checkpoint: Path) -> bool:
        steps = self.settings.training.max_steps
        enough = steps > 0 or self.settings.training.num_train_epochs <= epochs(checkpoint)
        return enough and is_over(checkpoint, steps)

    def _ended(self, trainer: RunTrainer, checkpoint: Path, recorder: Recorder, adoption: Adoption) -> int:
        """A run that was killed between its last update and its summary: what is missing is made up for."""
        try:
            trainer.load_ended(checkpoint)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, KlgradError):
                raise
            raise _unloadable(checkpoint, error) from error
        recorder.catch_up(step_of(checkpoint), is_last=True)
        if self.main:
            adoption.release()
        return self._finish(trainer, 0.0)

    def _failed(self, error: Exception, trainer: RunTrainer, boundary: Boundary) -> None:
        """Save what can be saved, and say so; of a disk that is full, `go` says it."""
        full = disk.reason(error) is not None
        try:
            saved = boundary.save()
        except Exception as another:
            if disk.reason(another) is None:
                raise
            if not full:
                self.warn(f"The run could not be saved: {disk.reason(another)}. {self._what_is_safe()}")
            return
        if saved and self.main and not full:
            safe = f"The run is safe in {self.folder} as it was after {trainer.state.global_step} updates."
            self.warn(f"{safe} Go on with: {self._resume()}")

    def _announce(self, checkpoint: Path | None) -> None:
        where = "" if checkpoint is None else f", going on from {checkpoint.name}"
        said = f"{self.settings.command} {self.models.name}{where}: maximises {objective(self.settings)}"
        self.err.print(Text(said, style="bold"))
        for line in told(self.settings)[1:]:
            self.err.print(Text(line, style="dim"))

    def _stopped(self, number: int) -> int:
        if self.main:
            self.warn(f"Stopped. {self._what_is_safe()}")
        return 128 + number

    def _what_is_safe(self) -> str:
        """What of the run is on disk, and how to go on."""
        found, _ = last_sound(self.folder)
        if found is not None:
            return f"The run is saved after {step_of(found)} updates in {found}. Go on with: {self._resume()}"
        more = ["--overwrite"] if record.lost_by_beginning(self.folder) else []
        return f"Nothing was saved yet. Begin again with: {self._resume(*more)}"

    def _resume(self, *more: str) -> str:
        return resume_command(self.settings.command, self.folder, self.settings.given, *more)

    def _say_finished(self, updates: int) -> None:
        if self.main:
            text = f"The run in {self.folder} is finished, after {updates} updates; nothing was changed. "
            self.out.print(Text(f"{text}To make it longer, give a larger --max_steps with --resume."))

    def _finish(self, trainer: RunTrainer, seconds: float) -> int:
        trainer.save_whole_model(self.folder / record.MODEL)
        if self.main:
            self._tell(seconds, trainer.state.global_step)
        return 0

    def _tell(self, seconds: float, updates: int) -> None:
        summary = {**summarise(self.folder), "updates": updates, "seconds": round(seconds, 1)}
        if self.settings.training.max_steps <= 0:
            summary["num_train_epochs"] = self.settings.training.num_train_epochs
        record.write_summary(self.folder, summary)
        draw([Drawn(self.folder.name, self.history.rows())], self.folder / record.FIGURE)
        self.out.print(table_of(summary))
        took = f" in {seconds:.0f} s" if seconds else ", and it was over already"
        names = f"{record.MODEL}/, {record.FIGURE}, {record.SUMMARY}, history.jsonl"
        self.out.print(Text(f"{updates} updates{took}. In {self.folder}/: {names}"))


def _unloadable(checkpoint: Path, error: Exception) -> RunError:
    detail = str(error).strip().splitlines() or [""]
    return RunError(
        "a checkpoint that these settings can go on from",
        f"{checkpoint}: {type(error).__name__}: {detail[0]}",
        "resume with the settings that the run was started with; nothing in its folder was changed",
    )


def _no_updates(trainer: RunTrainer, start: int) -> RunError:
    args: Any = trainer.args
    dataset: Any = trainer.train_dataset
    return RunError(
        "at least one update",
        f"none, after {start}, of {len(dataset)} prompts with {args.generation_batch_size} completions a generation, "
        f"{args.num_generations} of each prompt",
        "give more prompts, or a smaller batch (per_device_train_batch_size, gradient_accumulation_steps, "
        "steps_per_generation)",
    )
