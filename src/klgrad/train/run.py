"""A run from its settings to its summary."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from . import record
from .boundary import Boundary
from .build import Models, build, models_of
from .checkpoint import is_over, last_sound, put_aside, step_of
from .dry_run import described, told
from .figures import Drawn, draw
from .history import History
from .objective import formula, objective, scaling
from .progress import Recorder
from .quiet import one_voice
from .settings import Settings
from .stop import Stopping
from .summary import summarise, table_of
from .trainer import RunTrainer


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
        checkpoint = self._checkpoint()
        with record.nothing_left_by_failure(self.folder):
            if self.main and checkpoint is None:
                record.check_free(self.folder, overwrite=self.settings.run.overwrite or self.settings.run.resume)
            trainer, evaluator = build(self.settings, self.models)
        if self.main:
            self._prepare_folder(checkpoint)
            self._announce(checkpoint)
        recorder = Recorder(trainer, self.history, evaluator, self.settings.run.eval_every, self.err)
        if checkpoint is not None and is_over(checkpoint, self.settings.training.max_steps):
            trainer.load_weights(checkpoint)
            recorder.catch_up(step_of(checkpoint), is_last=True)
            return self._finish(trainer, 0.0)
        stopping, boundary = Stopping(trainer, self.warn), Boundary(trainer)
        for callback in (boundary, recorder, stopping):
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
        except Exception:
            if boundary.save() and self.main:
                safe = f"The run is safe in {self.folder} as it was after {trainer.state.global_step} updates."
                self.warn(f"{safe} {self._how_to_resume()}")
            raise
        if stopping.received is not None and trainer.state.global_step < trainer.state.max_steps:
            return self._stopped(stopping.received)
        return self._finish(trainer, time.monotonic() - started)

    def _checkpoint(self) -> Path | None:
        """Where to go on from; None to begin."""
        if not self.settings.run.resume:
            return None
        found, passed = last_sound(self.folder)
        for sentence in passed if self.main else []:
            self.warn(f"{sentence}; the one before it is used, if there is one.")
        if found is None and self.main:
            self.warn(f"No sound checkpoint is in {self.folder}; the run begins anew, with the same settings.")
        return found

    def _prepare_folder(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            record.clear(self.folder)
        else:
            self.history.cut(step_of(checkpoint))
            put_aside(self.folder, checkpoint)
        lines = ("objective", objective), ("term", formula), ("scaling", scaling)
        what = {name: line for name, said in lines if (line := said(self.settings)) is not None}
        record.write_run(self.folder, self.settings.command, self.settings.given, what)

    def _announce(self, checkpoint: Path | None) -> None:
        where = "" if checkpoint is None else f", going on from {checkpoint.name}"
        self.err.print(
            Text(
                f"{self.settings.command} {self.models.name}{where}: maximises {objective(self.settings)}", style="bold"
            )
        )
        for line in told(self.settings)[1:]:
            self.err.print(Text(line, style="dim"))

    def _stopped(self, number: int) -> int:
        if self.main:
            found, _ = last_sound(self.folder)
            at = "nothing was saved yet" if found is None else f"saved after {step_of(found)} updates in {found}"
            self.warn(f"Stopped; {at}. {self._how_to_resume()}")
        return 128 + number

    def _how_to_resume(self) -> str:
        return f"Go on with: klgrad {self.settings.command} --output_dir {self.folder} --resume"

    def _finish(self, trainer: RunTrainer, seconds: float) -> int:
        trainer.save_whole_model(self.folder / record.MODEL)
        if self.main:
            self._tell(seconds)
        return 0

    def _tell(self, seconds: float) -> None:
        summary = {**summarise(self.folder), "seconds": round(seconds, 1)}
        record.write_summary(self.folder, summary)
        draw([Drawn(self.folder.name, self.history.rows())], self.folder / record.FIGURE)
        self.out.print(table_of(summary))
        took = f" in {seconds:.0f} s" if seconds else ", and it was over already"
        self.out.print(
            f"{summary['updates']} updates{took}. In {self.folder}/: {record.MODEL}/, {record.FIGURE}, "
            f"{record.SUMMARY}, history.jsonl",
            highlight=False,
        )
