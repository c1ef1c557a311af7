"""The list of what a trainer keeps between updates, beside weights, optimizer and random numbers.

TRL's checkpoints do not contain it: the position within a generation batch and that batch itself, and, of this
package, the adapted β and the queue of old completions. A run that is resumed without it would differ.

A checkpoint stores a `snapshot` on disk (`state_files.py`); a crash checkpoint keeps one in memory
(`callbacks/crash_checkpoint.py`).
"""

from collections import deque
from typing import Any

from torch import Tensor

ATTRIBUTES = (
    "_step",  # the next micro-batch of the generation batch
    "_generations",  # the number of generations so far, which distinguishes the prompts of one update
    "_total_train_tokens",
    "_first_lengths",  # for the warning about collapsing lengths
    "_warned_of_lengths",
)
ADAPTIVE_ENTROPY = ("entropy_coef", "_last_world_entropy")
LOGGED = ("_tr_loss", "_globalstep_last_logged")
"""The loss since the last logged row. `Trainer` sets both to 0 after it has loaded a checkpoint."""


def snapshot(trainer: Any) -> dict[str, Any]:
    """The trainer's state between two updates, by name. Values that later change in place are copied."""
    names = [*ATTRIBUTES, *(ADAPTIVE_ENTROPY if trainer.use_adaptive_entropy else ())]
    logged = {name: trainer.__dict__[name] for name in LOGGED if name in trainer.__dict__}
    return {
        "attributes": {name: trainer.__dict__[name] for name in names if name in trainer.__dict__},
        "logged": {name: x.clone() if isinstance(x, Tensor) else x for name, x in logged.items()},
        "seen": trainer.state.num_input_tokens_seen,
        "coefficient": trainer.coefficient.value,
        "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
        "buffer": None if _at_generation(trainer) else trainer._buffered_inputs,
        "lagging": list(trainer._lagging),
    }


def restore(trainer: Any, known: dict[str, Any]) -> None:
    """Set the state that `snapshot` returned, in the same trainer or in one of another process."""
    for name in (*ATTRIBUTES, *known["attributes"]):
        if name in known["attributes"]:
            trainer.__dict__[name] = known["attributes"][name]
        else:
            trainer.__dict__.pop(name, None)
    trainer.state.num_input_tokens_seen = known["seen"]
    if trainer.coefficient.target is not None:  # a constant β is a setting, which --resume may change
        trainer.coefficient.value = known["coefficient"]
    trainer._metrics["train"].clear()
    trainer._metrics["train"].update({name: list(values) for name, values in known["metrics"].items()})
    trainer._buffered_inputs = known["buffer"]
    trainer._lagging = deque(known["lagging"])
    restore_logged(trainer, known)


def restore_logged(trainer: Any, known: dict[str, Any]) -> None:
    """Set the part that `Trainer` resets when training begins, and that therefore has to be set again then."""
    for name, value in known["logged"].items():
        trainer.__dict__[name] = value.clone() if isinstance(value, Tensor) else value


def _at_generation(trainer: Any) -> bool:
    """Whether the next step samples a new batch, so that the last one is not needed."""
    every = trainer.args.steps_per_generation * trainer.num_iterations
    return trainer._buffered_inputs is None or trainer._step % every == 0
