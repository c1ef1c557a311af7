"""A run from its settings to its summary."""

import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..errors import KlgradError, RunError
from ..support import write_whole
from . import run_folder
from .build import Models, build, models_of
from .callbacks import CrashCheckpoint, Recorder, RunCommit, Stopping
from .checkpoint import RunTrainer, check_fits, checkpoints, is_over, last_complete, step_of
from .evaluate import Evaluator
from .figures import RunHistory, draw
from .libraries import messages_once, refusal, write_failure
from .report import (
    CARD,
    announcement,
    describe,
    finished_message,
    folder_contents,
    how_to_continue,
    load_error,
    model_card,
    no_update_error,
    summarise,
    table_of,
)
from .run_folder import History, in_updates, owned
from .settings import RunSettings, resume_command


def run(settings: RunSettings, out: Console, err: Console) -> int:
    """Train, or describe the training with `--dry-run`: results go to `out`, progress and warnings to `err`.

    Returns:
        The exit status: 0, or 128 + the number of the signal that stopped the run.
    """

    def warn(text: str) -> None:
        err.print(Text(text, style="yellow"))

    with messages_once(warn):
        models = models_of(settings)
        if settings.run.dry_run:
            with err.status("Auditing the trainer's loss on small problems (a few seconds)"):
                description = describe(settings, models)
            out.print(description)
            return 0
        return _Run(settings, models, out, err, warn).go()


