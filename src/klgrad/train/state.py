"""What a trainer knows beside weights, optimizer and random numbers, as JSON and safetensors: no pickle is read.

TRL forgets all of it at a checkpoint: where it is within a generation batch and that batch itself, a reference that
moves, and of ours β and the queue of old completions. A run that goes on without would not be the same run.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import write_whole
from .errors import RunError

Plain = Any
REFERENCE = "klgrad_reference.safetensors"


def save(trainer: Any, folder: Path) -> None:
    """Beside the checkpoint's own files, one pair of files for each process."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    known = {
        "processes": trainer.accelerator.num_processes,
        "step": trainer._step,
        "coefficient": trainer.coefficient.value,
        "tokens": trainer._total_train_tokens,
        "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
        "lengths": {name: trainer.__dict__.get(name) for name in ("_first_lengths", "_warned_of_lengths")},
        "buffer": None if _at_generation(trainer) else _packed(trainer._buffered_inputs, "buffer", tensors),
        "lagging": _packed(list(trainer._lagging), "lagging", tensors),
    }
    rank = trainer.accelerator.process_index
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file(tensors, folder / _tensor_file(rank))
    write_whole(folder / _state_file(rank), json.dumps(known))
    if rank == 0 and trainer.args.sync_ref_model:
        save_file(_moving_reference(trainer), folder / REFERENCE)


def restore(trainer: Any, folder: Path) -> None:
    """Put back what `save` wrote."""
    from safetensors.torch import load_file

    rank, device = trainer.accelerator.process_index, trainer.accelerator.device
    path, wanted = folder / _state_file(rank), trainer.accelerator.num_processes
    known: dict[str, Any] = {"processes": "fewer"}
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
    if known["processes"] != wanted:
        received = f"{folder.name}, of {known['processes']}"
        raise RunError(f"a checkpoint of {wanted} processes", received, "resume with as many as it was written with")
    stored = folder / _tensor_file(rank)
    tensors = {k: v.to(device) for k, v in load_file(stored).items()} if stored.is_file() else {}
    trainer._step = known["step"]
    trainer.coefficient.value = known["coefficient"]
    trainer._total_train_tokens = known["tokens"]
    trainer._metrics["train"].update({name: list(values) for name, values in known["metrics"].items()})
    trainer.__dict__.update({name: x for name, x in known["lengths"].items() if x is not None})
    trainer._buffered_inputs = _unpacked(known["buffer"], tensors)
    trainer._lagging = deque(_unpacked(known["lagging"], tensors))
    if trainer.args.sync_ref_model:
        trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(load_file(folder / REFERENCE))
    _advance_sampler(trainer)


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


def _at_generation(trainer: Any) -> bool:
    """Whether the next step samples anew, so that nothing of the last batch is needed."""
    every = trainer.args.steps_per_generation * trainer.num_iterations
    return trainer._buffered_inputs is None or trainer._step % every == 0


def _moving_reference(trainer: Any) -> dict[str, Tensor]:
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise RunError(
            "a whole reference, to save one that moves (sync_ref_model)",
            "a sharded one",
            "set sync_ref_model=False, or save_strategy='no' and no --resume",
        )
    state = trainer.accelerator.unwrap_model(trainer.ref_model).state_dict()
    return {name: x.detach().cpu().contiguous().clone() for name, x in state.items()}


def _packed(x: Any, name: str, tensors: dict[str, Tensor]) -> Plain:
    """Plain data, with each tensor put aside under its path."""
    if isinstance(x, Tensor):
        tensors[name] = x.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(x, dict):
        return {"dict": {key: _packed(value, f"{name}.{key}", tensors) for key, value in x.items()}}
    if isinstance(x, list | tuple):
        return {"list": [_packed(value, f"{name}.{i}", tensors) for i, value in enumerate(x)]}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise RunError(
        f"tensors and plain data in {name}", type(x).__name__, "save_strategy='no' trains without checkpoints"
    )


def _unpacked(x: Plain, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(x, dict):
        return x
    if "tensor" in x:
        return tensors[x["tensor"]]
    if "dict" in x:
        return {key: _unpacked(value, tensors) for key, value in x["dict"].items()}
    return [_unpacked(value, tensors) for value in x["list"]]
