"""Which completions are of the same prompt, on all processes."""

import math
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from .config import KLConfig
from .seam.batch import Batch
from .seam.state import current_mode
from .seam.version import ContractError


class PromptNumbers:
    """Numbers the prompts of completions, so that two have the same number only if they are of the same prompt.

    TRL generates `num_generations` completions of each prompt in adjacent rows, counted over all processes.
    """

    def __init__(self, trainer: GRPOTrainer, args: KLConfig) -> None:
        self._trainer, self._args = trainer, args
        self._generations = 0
        self._evaluated = 0

    def of_rows(self, rows: int) -> Tensor:
        """(rows,) the number of the prompt of each row of this process."""
        trainer = self._trainer
        first = trainer.accelerator.process_index * rows
        row = torch.arange(rows, device=trainer.accelerator.device) + first
        if current_mode(trainer) == "train":
            return row // trainer.num_generations
        return row // trainer.num_generations_eval + self._evaluated

    def of_generation(self, rows: int) -> Tensor:
        """The same for a batch that was just generated, with other numbers than the batches before it.

        All batches of an evaluation, and all generations of one update, are numbered apart.
        """
        number = self.of_rows(rows) + self._offset()
        if current_mode(self._trainer) == "eval":
            self._evaluated += rows * self._trainer.accelerator.num_processes
        return number

    def begin_evaluation(self) -> None:
        """Count the prompts of an evaluation from 0."""
        self._evaluated = 0

    def check(self, rows: list[dict[str, Any]]) -> None:
        """Raise `ContractError` if rows with the same number have different prompts.

        Args:
            rows: of the dataset, as TRL's sampler repeats them for this process.
        """
        number = self.of_rows(len(rows)).tolist()
        for i in range(1, len(rows)):
            if number[i] == number[i - 1] and rows[i].get("prompt") != rows[i - 1].get("prompt"):
                raise ContractError(
                    "completions of one prompt in adjacent rows, as many as `num_generations`",
                    f"other prompts in rows {i - 1} and {i}",
                    "use TRL's own sampler: baselines and standard errors are taken over these groups",
                )

    def state_dict(self) -> dict[str, Any]:
        """How many generations there were."""
        return {"generations": self._generations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count from there."""
        self._generations = state["generations"]

    def _offset(self) -> int:
        if current_mode(self._trainer) == "eval":
            return 0
        self._generations += 1
        steps = (self._args.steps_per_generation or 1) * self._trainer.num_iterations
        together = math.ceil(self._args.gradient_accumulation_steps / steps) + 1
        return (self._generations % together) * (self._args.generation_batch_size or 0)


def with_peers(group: Tensor) -> Tensor:
    """(B,) groups of at least two: completions that are alone in their group share one.

    A baseline over completions of other prompts is as unbiased as one over the same prompt's, because it does not
    depend on the completion either; it only reduces the variance less.
    """
    values, index, counts = group.unique(return_inverse=True, return_counts=True)
    alone = counts[index] == 1
    if not bool(alone.any()) or len(values) == 1:
        return group
    home = values.new_tensor(int(values.max()) + 1) if int(alone.sum()) > 1 else values[counts.argmax()]
    return torch.where(alone, home, group)


def shuffled_by_group(batch: Batch) -> Batch:
    """The batch with its groups in a random order and the rows of each group adjacent.

    TRL shuffles single rows; then the completions of a prompt would fall into different micro-batches.
    """
    _, index = batch["group"].unique(return_inverse=True)
    place = torch.randperm(int(index.max()) + 1)[index.cpu()]
    order = place.argsort(stable=True)

    def permuted(x: Any) -> Any:
        if x is None or (isinstance(x, Tensor) and x.ndim == 0):
            return x
        return x[order.to(x.device)] if isinstance(x, Tensor) else [x[i] for i in order.tolist()]

    return {name: permuted(x) for name, x in batch.items()}