class _Run:
    def __init__(
        self, settings: RunSettings, models: Models, out: Console, err: Console, warn: Callable[[str], None]
    ) -> None:
        self.settings, self.models, self.out, self.err, self.warn = settings, models, out, err, warn
        self.folder = Path(str(settings.training.output_dir))
        self.history = History(self.folder)
        self.main = settings.training.process_index == 0

    def go(self) -> int:
        """Train; the main process holds the folder's lock on behalf of all processes."""
        with run_folder.remove_if_empty_on_failure(self.folder), owned(self.folder) if self.main else nullcontext():
            if self.settings.run.resume:
                training = self.settings.training
                updates = run_folder.updates_if_finished(self.folder, training.max_steps, training.num_train_epochs)
                if updates is not None:
                    if self.main:
                        self.out.print(Text(finished_message(self.folder, updates)))
                    return 0
            checkpoint = self._checkpoint()
            if self.main and checkpoint is None:
                self._check_folder()
            if self.main and not self.err.is_terminal:
                self.err.print(Text(f"loading {self.models.name} and its reference", style="dim"))
            try:
                trainer, evaluator = build(self.settings, self.models)
            except Exception as error:
                if (refused := refusal(error)) is None:
                    raise
                raise refused from error
            if checkpoint is not None:
                check_fits(trainer, checkpoint)
            try:
                return self._train(trainer, evaluator, checkpoint)
            except Exception as error:
                reason = write_failure(error)
                if reason is None:
                    raise
                remedy = f"free some space, or use another disk. {how_to_continue(self.settings, self.folder)}"
                raise RunError("a disk with space for the files of the run", reason, remedy) from error

    def _checkpoint(self) -> Path | None:
        """The checkpoint to continue from; None to start from the beginning."""
        if not self.settings.run.resume:
            return None
        complete = last_complete(self.folder)
        for path in checkpoints(self.folder) if self.main else []:
            if path == complete:
                break
            self.warn(f"{path.name} is not complete; the one before it is used, if there is one.")
        return complete

    def _check_folder(self) -> None:
        """Before anything is loaded, refuse to delete results without `--overwrite`."""
        run = self.settings.run
        if not run.resume or run.overwrite:
            run_folder.check_free(self.folder, overwrite=run.overwrite)
            names = self.settings.policy.model_name_or_path, self.settings.training.teacher
            run_folder.check_not_replaced(self.folder, [*names, self.models.path, self.models.reference])
        else:
            again = resume_command(self.settings.command, self.folder, self.settings.given, "--overwrite")
            run_folder.check_nothing_lost(self.folder, again)
        if run.resume:
            self.warn(f"There is no complete checkpoint in {self.folder}; the run starts again with the same settings.")

    def _train(self, trainer: RunTrainer, evaluator: Evaluator, checkpoint: Path | None) -> int:
        trainer.card = model_card(self.settings, self.models)
        commit = RunCommit(self.settings, self.history, checkpoint)
        if self.main:
            commit.begin()
            for line in announcement(self.settings, self.models, checkpoint):
                self.err.print(line)
        start = 0 if checkpoint is None else step_of(checkpoint)
        recorder = Recorder(trainer, self.history, evaluator, self.settings.run.eval_every, self.err, start)
        args = self.settings.training
        if checkpoint is not None and is_over(checkpoint, args.max_steps, args.num_train_epochs):
            return self._complete(trainer, checkpoint, recorder, commit)
        stopping, crash = Stopping(trainer, self.warn), CrashCheckpoint(trainer)
        for callback in (crash, *([commit] if self.main else []), recorder, stopping):
            trainer.add_callback(callback)
        # In this order, so that an evaluation that fails loses no training.
        trainer.after_update = [crash.note, recorder.evaluate_on_schedule]
        started = time.monotonic()
        try:
            with stopping.listening(), recorder.bar:
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except KeyboardInterrupt:
            crash.save()
            return self._stopped(stopping.received or 2)
        except Exception as error:
            commit.rollback()
            self._save_after(error, trainer, crash)
            if checkpoint is not None and not crash.began and not isinstance(error, KlgradError):
                raise load_error(checkpoint, error) from error
            if trainer.state.global_step == start and (refused := refusal(error)) is not None:
                raise refused from error
            raise
        if stopping.received is not None and trainer.state.global_step < trainer.state.max_steps:
            return self._stopped(stopping.received)
        if trainer.state.global_step == start:
            commit.rollback()
            raise no_update_error(trainer, start)
        return self._finish(trainer, time.monotonic() - started)

    def _complete(self, trainer: RunTrainer, checkpoint: Path, recorder: Recorder, commit: RunCommit) -> int:
        """Write what is missing of a run that was killed between its last update and its summary."""
        try:
            trainer.load_ended(checkpoint)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, KlgradError):
                raise
            raise load_error(checkpoint, error) from error
        recorder.evaluate_if_due(step_of(checkpoint), is_last=True)
        if self.main:
            commit.cut_history()
        return self._finish(trainer, 0.0)

    def _save_after(self, error: Exception, trainer: RunTrainer, crash: CrashCheckpoint) -> None:
        """Save what can be saved after an error, and report it; `go` reports a disk that is full."""
        full = write_failure(error) is not None
        try:
            saved = crash.save()
        except Exception as another:
            reason = write_failure(another)
            if reason is None:
                raise
            if not full:
                self.warn(f"The run could not be saved: {reason}. {how_to_continue(self.settings, self.folder)}")
            return
        if saved and self.main and not full:
            again = resume_command(self.settings.command, self.folder, self.settings.given)
            saved_as = f"The run is saved in {self.folder} as it was after {in_updates(trainer.state.global_step)}."
            self.warn(f"{saved_as} Continue with: {again}")

    def _stopped(self, number: int) -> int:
        if self.main:
            self.warn(f"Stopped. {how_to_continue(self.settings, self.folder)}")
        return 128 + number

    def _finish(self, trainer: RunTrainer, seconds: float) -> int:
        folder, updates = self.folder, trainer.state.global_step
        trainer.save_whole_model(folder / run_folder.MODEL)
        if not self.main:
            return 0
        summary = {**summarise(self.history.rows()), "updates": updates, "seconds": round(seconds, 1)}
        if self.settings.training.max_steps <= 0:
            summary["num_train_epochs"] = self.settings.training.num_train_epochs
        write_whole(folder / run_folder.MODEL / CARD, model_card(self.settings, self.models, summary))
        run_folder.write_json(folder / run_folder.SUMMARY, summary)
        if self.settings.run.weights_only:  # after the summary, without which the run is not finished
            for path in checkpoints(folder):
                shutil.rmtree(path, ignore_errors=True)
        draw([RunHistory(folder.name, self.history.rows())], folder)
        self.out.print(table_of(summary))
        took = f" in {seconds:.0f} s" if seconds else ", completed before"
        self.out.print(Text(f"{in_updates(updates)}{took}. {folder_contents(folder)}"))
        return 0
