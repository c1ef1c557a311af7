"""State of a trainer that TRL's checkpoints leave out, in one file per process beside the checkpoint."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy
import torch

from ..errors import RunError
from ..support import Json, write_whole

if TYPE_CHECKING:
    from .kl_trainer import KLTrainer

# transformers' `ExportableState` does not fit: it makes new objects from JSON of the first process, and these parts
# hold tensors, differ between processes, and are in use.


class Checkpointed(Protocol):
    """A part of a trainer that survives a checkpoint; the state is plain data and tensors, and is not changed later."""

    def state_dict(self) -> Json:
        """The state between two updates."""
        ...

    def load_state_dict(self, state: Json) -> None:
        """Continue from a state."""
        ...


Parts = Mapping[str, Checkpointed]


def save_parts(trainer: "KLTrainer", folder: Path) -> None:
    """Write the state of `trainer.checkpointed` to a checkpoint."""
    state = {name: plain(part.state_dict()) for name, part in trainer.checkpointed.items()}
    content = io.BytesIO()
    torch.save({"processes": trainer.accelerator.num_processes, "state": state}, content)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(state_file(folder, trainer.accelerator.process_index), content.getvalue())


def load_parts(trainer: "KLTrainer", folder: Path) -> Json:
    """Let `trainer.checkpointed` continue from what `save_parts` wrote, which is returned.

    It must have been written by as many processes. No code in the file is executed.
    """
    accelerator = trainer.accelerator
    path = state_file(folder, accelerator.process_index)
    saved: Json = {"processes": "fewer"}
    if path.is_file():
        saved = torch.load(path, map_location=accelerator.device, weights_only=True)
    if saved["processes"] != accelerator.num_processes:
        expected, received = f"a checkpoint of {accelerator.num_processes} processes", f"of {saved['processes']}"
        raise RunError(expected, f"{folder.name}, {received}", "resume with the number that wrote it")
    for name, part in trainer.checkpointed.items():
        part.load_state_dict(saved["state"][name])
    return saved["state"]


def plain(x: object) -> object:
    """Nested data with Python's numbers in the place of NumPy's, which `torch.load` refuses.

    Example:
        >>> plain({"step": 3, "rewards": [numpy.float64(0.5), None]})
        {'step': 3, 'rewards': [0.5, None]}
    """
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    return x.item() if isinstance(x, numpy.generic) else x


def state_file(folder: Path, rank: int) -> Path:
    return folder / f"klgrad_state_{rank}.pt"
