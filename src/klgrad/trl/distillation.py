"""`DistillationTrainer`: TRL's trainer of this name, with its divergence computed by the kernels of this package."""

from typing import Any

import torch
from torch import Tensor
from trl.trainer import distillation_trainer
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer as TRLDistillationTrainer

from ..integrations import lend
from ..kernels import Head, token_statistics
from ..support import Json, Model
from .scorer import compare_head, head_of, some_tokens

Items = Tensor | int | None
"""The number of tokens to divide by; None for those of the batch."""


def divergence_loss(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    mask: Tensor,
    beta: float,
    items: Items = None,
    budget: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of one divergence over the live tokens, divided by `items` or by their number.

    Gradient:
        of the divergence of `beta`, of each token with its prefix held fixed; to the student's hidden states and head.

    Args:
        hidden: (B, T, H) of the student, at the positions that predict the completion.
        head: of the student.
        teacher_hidden: (B, T, H') of the teacher.
        teacher_head: of the teacher.
        mask: (B, T) 1 where a token is live.
        beta: as TRL counts: 1 for KL(student‖teacher), 0 for KL(teacher‖student), and between them the generalised
            Jensen-Shannon divergence.
        items: the number of tokens to divide by; None for those of this batch.
        budget: bytes for tiles of logits; None for 2 GiB.

    Returns:
        The loss, the sum of the student's entropies, and the number of live tokens.
    """
    targets = torch.zeros_like(mask, dtype=torch.long)  # no divergence depends on them
    divergence = None if beta in (0, 1) else f"jensen-shannon({beta!r})"
    statistics = token_statistics(
        hidden, head, targets, teacher_hidden, teacher_head, mask=mask, divergence=divergence, budget=budget
    )
    value = statistics.divergence if divergence else statistics.reverse_kl if beta == 1 else statistics.forward_kl
    assert value is not None  # there is a teacher
    count = (mask != 0).sum()
    total = count.clamp(min=1) if items is None else items.to(value.device) if isinstance(items, Tensor) else items
    return value.sum() / total, statistics.entropy.sum(), count


class DistillationTrainer(TRLDistillationTrainer):
    """TRL's `DistillationTrainer` with this package's kernels; loss and gradient are the same, up to rounding.

    The output heads are those of `Head.of`, compared with the models' own logits on the first batch. Generation,
    masks, reduction and logging are TRL's.

    Args:
        model: the student, or its name.
        teacher_model: the teacher, or its name.
        args: TRL's `DistillationConfig`; every `beta` from 0 to 1.
        others: the further arguments of TRL's trainer, by position.
        kwargs: the same by name.

    Attributes:
        memory: bytes for tiles of logits, and for logits kept until the backward pass; None for 2 GiB.

    Example:
        >>> from trl import DistillationConfig
        >>> from klgrad.trl import DistillationTrainer  # instead of: from trl import DistillationTrainer
        >>> args = DistillationConfig("runs/mine", beta=1.0, use_cpu=True, bf16=False)
        >>> trainer = DistillationTrainer(  # doctest: +SKIP
        ...     "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct", args, train_dataset=prompts
        ... )
    """

    model: Model
    teacher_model: Model
    memory: int | None = None

    def __init__(
        self,
        model: Model,
        teacher_model: Model = None,
        args: DistillationConfig | None = None,
        *others: Any,
        **kwargs: Any,
    ) -> None:
        self._heads_compared = False
        super().__init__(model, teacher_model, args, *others, **kwargs)

    def compute_loss(
        self, model: Model, inputs: Json, return_outputs: bool = False, num_items_in_batch: Items = None
    ) -> Any:
        """Compare the heads before the first loss."""
        if not self._heads_compared:
            for one in (model, self.teacher_model):
                compare_head(self.accelerator, one, some_tokens(inputs))
            self._heads_compared = True
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _compute_loss(self, unwrapped_student: Model, inputs: Json, num_items_in_batch: Items) -> Any:
        with lend(distillation_trainer, _chunked_divergence_loss=self._divergence):  # which calls it by that name
            return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)

    def _divergence(
        self,
        student_hidden_states: Tensor,
        teacher_hidden_states: Tensor,
        student_lm_head_weight: Tensor,
        teacher_lm_head_weight: Tensor,
        completion_mask: Tensor,
        beta: float,
        num_items_in_batch: Items = None,
        **_: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In the place of TRL's: heads are read from the models, because TRL does not know every scale and cap."""
        models = map(self.accelerator.unwrap_model, (self.model, self.teacher_model))
        head, teacher_head = (head_of(each, self.temperature, None) for each in models)
        states = student_hidden_states, head, teacher_hidden_states, teacher_head
        return divergence_loss(*states, completion_mask, float(beta), num_items_in_batch, self.memory)
