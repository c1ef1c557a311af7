"""`RunTrainer`: a `KLTrainer` whose checkpoints are whole, or told apart, and lead back to the same run."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..trl import KLTrainer
from . import state
from .checkpoint import rotate, seal
from .errors import RunError


class RunTrainer(KLTrainer):
    """Nothing about the training is changed; only what is kept of it."""

    train_sampler: Any = None
    task_rewards: dict[str, float]
    """The reward functions' weights by name, without the KL's."""
    after_update: Sequence[Callable[[], None]] = ()
    """What is done between two updates, when the one before is logged and perhaps saved."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self.train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self.train_sampler

    @property
    def folder(self) -> Path:
        """Where the run is."""
        return Path(str(self.args.output_dir))

    def save_checkpoint(self) -> None:
        """Now, whatever the schedule says."""
        self._save_checkpoint(self.model_wrapped, None)

    def load_weights(self, checkpoint: Path) -> None:
        """Of a run that is over; `train` would take one step more."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise RunError("a run with updates left", f"{checkpoint}, its last", "raise max_steps, or merge its shards")
        self._load_from_checkpoint(str(checkpoint))

    def save_whole_model(self, folder: Path) -> None:
        """In one piece, even where checkpoints are in shards."""
        if self.is_fsdp_enabled:
            plugin: Any = self.accelerator.state.fsdp_plugin
            plugin.set_state_dict_type("FULL_STATE_DICT")
        self.save_model(str(folder))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        for each in self.after_update:
            each()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one of this step must not lend its files
        self.accelerator.wait_for_everyone()
        # Older checkpoints may go only once this one is sealed, so removing them is not left to `Trainer`.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        state.save(self, folder)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(folder)
            rotate(folder.parent, limit)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            state.restore(self, Path(checkpoint))
