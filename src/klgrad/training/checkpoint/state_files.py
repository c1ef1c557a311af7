"""The files of a checkpoint beside `Trainer`'s own: the trainer's state as JSON and safetensors, without pickle."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...support.atomic_files import write_whole
from ..training_errors import RunError
from .trainer_state import restore, snapshot

if TYPE_CHECKING:
    from .run_trainer import RunTrainer

REFERENCE = "klgrad_reference.safetensors"


def save_state(trainer: "RunTrainer", folder: Path) -> None:
    """Write the trainer's state to a checkpoint, one pair of files for each process."""
    from safetensors.torch import save_file

    rank, tensors = trainer.accelerator.process_index, {}
    known = {
        "processes": trainer.accelerator.num_processes,
        "parameters": trainer.parameter_shapes if rank == 0 else None,
        "state": packed(snapshot(trainer), "state", tensors),
    }
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file(tensors, folder / _tensor_file(rank))
    write_whole(folder / _state_file(rank), json.dumps(known))
    if rank == 0 and trainer.args.sync_ref_model:
        save_file(_moving_reference(trainer), folder / REFERENCE)


def load_state(trainer: "RunTrainer", folder: Path) -> dict[str, Any]:
    """Restore what `save_state` wrote.

    Returns:
        The snapshot, for `restore_logged`.
    """
    from safetensors.torch import load_file

    rank, device = trainer.accelerator.process_index, trainer.accelerator.device
    saved, wanted = _read(folder, rank) or {"processes": "fewer"}, trainer.accelerator.num_processes
    if saved["processes"] != wanted:
        received = f"{folder.name}, of {saved['processes']}"
        raise RunError(f"a checkpoint of {wanted} processes", received, "resume with the number that wrote it")
    stored = folder / _tensor_file(rank)
    tensors = {k: v.to(device) for k, v in load_file(stored).items()} if stored.is_file() else {}
    known = unpacked(saved["state"], tensors)
    restore(trainer, known)
    load_reference(trainer, folder)
    _advance_sampler(trainer)
    return known


def load_reference(trainer: "RunTrainer", folder: Path) -> None:
    """Load the reference from a checkpoint if it moves (`sync_ref_model`); otherwise it is loaded already."""
    from safetensors.torch import load_file

    if trainer.args.sync_ref_model:
        trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(load_file(folder / REFERENCE))


def check_fits(trainer: "RunTrainer", folder: Path) -> None:
    """Refuse a checkpoint of another model: `Trainer` would load those weights that have the same names."""
    theirs, ours = (_read(folder, 0) or {}).get("parameters"), trainer.parameter_shapes
    if not isinstance(theirs, dict) or theirs == ours:
        return
    name = next(name for name in (*theirs, *ours) if theirs.get(name) != ours.get(name))
    raise RunError(
        f"the model of {folder.name}, in which {name} {_in_words(theirs.get(name))}",
        f"a model in which it {_in_words(ours.get(name))}",
        "resume with the model, the layers and the adapters that the run was started with, or start another run with "
        "another --output_dir",
    )


def shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """The full shape of every parameter; `ds_shape` is DeepSpeed's name for it where parameters are sharded."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def packed(x: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Nested data as JSON; each tensor is moved to `tensors` under its path.

    Example:
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


def _in_words(shape: list[int] | None) -> str:
    return "is missing" if shape is None else f"has shape {tuple(shape)}"


def _read(folder: Path, rank: int) -> dict[str, Any] | None:
    path = folder / _state_file(rank)
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or "processes" not in found or "state" not in found:
        received = f"{path}, which has no state of a run"
        raise RunError("a checkpoint of this version of klgrad", received, "resume with the version that wrote it")
    return found


def _advance_sampler(trainer: "RunTrainer") -> None:
    """Draw the permutations of completed epochs: TRL's sampler draws one per epoch, and restarts at the first."""
    sampler = trainer.train_sampler
    if getattr(sampler, "shuffle", False):
        for _ in range(int(trainer.state.epoch)):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def _state_file(rank: int) -> str:
    return f"klgrad_state_{rank}.json"


def _tensor_file(rank: int) -> str:
    return f"klgrad_state_{rank}.safetensors"


def _moving_reference(trainer: "RunTrainer") -> dict[str, Tensor]:
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise RunError(
            "a reference on one device, to save one that moves (sync_ref_model)",
            "a sharded one",
            "set sync_ref_model=False, or save_strategy='no' and do not use --resume",
        )
    state = trainer.accelerator.unwrap_model(trainer.ref_model).state_dict()
    return {name: x.detach().cpu().contiguous().clone() for name, x in state.items()}
