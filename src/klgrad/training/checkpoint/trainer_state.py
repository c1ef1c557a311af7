"""A snapshot of what a trainer keeps between updates, beside weights, optimizer and random numbers.

`KLTrainer.checkpointed` is the list of it. A checkpoint stores a `snapshot` on disk (`state_files.py`); a crash
checkpoint keeps one in memory (`callbacks/crash_checkpoint.py`).
"""

from typing import Any

from ...trl import KLTrainer
from ...trl.checkpointed import load_state, state_of


def snapshot(trainer: KLTrainer) -> dict[str, Any]:
    """The trainer's state between two updates, by the names of `trainer.checkpointed`."""
    return state_of(trainer.checkpointed)


def restore(trainer: KLTrainer, known: dict[str, Any]) -> None:
    """Set the state that `snapshot` returned, in the same trainer or in one of another process."""
    load_state(trainer.checkpointed, known)


def restore_logged(trainer: KLTrainer, known: dict[str, Any]) -> None:
    """Set the part that `Trainer` resets when training begins, and that therefore has to be set again then."""
    trainer.checkpointed["loss"].load_state_dict(known["loss"])
