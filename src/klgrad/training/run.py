"""A run from its settings to its summary."""

import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..errors import RunError
from ..support import write_whole
from . import run_folder
from .build import Models, build, models_of
from .callbacks import Recorder, Stopping
from .checkpoint import RunTrainer, checkpoints, is_over, last_complete, step_of
from .evaluate import Evaluator
from .figures import RunHistory, draw
from .libraries import messages_once, refusal
from .report import (
    CARD,
    describe,
    finished_message,
    folder_contents,
    formula,
    how_to_continue,
    model_card,
    objective,
    objective_lines,
    scaling,
    summarise,
    table_of,
)
from .run_folder import History, in_updates, lock_folder
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
        if not settings.run.dry_run:
            return _Run(settings, models, out, err, warn).go()
        with err.status("Auditing the trainer's loss on small problems (a few seconds)"):
            description = describe(settings, models)
        out.print(description)
        return 0


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
        training, resume = self.settings.training, self.settings.run.resume
        with lock_folder(self.folder) if self.main else nullcontext():
            epochs = training.num_train_epochs
            if resume and (updates := run_folder.updates_if_finished(self.folder, training.max_steps, epochs)):
                if self.main:
                    self.out.print(Text(finished_message(self.folder, updates)))
                return 0
            checkpoint = last_complete(self.folder) if resume else None
            if self.main:
                if checkpoint is None:
                    self._check_folder()
                for path in checkpoints(self.folder) if resume else []:
                    if path == checkpoint:
                        break
                    self.warn(f"{path.name} is not complete; the one before it is used, if there is one.")
                if not self.err.is_terminal:
                    self.err.print(Text(f"loading {self.models.name} and its reference", style="dim"))
            self.recorder: Recorder | None = None
            try:
                return self._train(*build(self.settings, self.models), checkpoint)
            except Exception as error:
                has_trained = self.recorder is not None and self.recorder.has_trained
                if has_trained or (refused := refusal(error)) is None:
                    raise
                raise refused from error

    def _check_folder(self) -> None:
        """Before anything is loaded, refuse to delete results without `--overwrite`."""
        run, results = self.settings.run, run_folder.results_of_a_run(self.folder)
        if results and not run.overwrite:
            expected, remedy = "an output folder without a run", "--resume continues it, --overwrite replaces it"
            if run.resume:
                expected = "a run with a complete checkpoint to continue from, or one that has made no update"
                again = resume_command(self.settings.command, self.folder, self.settings.given, "--overwrite")
                remedy = f"copy what you need, then start the run again from the beginning: {again}"
            raise RunError(
                expected, f"{self.folder}, which has {', '.join(results)}", f"{remedy}; or give another --output_dir"
            )
        names = self.settings.policy.model_name_or_path, self.settings.training.teacher
        run_folder.check_not_replaced(self.folder, [*names, self.models.path, self.models.reference])
        if run.resume:
            self.warn(f"There is no complete checkpoint in {self.folder}; the run starts again with the same settings.")

    def _begin(self, checkpoint: Path | None) -> None:
        """Write down the settings, and delete what the run makes again: all of it, or what follows the checkpoint."""
        if checkpoint is None:
            run_folder.delete_run(self.folder)
        else:
            self.history.cut(step_of(checkpoint))
        lines = {"objective": objective, "term": formula, "scaling": scaling}
        described = {name: line for name, of in lines.items() if (line := of(self.settings)) is not None}
        run_folder.write_run(self.folder, self.settings.command, self.settings.given, described)
        where = "" if checkpoint is None else f", continuing from {checkpoint.name}"
        first = f"{self.settings.command} {self.models.name}{where}: maximises {objective(self.settings)}"
        self.err.print(Text(first, style="bold"))
        for line in objective_lines(self.settings)[1:]:
            self.err.print(Text(line, style="dim"))

    def _train(self, trainer: RunTrainer, evaluator: Evaluator, checkpoint: Path | None) -> int:
        trainer.card = model_card(self.settings, self.models)
        if self.main:
            self._begin(checkpoint)
        self.recorder = Recorder(trainer, self.history, evaluator, self.settings.run.eval_every, self.err)
        args = self.settings.training
        if checkpoint is not None and is_over(checkpoint, args.max_steps, args.num_train_epochs):
            # The run was killed between its last update and its summary.
            trainer.load_ended(checkpoint)
            self.recorder.evaluate_if_due(step_of(checkpoint), is_last=True)
            return self._finish(trainer, 0.0)
        stopping = Stopping(trainer, self.warn)
        trainer.add_callback(self.recorder)
        trainer.add_callback(stopping)
        trainer.after_update = [self.recorder.evaluate_on_schedule]  # after saving: one that fails loses no training
        started = time.monotonic()
        try:
            with stopping.listening(), self.recorder.bar:
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except KeyboardInterrupt:
            return self._stopped(stopping.received or 2)
        if stopping.received is not None and trainer.state.global_step < trainer.state.max_steps:
            return self._stopped(stopping.received)
        return self._finish(trainer, time.monotonic() - started)

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
