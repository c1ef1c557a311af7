"""Stop a run by Ctrl-C or SIGTERM after the current update, with a checkpoint."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from ..checkpoint.run_trainer import RunTrainer

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL = 1.0
"""Seconds within which a second signal is ignored: launchers send on what their processes have received already."""


class Stopping(TrainerCallback):
    """After a signal, finish the update, save, and stop; a second signal stops at once."""

    def __init__(self, trainer: RunTrainer, say: Callable[[str], None]) -> None:
        self.trainer, self.say = trainer, say
        self.received: int | None = None
        self._when = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block."""
        before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and time.monotonic() - self._when > SAME_SIGNAL:
            raise KeyboardInterrupt
        if self.received is not None:
            return
        self.received, self._when = number, time.monotonic()
        self.say("Stopping after this update; press Ctrl-C again to stop at once.")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Save and stop if any process has received a signal."""
        if self._anywhere():
            control.should_save = control.should_training_stop = True
        return control

    def _anywhere(self) -> bool:
        """Whether any process has: they receive signals at different moments, and must stop at the same update."""
        here = self.received is not None
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return here
        counted: Any = accelerator.reduce(torch.tensor(float(here), device=accelerator.device))
        return bool(counted > 0)
