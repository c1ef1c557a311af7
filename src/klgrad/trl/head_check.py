"""Whether the head that exact statistics are computed by gives the model's own log-probs: looked at once.

`Head.of` reads what follows the last hidden state (scale, soft cap, bias) from the names of a model's fields. A model
that calls them otherwise would be given other log-probs, in the KL and in the policy loss, without an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import MeaningError
from .model_forward import Completions, Question, ask

TOKENS = 64
"""Of one completion with the end of its prompt: logits of so few tokens fit beside any model."""
ROUNDING = {torch.float32: 2**-10, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""What a logit is rounded by, relative to its size; float32 products may be taken in TF32, of ten bits."""
SMALLEST = 1e-3
"""Nats that sums in another order may differ by, where logits are small."""


def check_head(trainer: Any, model: Any, batch: Completions) -> None:
    """Compare on a few tokens, of the policy and of a reference of its own, and refuse a head that differs.

    The models are called as the loss calls them, on all processes at once, so that DDP, FSDP and DeepSpeed find their
    parameters; with adapters the reference has the policy's head.
    """
    models = [("the policy", model), ("the reference", trainer.ref_model)]
    for name, each in models:
        if each is None:
            continue
        off, allowed = (float(x) for x in _widest(trainer, *_difference(trainer, each, _few(batch))))
        if off > allowed:
            raise MeaningError(
                f"log-probs of {name}'s own logits within {allowed:.2g} nats",
                f"a difference of {off:.3g} nats, with {type(trainer.accelerator.unwrap_model(each)).__name__}",
                "its head is not what kl_estimator='exact' takes it for (a scale or a soft cap of another name): "
                "choose a sampled estimator, k1 or k1_k3, and report the model",
            )


def _few(batch: Completions) -> Completions:
    """The last live tokens of the first row, as a sequence of their own: any text serves to compare two heads."""
    ids = batch.ids[0][batch.attention[0].bool()][-TOKENS:]
    ids = ids if len(ids) > 1 else batch.ids[0][-2:]  # of what is all padding, padding
    ones = torch.ones_like(ids)[None]
    return Completions(ids[None], ones, len(ids) - 1, ones[:, 1:])


@torch.no_grad()
def _difference(trainer: Any, model: Any, few: Completions) -> tuple[Tensor, Tensor]:
    """The largest difference of log-probs, and what rounding explains of it."""
    how = {"vocabulary": trainer.shared_vocabulary, "float32": trainer.args.cast_lm_head_to_fp32}
    question = Question(few.keep, trainer.temperature, few.targets, few.mask, **how)
    with _without_dropout(model):
        found: Any = ask(trainer, model, few, question).logp
        with trainer.accelerator.autocast():
            own = model(input_ids=few.ids, attention_mask=few.attention, use_cache=False).logits
    logits = own[:, -few.keep - 1 : -1, : trainer.shared_vocabulary].float() / trainer.temperature
    expected = logits.log_softmax(-1).gather(-1, few.targets[..., None])[..., 0]
    rounding = max(ROUNDING.get(kind, ROUNDING[torch.float32]) for kind in _dtypes(trainer, model, own))
    return (found.float() - expected).abs().max(), 2 * rounding * logits.abs().max() + SMALLEST


def _dtypes(trainer: Any, model: Any, logits: Tensor) -> set[torch.dtype]:
    """All that logits may have been rounded to: accelerate gives float32 for what autocast computed in less."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(trainer.accelerator.mixed_precision))
    weights = next(iter(model.parameters())).dtype
    return {logits.dtype, weights, *([] if mixed is None else [mixed])}


def _widest(trainer: Any, off: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Of all processes, the one that is furthest off: they stop together, or none waits for another."""
    both = trainer.accelerator.gather(torch.stack([off, allowed]).float()[None])
    return tuple(both[(both[:, 0] - both[:, 1]).argmax()])


@contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    """Two passes of one model differ by it; every module is put back as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
