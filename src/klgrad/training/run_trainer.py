"""`RunTrainer`: a `KLTrainer` whose checkpoints are whole, or told apart, and lead back to the same run."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..trl import KLTrainer
from ..trl.seam.checkpoints import checkpoint_folder, load_weights, save_checkpoint, save_in_one_piece
from . import checkpoint_state as state
from .checkpoint import rotate, seal
from .training_errors import RunError


class RunTrainer(KLTrainer):
    """Nothing about the training is changed; only what is kept of it."""

    train_sampler: Any = None
    task_rewards: dict[str, float]
    """The reward functions' weights by name, without the KL's."""
    after_update: Sequence[Callable[[], None]] = ()
    """What is done between two updates, when the one before is logged and perhaps saved."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parameter_shapes = state.shapes(self.model)
        self._restored: dict[str, Any] | None = None

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self.train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self.train_sampler

    @property
    def folder(self) -> Path:
        """Where the run is."""
        return Path(str(self.args.output_dir))

    def save_checkpoint(self) -> None:
        """Now, whatever the schedule says."""
        save_checkpoint(self)

    def load_ended(self, checkpoint: Path) -> None:
        """A run that is over, to evaluate and to save it; `train` would take one step more."""
        from transformers import TrainerState

        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise RunError("a run with updates left", f"{checkpoint}, its last", "raise max_steps, or merge its shards")
        load_weights(self, checkpoint)
        state.restore_reference(self, checkpoint)
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))

    def save_whole_model(self, folder: Path) -> None:
        """In one piece, even where checkpoints are in shards. A model that is there stays until this one is whole."""
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

    def put_back_logged(self) -> None:
        """What `Trainer` forgot on its way from the checkpoint to the first step."""
        if self._restored is not None:
            state.put_back_logged(self, self._restored)
            self._restored = None

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        for each in self.after_update:
            each()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = checkpoint_folder(self, trial)
        self._emptied(folder)  # a damaged one of this step must not lend its files
        # Older checkpoints may go only once this one is sealed, so removing them is not left to `Trainer`.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
            state.save(self, folder)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                seal(folder)
        except Exception:
            self._emptied(folder, wait=False)  # half of a checkpoint is of no use, and takes room
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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._restored = state.restore(self, Path(checkpoint))
