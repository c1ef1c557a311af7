"""Write a run's files only after the first update of a new process.

Until then a setting, a model or a reward function may turn out to be unusable. A run that was in the folder must then
be unchanged.
"""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..checkpoint.integrity import rename_damaged, step_of
from ..output.describe import formula, objective, scaling
from ..run_folder import record, replace
from ..run_folder.history import History
from ..settings.run_config import Settings


class Adoption(TrainerCallback):
    """Main process only: after the first update, write `run.json`, cut the history, rename damaged checkpoints."""

    def __init__(self, settings: Settings, history: History, checkpoint: Path | None) -> None:
        self.settings, self.history, self.checkpoint = settings, history, checkpoint
        self.folder = history.path.parent
        self._wrote = self._done = False

    def prepare(self) -> None:
        """Before training: hold the history in memory, and set an old run aside if a new one starts."""
        self.history.hold()
        if self.checkpoint is not None:
            return
        replace.set_aside(self.folder, keep=(record.RUN,) if self.settings.run.resume else ())
        if not (self.folder / record.RUN).exists():  # so that --resume works after a kill before the first update
            self._write_run()
            self._wrote = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the first update, before it is logged or saved."""
        if not self._done:
            self._done = True
            self.release()
            self._write_run()
            replace.drop_replaced(self.folder)

    def release(self) -> None:
        """Cut the history at the checkpoint, and rename later checkpoints, which are damaged."""
        self.history.release(0 if self.checkpoint is None else step_of(self.checkpoint))
        if self.checkpoint is not None:
            rename_damaged(self.folder, self.checkpoint)

    def withdraw(self) -> None:
        """After a failure before the first update: remove what was written, and restore the old run."""
        if self._done:
            return
        if self._wrote:
            (self.folder / record.RUN).unlink(missing_ok=True)
        replace.put_back(self.folder)

    def _write_run(self) -> None:
        lines = {"objective": objective, "term": formula, "scaling": scaling}
        described = {name: line for name, of in lines.items() if (line := of(self.settings)) is not None}
        record.write_run(self.folder, self.settings.command, self.settings.given, described)
