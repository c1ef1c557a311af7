"""Log-probs of completions by TRL's forward pass, and an answer that saves TRL's loss a second pass.

Touches `GRPOTrainer._get_per_token_logps_and_entropies`, which `KLTrainer` also overrides.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from ...kernels import TokenStatistics
from .batch import Batch, Completions
from .version import ContractError

MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""What `_get_per_token_logps_and_entropies` takes beside text, by its key in the batch."""

Result = tuple[Tensor, Tensor | None, Tensor | None]
"""(B, T) log-probs, (B, T) entropies, and the auxiliary loss of a mixture of experts."""


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """What one forward pass of the policy over a batch gave; `logp` carries the gradient."""

    logp: Tensor
    entropy: Tensor | None
    aux_loss: Tensor | None
    exact: TokenStatistics | None = None


def completion_log_probs(trainer: GRPOTrainer, model: Any, batch: Batch, **options: Any) -> Result:
    """Log-probs of a batch's completions by one of the models.

    Args:
        trainer: whose temperature and precision are used.
        model: the policy or the reference.
        batch: a scored batch.
        options: `batch_size`, `compute_entropy` and `compute_aux_loss`, as TRL takes them.
    """
    given = Completions.of(batch)
    extra = {name: batch.get(name) for name in MULTIMODAL if batch.get(name) is not None}
    ask = GRPOTrainer._get_per_token_logps_and_entropies  # TRL's own: `KLTrainer`'s might answer from a prepared pass
    return ask(trainer, model, given.ids, given.attention, given.keep, **extra, **options)


class PreparedAnswer:
    """Answers TRL's loss with a forward pass that was already made.

    The answer is given once, and only to a call with the arguments that the pass was made with. Any other call gets
    None, so that TRL makes a pass of its own. Values are compared when the loss is complete: a comparison in between
    would wait for the device.
    """

    def __init__(self) -> None:
        self._pending: _Answer | None = None

    @contextmanager
    def prepared(self, found: ForwardPass, model: Any, batch: Batch) -> Iterator[None]:
        """Hold the answer while TRL computes a loss; raise `ContractError` if the loss did not take it."""
        answer = self._pending = _Answer(found, model, batch)
        try:
            yield
        finally:
            self._pending = None
        answer.check()

    def take(self, model: Any, ids: Tensor, attention: Tensor, keep: int, extra: dict[str, Any]) -> Result | None:
        """The answer to one call of `_get_per_token_logps_and_entropies`, or None if there is none for it."""
        answer = self._pending
        if answer is None or not answer.fits(model, ids, attention, keep, extra):
            return None
        self._pending = None
        return answer.give(ids, attention)


class _Answer:
    def __init__(self, found: ForwardPass, model: Any, batch: Batch) -> None:
        self.found, self.model, self.batch = found, model, batch
        self.given = Completions.of(batch)
        self.same: Tensor | None = None

    def fits(self, model: Any, ids: Tensor, attention: Tensor, keep: int, extra: dict[str, Any]) -> bool:
        """Whether a call has the same model, shapes and images: what can be compared without reading values."""
        shapes = ids.shape == self.given.ids.shape and attention.shape == self.given.attention.shape
        images = all(extra.get(name) is self.batch.get(name) for name in MULTIMODAL)
        return model is self.model and keep == self.given.keep and shapes and images

    def give(self, ids: Tensor, attention: Tensor) -> Result:
        """The answer; the comparison of the values stays on the device."""
        self.same = torch.stack([(ids == self.given.ids).all(), (attention == self.given.attention).all()]).all()
        return self.found.logp, self.found.entropy, self.found.aux_loss

    def check(self) -> None:
        """After the loss: the answer was taken, by a call about the same tokens."""
        if self.same is None or not bool(self.same):
            raise ContractError(
                "one call of _get_per_token_logps_and_entropies in TRL's loss, with the policy and the batch's tokens",
                "no such call" if self.same is None else "a call with other tokens",
            )
