"""Checkpoints that a run continues from without a difference."""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..errors import RunError
from ..integrations import lend
from ..support import Model, write_whole
from ..trl import KLTrainer
from ..trl.compat import checkpoint_folder, load_parts, load_weights, save_parts

REFERENCE = "klgrad_reference.safetensors"
"""The reference, in a checkpoint of a run in which it moves (`sync_ref_model`)."""

# Which checkpoints of a run are complete.
#
# transformers' `get_last_checkpoint` and `rotate_checkpoints` go by step numbers alone: they would resume from a
# checkpoint that a kill has cut off, and count it among those to keep.

SEAL, STATE = "klgrad_manifest.json", "trainer_state.json"
"""The file that is written last, and transformers' state."""
NAME = re.compile(r"checkpoint-(\d+)$")


def is_complete(folder: Path) -> bool:
    return (folder / SEAL).is_file()


def checkpoints(output: Path) -> list[Path]:
    """Checkpoint folders of a run, complete or not, the newest first."""
    return sorted((p for p in output.glob("checkpoint-*") if NAME.match(p.name) and p.is_dir()), key=step_of)[::-1]


def last_complete(output: Path) -> Path | None:
    return next(filter(is_complete, checkpoints(output)), None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def is_over(checkpoint: Path, max_steps: int, num_train_epochs: float) -> bool:
    """Whether a run with these settings has no update left after this checkpoint.

    For `max_steps` <= 0 the epochs decide. A run that was planned by `max_steps` before is not over by that plan.
    """
    step = step_of(checkpoint)
    if max_steps > 0:
        return step >= max_steps
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    if step < state["max_steps"]:
        return False
    return state["epoch"] * (1 + 1 / max(step, 1)) > num_train_epochs  # less than one update is left


def rotate(output: Path, keep: int | None) -> None:
    """Delete checkpoints older than the newest `keep` complete ones. Call it after the newest is complete."""
    complete = 0
    for path in checkpoints(output) if keep else []:
        if complete == keep:
            shutil.rmtree(path, ignore_errors=True)
        complete += is_complete(path)


class RunTrainer(KLTrainer):
    """A `KLTrainer` whose checkpoints are complete or recognised as incomplete, and resume exactly.

    Attributes:
        task_rewards: weights of the reward functions by name, without that of the KL.
        card: the model card, for `README.md`.
        after_update: called after each update, once it has been logged and, if due, saved.
    """

    train_sampler: Any = None
    task_rewards: dict[str, float]
    card: str = ""
    after_update: Sequence[Callable[[], None]] = ()

    def _get_train_sampler(self, *args: object, **kwargs: object) -> object:
        self.train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self.train_sampler

    @property
    def folder(self) -> Path:
        return Path(str(self.args.output_dir))

    def load_ended(self, checkpoint: Path) -> None:
        """Load the last checkpoint of a run, to evaluate and save its model; `train` would make one more update."""
        from transformers import TrainerState

        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise RunError("a run with updates left", f"{checkpoint}, its last", "raise max_steps, or merge its shards")
        load_weights(self, checkpoint)
        self._load_reference(checkpoint)
        self.state = TrainerState.load_from_json(str(checkpoint / STATE))

    def save_whole_model(self, folder: Path) -> None:
        """Save unsharded weights, also where checkpoints are sharded; an existing model is replaced at the end."""
        if self.is_fsdp_enabled:
            plugin: Any = self.accelerator.state.fsdp_plugin
            plugin.set_state_dict_type("FULL_STATE_DICT")  # not in shards
        partial, old = (folder.with_name(f".{folder.name}.{end}") for end in ("partial", "old"))
        self._remove(partial)
        try:
            self.save_model(str(partial))
            if self.args.should_save:
                write_whole(partial / "README.md", self.card)
            self.accelerator.wait_for_everyone()
        except Exception:
            self._remove(partial, wait=False)
            raise
        if self.args.should_save:
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                os.replace(folder, old)
            os.replace(partial, folder)
            shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Write the card to the output folder; called with every checkpoint, and before a push to the hub."""
        if self.args.should_save:
            write_whole(self.folder / "README.md", self.card)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        for action in self.after_update:
            action()

    def _save_checkpoint(self, model: Model, trial: object) -> None:
        folder = checkpoint_folder(self, trial)
        self._remove(folder)  # no file of an incomplete checkpoint of this step may remain
        # `Trainer` would delete older checkpoints before this one is complete, so `rotate` does it below.
        try:
            with lend(self.args, save_total_limit=None):
                super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                write_whole(folder / SEAL, "{}")
        except Exception:
            self._remove(folder, wait=False)  # an incomplete checkpoint is useless, and takes space
            raise
        if self.args.should_save:
            rotate(folder.parent, self.args.save_total_limit)

    def _remove(self, folder: Path, *, wait: bool = True) -> None:
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)
        if wait:
            self.accelerator.wait_for_everyone()

    # A run resumes exactly or not at all, so that what cannot be saved or loaded is an error and not a warning.

    def _save_parts(self, folder: Path) -> None:
        save_parts(self, folder)
        if self.accelerator.process_index or not self.args.sync_ref_model:
            return
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise RunError(
                "a reference on one device, to save one that moves (sync_ref_model)",
                "a sharded one",
                "set sync_ref_model=False, or save_strategy='no' and do not use --resume",
            )
        weights = self.accelerator.unwrap_model(self.ref_model).state_dict()
        weights = {name: x.detach().cpu().contiguous().clone() for name, x in weights.items()}
        save_file(weights, folder / REFERENCE)

    def _load_parts(self, folder: Path) -> None:
        self._restored = load_parts(self, folder)
        self._load_reference(folder)
        sampler = self.train_sampler
        if getattr(sampler, "shuffle", False):  # TRL's sampler draws a permutation per epoch, and restarts at the first
            for _ in range(int(self.state.epoch)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)

    def _load_reference(self, folder: Path) -> None:
        if self.args.sync_ref_model:  # one that stays is loaded already
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(load_file(folder / REFERENCE))
