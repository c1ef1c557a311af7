"""A run's folder takes on what a new process brings once that process has trained: not before the first update.

Until then a setting, a model or a reward may turn out to be impossible. A run that was there must then be as it was.
"""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from . import run_folder as record
from .checkpoint import put_aside, step_of
from .describe import formula, objective, scaling
from .history import History
from .settings import Settings


class Adoption(TrainerCallback):
    """In the main process: the first update writes `run.json`, cuts the history and puts damaged checkpoints aside."""

    def __init__(self, settings: Settings, history: History, checkpoint: Path | None) -> None:
        self.settings, self.history, self.checkpoint = settings, history, checkpoint
        self.folder = history.path.parent
        self._wrote = self._done = False

    def prepare(self) -> None:
        """Before training: hold the history back, and make room for a run that begins."""
        self.history.hold()
        if self.checkpoint is not None:
            return
        record.set_aside(self.folder, keep=(record.RUN,) if self.settings.run.resume else ())
        if not (self.folder / record.RUN).exists():  # a run that is killed before its first update can begin again
            self._write_run()
            self._wrote = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the first update, before it is logged or saved."""
        if not self._done:
            self._done = True
            self.release()
            self._write_run()
            record.drop_replaced(self.folder)

    def release(self) -> None:
        """The history up to the checkpoint and from there on; later checkpoints are damaged, and put aside."""
        self.history.release(0 if self.checkpoint is None else step_of(self.checkpoint))
        if self.checkpoint is not None:
            put_aside(self.folder, self.checkpoint)

    def withdraw(self) -> None:
        """After a failure: a run that came to no update leaves nothing."""
        if self._done:
            return
        if self._wrote:
            (self.folder / record.RUN).unlink(missing_ok=True)
        record.put_back(self.folder)

    def _write_run(self) -> None:
        lines = ("objective", objective), ("term", formula), ("scaling", scaling)
        what = {name: line for name, said in lines if (line := said(self.settings)) is not None}
        record.write_run(self.folder, self.settings.command, self.settings.given, what)
