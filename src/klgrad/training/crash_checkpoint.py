"""A run that fails within a step, or right after it, is saved as it was between two steps."""

from typing import Any

from transformers import TrainerCallback

from . import checkpoint_state as state, rng
from .checkpoint import fault
from .run_trainer import RunTrainer


class Boundary(TrainerCallback):
    """Notes between updates what `state.save` would save, so that what fails later can be saved as it began."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer
        self.began = False
        self._known: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first."""
        self.began = True
        self.trainer.put_back_logged()
        self.note()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """From here until the step ends the weights are neither the old nor the new ones."""
        self._known = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The next; noted again when its metrics were logged, which would else be logged twice."""
        self.note()

    def note(self) -> None:
        """Everything but the weights and the optimizer, which do not change until the next step's end."""
        self._known = {"rng": rng.states(), "state": state.noted(self.trainer)}

    def save(self) -> bool:
        """After a failure: the run as it was at the last boundary. False if that cannot be."""
        t, known = self.trainer, self._known
        if known is None or t.accelerator.num_processes > 1 or t.state.global_step == 0:
            return False
        folder = t.folder / f"checkpoint-{t.state.global_step}"
        if fault(folder) is None:
            return True
        state.put_back(t, known["state"])
        rng.set_states(known["rng"])
        t.save_checkpoint()
        return True
