"""What a checkpoint has to keep beside weights, optimizer and random numbers: named parts, each with its state.

`KLTrainer.checkpointed` is the one list of these parts. transformers' `ExportableState` does not fit: it makes new
objects from JSON of the first process, and these parts hold tensors, differ between processes, and are in use.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class Checkpointed(Protocol):
    """A part of a trainer that survives a checkpoint; the state is plain data and tensors, and is not changed later."""

    def state_dict(self) -> dict[str, Any]:
        """The state between two updates."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        ...


Parts = Mapping[str, Checkpointed]


def state_of(parts: Parts) -> dict[str, Any]:
    """The state of all parts, by name."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_state(parts: Parts, state: Mapping[str, Any]) -> None:
    """Let all parts continue from what `state_of` returned."""
    for name, part in parts.items():
        part.load_state_dict(state[name])
