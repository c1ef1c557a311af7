"""TRL's `DistillationTrainer`: the divergence between student and teacher over the vocabulary, on given completions.

A real trainer is built for each setting. Its student returns the logits of the audited policy and its teacher those of
the reference (`trl_model.GivenLogits`). Only `_generate_single_turn` is replaced: it returns the audited completions,
since the trainer samples from its student. Padding, the hidden states of the completions, the tiles of both heads, the
divergence that `beta` selects, its gradient, the mask and the mean over the tokens of the batch are TRL's. Its kernel
computes in float32: for the verdict it runs in float64, and for the float32 probes it runs unchanged.

The trainer has no other sampler and no importance ratio. Off-policy, the completions are those of the audit's sampler,
as after an update between generation and loss. `temperature` divides the logits of both models, so the divergence is
that of the policies at that temperature (tested).
"""
# pyright: reportPrivateImportUsage=false
# (the package exports its names lazily, which type checkers do not see)

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..audit.batch import Batch
from .trl_model import (
    QUESTION,
    WORDS,
    GivenLogits,
    at_leaves,
    completion,
    in_float64,
    prompt,
    saved_model,
    tokenizer,
    with_table,
)
from .trl_surroundings import offline, one_thread, quietly, restore_accelerate


class DistillationStage:
    """A trainer whose student, teacher and sampler return the values of the audited batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.trainer = trainer = build_distillation(**settings)
        trainer._generate_single_turn = lambda *_, **__: self.completions
        self.student = with_table(trainer.model, GivenLogits())
        self.teacher = with_table(trainer.teacher_model, GivenLogits())
        self.completions: list[list[int]] = []

    def loss(self, batch: Batch) -> Tensor:
        """Take the completions and compute the loss, by the methods of the trainer."""
        from trl.kernels import chunked_divergence, chunked_logprob

        restore_accelerate()
        self.student.logits, self.teacher.logits = batch.logits, batch.ref_logits
        columns = batch.mask.shape[1]
        self.completions = [completion(n, ended=n < columns) for n in batch.mask.sum(-1).tolist()]
        wide = batch.logits.dtype == torch.float64
        with one_thread(), in_float64(chunked_divergence, chunked_logprob) if wide else nullcontext():
            rows = [{"prompt": prompt(row)} for row in range(len(batch.logits))]
            taken = self.trainer._generate_and_score_completions(rows)
            return at_leaves(self.trainer.compute_loss(self.trainer.model, taken), batch.leaves)


@cache
def distillation_stage_of(settings: tuple[tuple[str, Any], ...]) -> DistillationStage:
    """The trainer with these settings; built once."""
    return DistillationStage(dict(settings))


def build_distillation(**settings: Any) -> Any:
    """A real `DistillationTrainer`, with tiny Llamas as student and teacher."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    with quietly(), offline(), one_thread():
        folder = saved_model()
        config = DistillationConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, **settings
        )
        trainer: Any = DistillationTrainer(
            model=folder,
            teacher_model=folder,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [WORDS[QUESTION]]}),
            processing_class=tokenizer(),
        )
    trainer.model.train()
    return trainer
