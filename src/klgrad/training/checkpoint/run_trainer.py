"""`RunTrainer`: a `KLTrainer` whose checkpoints are complete or recognised as damaged, and resume exactly."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...support.atomic_files import write_whole
from ...trl import KLTrainer
from ...trl.seam.checkpoints import checkpoint_folder, load_weights, save_checkpoint, save_in_one_piece
from ...trl.state_files import load_parts, save_parts
from ..training_errors import RunError
from .integrity import rotate, seal
from .state_files import advance_sampler, load_reference, save_reference, shapes


class RunTrainer(KLTrainer):
    """Changes what is saved, and nothing about the training itself."""

    train_sampler: Any = None
    task_rewards: dict[str, float]
    """Weights of the reward functions by name, without that of the KL."""
    card: str | None = None
    """The model card, for `README.md`; None leaves it to TRL, which knows neither the base model's name nor the KL."""
    after_update: Sequence[Callable[[], None]] = ()
    """Called after each update, once it has been logged and, if due, saved."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parameter_shapes = shapes(self.model)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self.train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self.train_sampler

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(str(self.args.output_dir))

    def save_checkpoint(self) -> None:
        """Save now, regardless of the schedule."""
        save_checkpoint(self)

    def load_ended(self, checkpoint: Path) -> None:
        """Load the last checkpoint of a run, to evaluate and save its model; `train` would make one more update."""
        from transformers import TrainerState

        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise RunError("a run with updates left", f"{checkpoint}, its last", "raise max_steps, or merge its shards")
        load_weights(self, checkpoint)
        load_reference(self, checkpoint)
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))

    def save_whole_model(self, folder: Path) -> None:
        """Save unsharded weights, also where checkpoints are sharded; an existing model is replaced at the end."""
        if self.is_fsdp_enabled:
            save_in_one_piece(self)
        partial, old = (folder.with_name(f".{folder.name}.{end}") for end in ("partial", "old"))
        try:
            self._emptied(partial)
            self.save_model(str(partial))
            self.accelerator.wait_for_everyone()
        except Exception:
            self._emptied(partial, wait=False)
            raise
        if self.args.should_save:
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                os.replace(folder, old)
            os.replace(partial, folder)
            shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the card to the output folder; called with every checkpoint, and before a push to the hub."""
        if self.card is None:
            super().create_model_card(*args, **kwargs)
        elif self.args.should_save:
            write_whole(self.folder / "README.md", self.card)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        for each in self.after_update:
            each()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = checkpoint_folder(self, trial)
        self._emptied(folder)  # no file of a damaged checkpoint of this step may remain
        # `Trainer` would delete older checkpoints before this one is sealed, so `rotate` does it below.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                seal(folder)
        except Exception:
            self._emptied(folder, wait=False)  # an incomplete checkpoint is useless, and takes space
            raise
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            rotate(folder.parent, limit)

    def _emptied(self, folder: Path, *, wait: bool = True) -> None:
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)
        if wait:
            self.accelerator.wait_for_everyone()

    # A run resumes exactly or not at all, so that what cannot be saved or loaded is an error and not a warning.

    def _save_parts(self, folder: Path) -> None:
        save_parts(self, folder, parameters=self.parameter_shapes if self.accelerator.process_index == 0 else None)
        save_reference(self, folder)

    def _load_parts(self, folder: Path) -> None:
        self._restored = load_parts(self, folder)
        load_reference(self, folder)
        advance_sampler(self)
