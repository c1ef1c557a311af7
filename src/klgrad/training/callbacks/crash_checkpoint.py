"""After a failure within a step, save the run as it was after the last complete update."""

from typing import Any

from transformers import TrainerCallback

from ...trl.checkpointed import load_state, state_of
from .. import rng
from ..checkpoint.integrity import fault
from ..checkpoint.run_trainer import RunTrainer


class CrashCheckpoint(TrainerCallback):
    """Takes a snapshot between updates, from which a checkpoint can be written after a failure."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer
        self.began = False
        self._known: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the first snapshot."""
        self.began = True
        self.trainer.restore_logged()
        self.note()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Discard the snapshot: until the step ends, the weights match neither the old nor the new state."""
        self._known = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the next one. `note` is called again after logging, so that no metric is logged twice."""
        self.note()

    def note(self) -> None:
        """Take a snapshot of everything but weights and optimizer, which change only at the end of the next step."""
        self._known = {"rng": rng.states(), "state": state_of(self.trainer.checkpointed)}

    def save(self) -> bool:
        """Write a checkpoint from the snapshot.

        Returns:
            Whether there is a checkpoint of the last complete update; False if it cannot be written.
        """
        t, known = self.trainer, self._known
        if known is None or t.accelerator.num_processes > 1 or t.state.global_step == 0:
            return False
        folder = t.folder / f"checkpoint-{t.state.global_step}"
        if fault(folder) is None:
            return True
        load_state(t.checkpointed, known["state"])
        rng.set_states(known["rng"])
        t.save_checkpoint()
        return True
