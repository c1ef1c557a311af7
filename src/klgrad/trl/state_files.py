"""State of a trainer that TRL's checkpoints leave out, as files beside the checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..errors import RunError
from ..support import write_whole

if TYPE_CHECKING:
    from .kl_trainer import KLTrainer


# What a checkpoint has to keep beside weights, optimizer and random numbers: named parts, each with its state.
#
# `KLTrainer.checkpointed` is the one list of these parts. transformers' `ExportableState` does not fit: it makes new
# objects from JSON of the first process, and these parts hold tensors, differ between processes, and are in use.


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


# The files that a checkpoint has beside `Trainer`'s own: the parts of `KLTrainer`, as JSON and safetensors.


def save_parts(trainer: "KLTrainer", folder: Path, **more: Any) -> None:
    """Write the state of `trainer.checkpointed` to a checkpoint, one pair of files for each process.

    Args:
        trainer: the trainer.
        folder: the checkpoint.
        more: further plain data of this process.
    """
    from safetensors.torch import save_file

    rank, tensors = trainer.accelerator.process_index, {}
    state = packed(state_of(trainer.checkpointed), "state", tensors)
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file(tensors, folder / _tensor_file(rank))
    known = {"processes": trainer.accelerator.num_processes, **more, "state": state}
    write_whole(folder / _state_file(rank), json.dumps(known))


def load_parts(trainer: "KLTrainer", folder: Path) -> dict[str, Any]:
    """Let `trainer.checkpointed` continue from what `save_parts` wrote.

    Returns:
        The state of all parts.

    Raises:
        RunError: there is no state of as many processes.
    """
    from safetensors.torch import load_file

    rank, device = trainer.accelerator.process_index, trainer.accelerator.device
    saved, wanted = read_state(folder, rank) or {"processes": "fewer"}, trainer.accelerator.num_processes
    if saved["processes"] != wanted:
        received = f"{folder.name}, of {saved['processes']}"
        raise RunError(f"a checkpoint of {wanted} processes", received, "resume with the number that wrote it")
    stored = folder / _tensor_file(rank)
    tensors = {k: v.to(device) for k, v in load_file(stored).items()} if stored.is_file() else {}
    known: dict[str, Any] = unpacked(saved["state"], tensors)
    load_state(trainer.checkpointed, known)
    return known


def read_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """What `save_parts` wrote for one process, with tensors as their names; None if it wrote nothing."""
    path = folder / _state_file(rank)
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or "processes" not in found or "state" not in found:
        received = f"{path}, which has no state of a run"
        raise RunError("a checkpoint of this version of klgrad", received, "resume with the version that wrote it")
    return found


def packed(x: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Nested data as JSON; each tensor is moved to `tensors` under its path.

    Example:
        >>> import torch
        >>> tensors = {}
        >>> packed({"step": 3, "ids": torch.tensor([1, 2])}, "state", tensors)
        {'dict': {'step': 3, 'ids': {'tensor': 'state.ids'}}}
        >>> tensors
        {'state.ids': tensor([1, 2])}
    """
    if isinstance(x, Tensor):
        tensors[name] = x.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(x, dict):
        return {"dict": {key: packed(value, f"{name}.{key}", tensors) for key, value in x.items()}}
    if isinstance(x, list | tuple):
        return {"list": [packed(value, f"{name}.{i}", tensors) for i, value in enumerate(x)]}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise RunError(
        f"tensors and plain data in {name}", type(x).__name__, "save_strategy='no' trains without checkpoints"
    )


def unpacked(x: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `packed`, except that tuples become lists."""
    if not isinstance(x, dict):
        return x
    if "tensor" in x:
        return tensors[x["tensor"]]
    if "dict" in x:
        return {key: unpacked(value, tensors) for key, value in x["dict"].items()}
    return [unpacked(value, tensors) for value in x["list"]]


def _state_file(rank: int) -> str:
    return f"klgrad_state_{rank}.json"


def _tensor_file(rank: int) -> str:
    return f"klgrad_state_{rank}.safetensors"
