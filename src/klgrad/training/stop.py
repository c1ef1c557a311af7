"""Stopping a run without losing it, by Ctrl-C or by a signal."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from .run_trainer import RunTrainer

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 1.0
"""Seconds in which a second signal is the same one: a launcher passes on what its processes already got."""


class Stopping(TrainerCallback):
    """Finish the update, save, and end, once a signal came; a second one ends at once."""

    def __init__(self, trainer: RunTrainer, say: Callable[[str], None]) -> None:
        self.trainer, self.say = trainer, say
        self.received: int | None = None
        self._when = 0.0

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

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """If any process was told to stop, this was the last."""
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
