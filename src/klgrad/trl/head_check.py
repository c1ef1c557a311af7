"""Checks once that exact statistics are computed with the head that the model itself uses.

`Head.of` reads what follows the last hidden state (scale, soft cap, bias) from the names of a model's fields. A model
that names them differently would get other log-probs, in the KL and in the policy loss, without an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from ..errors import MeaningError
from .model_forward import Answer, Question
from .seam.batch import Completions

TOKENS = 64
"""Tokens that are compared, the last ones of one sequence: their logits fit into memory beside any model."""
ROUNDING = {torch.float32: 2**-10, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Relative rounding error of a logit; float32 products may be computed in TF32, which has ten bits."""
SMALLEST = 1e-3
"""Nats by which sums in another order may differ where logits are small."""


class Scores(Protocol):
    """Calls models for exact statistics, as `Scorer` and `KLCallback` do."""

    vocabulary: int | None

    def ask(self, model: Any, batch: Completions, question: Question) -> Answer:
        """Call a model as training calls it."""
        ...

    def question(self, batch: Completions) -> Question:
        """A question about the statistics of completions."""
        ...


class HeadCheck:
    """Compares the head with the model's own logits at the first call, and does nothing later."""

    def __init__(self) -> None:
        self._done = False

    def __call__(self, scorer: Scores, trainer: GRPOTrainer, model: Any, batch: Completions) -> None:
        """Compare on a few tokens, for the policy and for a reference of its own; refuse a head that differs.

        The models are called as the loss calls them, on all processes at once, so that DDP, FSDP and DeepSpeed find
        their parameters. With adapters the reference has the policy's head.
        """
        if self._done:
            return
        self._done = True
        for name, each in (("the policy", model), ("the reference", trainer.ref_model)):
            if each is None:
                continue
            off, allowed = (float(x) for x in _widest(trainer, *difference(scorer, trainer, each, few_tokens(batch))))
            if off > allowed:
                raise MeaningError(
                    f"log-probs of {name}'s own logits within {allowed:.2g} nats",
                    f"a difference of {off:.3g} nats, with {type(trainer.accelerator.unwrap_model(each)).__name__}",
                    "the head is not what the exact KL assumes (it may have a scale or a soft cap under another name): "
                    "choose a sampled estimator, k1 or k1_k3 (KLCallback(exact=False)), and report the model",
                )


def few_tokens(batch: Completions) -> Completions:
    """The last live tokens of the first row, as a sequence of their own: any text can be used to compare heads."""
    ids = batch.ids[0][batch.attention[0].bool()][-TOKENS:]
    ids = ids if len(ids) > 1 else batch.ids[0][-2:]  # a row of padding only
    ones = torch.ones_like(ids)[None]
    return Completions(ids[None], ones, len(ids) - 1, ones[:, 1:])


@torch.no_grad()
def difference(scorer: Scores, trainer: GRPOTrainer, model: Any, few: Completions) -> tuple[Tensor, Tensor]:
    """The largest difference of log-probs, and how much of it rounding explains."""
    with without_dropout(model):
        found: Any = scorer.ask(model, few, replace(scorer.question(few), budget=None)).logp
        with trainer.accelerator.autocast():
            own = model(input_ids=few.ids, attention_mask=few.attention, use_cache=False).logits
    logits = own[:, -few.keep - 1 : -1, : scorer.vocabulary].float() / trainer.temperature
    expected = logits.log_softmax(-1).gather(-1, few.targets[..., None])[..., 0]
    rounding = max(ROUNDING.get(kind, ROUNDING[torch.float32]) for kind in _dtypes(trainer, model, own))
    return (found.float() - expected).abs().max(), 2 * rounding * logits.abs().max() + SMALLEST


def _dtypes(trainer: GRPOTrainer, model: Any, logits: Tensor) -> set[torch.dtype]:
    """All dtypes that logits may have been rounded to: accelerate returns autocast's results as float32."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(trainer.accelerator.mixed_precision))
    weights = next(iter(model.parameters())).dtype
    return {logits.dtype, weights, *([] if mixed is None else [mixed])}


def _widest(trainer: GRPOTrainer, off: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the process whose difference is largest, so that all processes stop or none does."""
    both: Any = trainer.accelerator.gather(torch.stack([off, allowed]).float()[None])
    return tuple(both[(both[:, 0] - both[:, 1]).argmax()])


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Two passes of one model differ by dropout; every module gets its mode back afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
