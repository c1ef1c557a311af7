"""What a checkpoint of a run has beside those of `KLTrainer`: the reference if it moves, and shapes to compare."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...trl.state_files import read_state
from ..training_errors import RunError

if TYPE_CHECKING:
    from .run_trainer import RunTrainer

REFERENCE = "klgrad_reference.safetensors"


def save_reference(trainer: "RunTrainer", folder: Path) -> None:
    """Write the reference to a checkpoint if it moves (`sync_ref_model`)."""
    from safetensors.torch import save_file

    if trainer.accelerator.process_index == 0 and trainer.args.sync_ref_model:
        save_file(_moving_reference(trainer), folder / REFERENCE)


def load_reference(trainer: "RunTrainer", folder: Path) -> None:
    """Load the reference from a checkpoint if it moves (`sync_ref_model`); otherwise it is loaded already."""
    from safetensors.torch import load_file

    if trainer.args.sync_ref_model:
        trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(load_file(folder / REFERENCE))


def check_fits(trainer: "RunTrainer", folder: Path) -> None:
    """Refuse a checkpoint of another model: `Trainer` would load those weights that have the same names."""
    theirs, ours = (read_state(folder, 0) or {}).get("parameters"), trainer.parameter_shapes
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


def _in_words(shape: list[int] | None) -> str:
    return "is missing" if shape is None else f"has shape {tuple(shape)}"


def advance_sampler(trainer: "RunTrainer") -> None:
    """Draw the permutations of completed epochs: TRL's sampler draws one per epoch, and restarts at the first."""
    sampler = trainer.train_sampler
    if getattr(sampler, "shuffle", False):
        for _ in range(int(trainer.state.epoch)):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def _moving_reference(trainer: "RunTrainer") -> dict[str, Tensor]:
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise RunError(
            "a reference on one device, to save one that moves (sync_ref_model)",
            "a sharded one",
            "set sync_ref_model=False, or save_strategy='no' and do not use --resume",
        )
    state = trainer.accelerator.unwrap_model(trainer.ref_model).state_dict()
    return {name: x.detach().cpu().contiguous().clone() for name, x in state.items()}
