"""What a trainer knows beside weights, optimizer and random numbers, as JSON and safetensors: no pickle is read.

TRL forgets all of it at a checkpoint: where it is within a generation batch and that batch itself, a reference that
moves, and of ours β and the queue of old completions. A run that goes on without would not be the same run.

`KLTrainer.checkpointed` is the one list of it. A checkpoint is `noted` on disk; a step that fails is undone by
`put_back` (`crash_checkpoint.py`).
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..support.atomic_files import write_whole
from ..trl.checkpointed import load_state, state_of
from .packing import packed, unpacked
from .training_errors import RunError

REFERENCE = "klgrad_reference.safetensors"


def noted(trainer: Any) -> dict[str, Any]:
    """The trainer's state between two updates, by the names of `trainer.checkpointed`."""
    return state_of(trainer.checkpointed)


def put_back(trainer: Any, known: dict[str, Any]) -> None:
    """The state that `noted` gave, in this trainer or in one of another process."""
    load_state(trainer.checkpointed, known)


def put_back_logged(trainer: Any, known: dict[str, Any]) -> None:
    """The part that has to be put back again once `Trainer` has begun."""
    trainer.checkpointed["loss"].load_state_dict(known["loss"])


def save(trainer: Any, folder: Path) -> None:
    """Beside the checkpoint's own files, one pair of files for each process."""
    from safetensors.torch import save_file

    rank, tensors = trainer.accelerator.process_index, {}
    known = {
        "processes": trainer.accelerator.num_processes,
        "parameters": trainer.parameter_shapes if rank == 0 else None,
        "state": packed(noted(trainer), "state", tensors),
    }
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file(tensors, folder / _tensor_file(rank))
    write_whole(folder / _state_file(rank), json.dumps(known))
    if rank == 0 and trainer.args.sync_ref_model:
        save_file(_moving_reference(trainer), folder / REFERENCE)


def restore(trainer: Any, folder: Path) -> dict[str, Any]:
    """Put back what `save` wrote, and give it."""
    from safetensors.torch import load_file

    rank, device = trainer.accelerator.process_index, trainer.accelerator.device
    saved, wanted = _read(folder, rank) or {"processes": "fewer"}, trainer.accelerator.num_processes
    if saved["processes"] != wanted:
        received = f"{folder.name}, of {saved['processes']}"
        raise RunError(f"a checkpoint of {wanted} processes", received, "resume with as many as it was written with")
    stored = folder / _tensor_file(rank)
    tensors = {k: v.to(device) for k, v in load_file(stored).items()} if stored.is_file() else {}
    known = unpacked(saved["state"], tensors)
    put_back(trainer, known)
    restore_reference(trainer, folder)
    _advance_sampler(trainer)
    return known


def restore_reference(trainer: Any, folder: Path) -> None:
    """One that moves (`sync_ref_model`) is in the checkpoint; any other is the one that was loaded."""
    from safetensors.torch import load_file

    if trainer.args.sync_ref_model:
        trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(load_file(folder / REFERENCE))


def check_fits(trainer: Any, folder: Path) -> None:
    """Refuse a checkpoint of another model: `Trainer` would load those of its weights that have the same names."""
    theirs, ours = (_read(folder, 0) or {}).get("parameters"), trainer.parameter_shapes
    if not isinstance(theirs, dict) or theirs == ours:
        return
    name = next(name for name in (*theirs, *ours) if theirs.get(name) != ours.get(name))
    raise RunError(
        f"the model of {folder.name}, in which {name} {_spoken(theirs.get(name))}",
        f"a model in which it {_spoken(ours.get(name))}",
        "resume with the model, the layers and the adapters that the run was started with, or start another run with "
        "another --output_dir",
    )


def shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """Of all parameters, as they are when no process has a share only (`ds_shape` is DeepSpeed's name for that)."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def _spoken(shape: list[int] | None) -> str:
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


def _advance_sampler(trainer: Any) -> None:
    """TRL's sampler draws a permutation at each epoch; draw those of the epochs that are over."""
    sampler = trainer.train_sampler
    if getattr(sampler, "shuffle", False):
        for _ in range(int(trainer.state.epoch)):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def _state_file(rank: int) -> str:
    return f"klgrad_state_{rank}.json"


def _tensor_file(rank: int) -> str:
    return f"klgrad_state_{rank}.safetensors"


def _moving_reference(trainer: Any) -> dict[str, Tensor]:
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise RunError(
            "a whole reference, to save one that moves (sync_ref_model)",
            "a sharded one",
            "set sync_ref_model=False, or save_strategy='no' and no --resume",
        )
    state = trainer.accelerator.unwrap_model(trainer.ref_model).state_dict()
    return {name: x.detach().cpu().contiguous().clone() for name, x in state.items()}
