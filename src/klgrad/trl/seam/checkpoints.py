"""The files of a checkpoint, where transformers has no public name for them.

Touches `Trainer._save_checkpoint`, `_get_output_dir` and `_load_from_checkpoint`, and accelerate's `fsdp_plugin`.
"""

from pathlib import Path
from typing import Any

from trl.trainer.grpo_trainer import GRPOTrainer


def checkpoint_folder(trainer: GRPOTrainer, trial: Any) -> Path:
    """Where `Trainer` writes the checkpoint of this step."""
    return Path(trainer._get_output_dir(trial)) / f"checkpoint-{trainer.state.global_step}"


def save_checkpoint(trainer: GRPOTrainer) -> None:
    """Write a checkpoint now, by the trainer's own method."""
    model: Any = trainer.model_wrapped
    trainer._save_checkpoint(model, None)


def load_weights(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Load the model's weights, and nothing else, from a checkpoint."""
    trainer._load_from_checkpoint(str(checkpoint))


def save_in_one_piece(trainer: GRPOTrainer) -> None:
    """Under FSDP, save the model whole from now on, and not in shards."""
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    plugin.set_state_dict_type("FULL_STATE_DICT")
