"""Stopping a run without losing it: by Ctrl-C, by a signal, or because something in a step failed."""

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from . import rng
from .checkpoint import fault
from .trainer import RunTrainer

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 1.0
"""Seconds in which a second signal is the same one: a launcher passes on what its processes already got."""


class Stopping(TrainerCallback):
    """Finish the update, save, and end, once a signal came; a second one ends at once.

    Between updates it notes what `state.save` would save, so that a step that fails half-way can still be saved as it
    began.
    """

    def __init__(self, trainer: RunTrainer, say: Callable[[str], None]) -> None:
        self.trainer, self.say = trainer, say
        self.received: int | None = None
        self._when = 0.0
        self._boundary: dict[str, Any] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals while training runs."""
        before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and time.monotonic() - self._when > PATIENCE:
            raise KeyboardInterrupt
        if self.received is not None:
            return
        self.received, self._when = number, time.monotonic()
        self.say("Stopping after this update; once more stops at once.")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first boundary."""
        self._note()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """From here until the step ends the weights are neither the old nor the new ones."""
        self._boundary = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """The next boundary; and, if any process was told to stop, the last."""
        self._note()
        if self._anywhere():
            control.should_save = control.should_training_stop = True
        return control

    def _anywhere(self) -> bool:
        """Processes get a signal at different moments; all must stop at the same update."""
        told = self.received is not None
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return told
        counted: Any = accelerator.reduce(torch.tensor(float(told), device=accelerator.device))
        return bool(counted > 0)

    def _note(self) -> None:
        t = self.trainer
        self._boundary = {
            "rng": rng.states(),
            "attributes": {name: t.__dict__[name] for name in ("_step", "_buffered_inputs", "_total_train_tokens")},
            "coefficient": t.coefficient.value,
            "lagging": list(t._lagging),
            "metrics": {name: list(values) for name, values in t._metrics["train"].items()},
        }

    def save_boundary(self) -> bool:
        """After a failure inside a step: save the run as it was before that step. False if that cannot be."""
        t, known = self.trainer, self._boundary
        if known is None or t.accelerator.num_processes > 1 or t.state.global_step == 0:
            return False
        folder = t.folder / f"checkpoint-{t.state.global_step}"
        if fault(folder) is None:
            return True
        t.__dict__.update(known["attributes"])
        t.coefficient.value = known["coefficient"]
        t._lagging = deque(known["lagging"])
        t._metrics["train"].clear()
        t._metrics["train"].update(known["metrics"])
        rng.set_states(known["rng"])
        t.save_checkpoint()
        return True
