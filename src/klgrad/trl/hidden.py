"""Exact statistics inside a model's own forward, where DDP, FSDP and DeepSpeed expect its parameters to be used."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from ..kernels import Head, TokenStatistics, token_statistics


@dataclass(frozen=True, eq=False)
class Question:
    """What to ask a model for instead of logits: hidden states alone, or statistics of its last tokens.

    Attributes:
        keep: how many last tokens are wanted.
        temperature: that the tokens were sampled at.
        targets: (B, keep) tokens, or None for the hidden states that predict them.
        mask: (B, keep) live ones.
        ref_hidden: (B, keep, H') of the reference.
        ref_head: its head.
    """

    keep: int
    temperature: float
    targets: Tensor | None = None
    mask: Tensor | None = None
    ref_hidden: Tensor | None = None
    ref_head: Head | None = None


@dataclass
class Answer(ModelOutput):
    """Hidden states, or the fields of `TokenStatistics`."""

    hidden: Tensor | None = None
    logp: Tensor | None = None
    entropy: Tensor | None = None
    ref_logp: Tensor | None = None
    reverse_kl: Tensor | None = None
    forward_kl: Tensor | None = None


def add_statistics_forward(model: Any) -> None:
    """Let `model(..., question=Question(...))` answer it; without one, the forward is as it was."""
    forward = model.forward

    @wraps(forward)
    def answering(*args: Any, question: Question | None = None, **kwargs: Any) -> Any:
        if question is None:
            return forward(*args, **kwargs)
        last = model.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        hidden = last[:, -question.keep - 1 : -1]
        if question.targets is None:
            return Answer(hidden=hidden)
        found = token_statistics(
            hidden,
            Head.of(model, temperature=question.temperature),
            question.targets,
            question.ref_hidden,
            question.ref_head,
            mask=question.mask,
        )
        return Answer(
            logp=found.logp,
            entropy=found.entropy,
            ref_logp=found.ref_logp,
            reverse_kl=found.reverse_kl,
            forward_kl=found.forward_kl,
        )

    model.forward = answering


def exact_statistics(
    trainer: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, keep: int, mask: Tensor
) -> TokenStatistics:
    """Log-probs, both exact KLs and the entropy of the last `keep` tokens, no logits held."""

    def ask(whom: Any, question: Question) -> Answer:
        with trainer.accelerator.autocast():
            return whom(input_ids=input_ids, attention_mask=attention_mask, question=question)

    with torch.no_grad(), reference(trainer) as ref:
        ref_hidden = ask(ref, Question(keep, trainer.temperature)).hidden
        ref_head = Head.of(trainer.accelerator.unwrap_model(ref), temperature=trainer.temperature)
        question = Question(keep, trainer.temperature, input_ids[:, -keep:], mask, ref_hidden, ref_head)
    said = ask(model, question)
    assert said.logp is not None  # it was asked for them
    assert said.entropy is not None
    return TokenStatistics(said.logp, said.entropy, said.ref_logp, said.reverse_kl, said.forward_kl, None)


@contextmanager
def reference(trainer: Any) -> Iterator[Any]:
    """The reference model: one of its own, or the policy with its adapter off."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    from trl.trainer.utils import use_adapter

    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(unwrapped, adapter_name="ref" if "ref" in unwrapped.peft_config else None):
        yield trainer.model
