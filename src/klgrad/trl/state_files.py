"""State of a trainer that TRL's checkpoints leave out, in one file per process beside the checkpoint."""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..errors import RunError
from ..support import Json, write_whole

if TYPE_CHECKING:
    from .kl_trainer import KLTrainer


# What a checkpoint has to keep beside weights, optimizer and random numbers: named parts, each with its state.
#
# `KLTrainer.checkpointed` is the one list of these parts. transformers' `ExportableState` does not fit: it makes new
# objects from JSON of the first process, and these parts hold tensors, differ between processes, and are in use.


class Checkpointed(Protocol):
    """A part of a trainer that survives a checkpoint; the state is plain data and tensors, and is not changed later."""

    def state_dict(self) -> Json:
        """The state between two updates."""
        ...

    def load_state_dict(self, state: Json) -> None:
        """Continue from a state."""
        ...


Parts = Mapping[str, Checkpointed]


def state_of(parts: Parts) -> Json:
    """The state of all parts, by name."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_state(parts: Parts, state: Json) -> None:
    """Let all parts continue from what `state_of` returned."""
    for name, part in parts.items():
        part.load_state_dict(state[name])


# The file that a checkpoint has beside `Trainer`'s own, for each process.


def save_parts(trainer: "KLTrainer", folder: Path, **more: object) -> None:
    """Write the state of `trainer.checkpointed` to a checkpoint, and `more` plain data of this process."""
    state = {"processes": trainer.accelerator.num_processes, **more, "state": state_of(trainer.checkpointed)}
    content = io.BytesIO()
    torch.save({name: plain(x, name) for name, x in state.items()}, content)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_state_file(folder, trainer.accelerator.process_index), content.getvalue())


def load_parts(trainer: "KLTrainer", folder: Path) -> Json:
    """Let `trainer.checkpointed` continue from what `save_parts` wrote, which is returned.

    It must have been written by as many processes.
    """
    accelerator = trainer.accelerator
    saved = read_state(folder, accelerator.process_index, accelerator.device) or {"processes": "fewer"}
    if saved["processes"] != accelerator.num_processes:
        expected, received = f"a checkpoint of {accelerator.num_processes} processes", f"of {saved['processes']}"
        raise RunError(expected, f"{folder.name}, {received}", "resume with the number that wrote it")
    load_state(trainer.checkpointed, saved["state"])
    return saved["state"]


def read_state(folder: Path, rank: int, device: str | torch.device = "cpu") -> Json | None:
    """What `save_parts` wrote for one process; None if it wrote nothing. No code in the file is executed."""
    path = _state_file(folder, rank)
    if not path.is_file():
        return None
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        return {"processes": saved["processes"], "state": saved["state"], **saved}
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError) as error:
        received = f"{path}, which has no state of a run"
        remedy = "resume with the version that wrote it"
        raise RunError("a checkpoint of this version of klgrad", received, remedy) from error


def plain(x: object, name: str) -> object:
    """Nested data of tensors, numbers and text, which `torch.load` reads without running code; tuples become lists.

    Example:
        >>> plain({"step": 3, "entropy": (0.5, None)}, "state")
        {'step': 3, 'entropy': [0.5, None]}
    """
    if x is None or isinstance(x, Tensor):
        return x
    for kind in (bool, int, float, str):  # a number of NumPy is no plain one
        if isinstance(x, kind):
            return kind(x)
    if isinstance(x, dict):
        return {key: plain(value, f"{name}.{key}") for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value, f"{name}.{i}") for i, value in enumerate(x)]
    raise RunError(
        f"tensors and plain data in {name}", type(x).__name__, "save_strategy='no' trains without checkpoints"
    )


def _state_file(folder: Path, rank: int) -> Path:
    return folder / f"klgrad_state_{rank}.pt"
