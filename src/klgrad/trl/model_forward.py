"""Exact statistics inside a model's own forward, where DDP, FSDP and DeepSpeed expect its parameters to be used."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from ..kernels import Head, token_statistics, top_entries
from .seam.models import gathered, is_split


@dataclass(frozen=True, eq=False)
class Question:
    """What a model returns instead of logits: hidden states, its top entries, or statistics of its last tokens.

    Attributes:
        keep: how many of the last tokens are wanted.
        temperature: at which the tokens were sampled.
        targets: (B, keep) tokens, or None for the hidden states that predict them.
        mask: (B, keep) 1 for live tokens.
        ref_hidden: (B, keep, H') hidden states of the reference.
        ref_head: the head of the reference.
        vocabulary: how many entries both models share, where one of them pads its head; None for all.
        entries: (B, keep, k) vocabulary entries whose log-probs are wanted too.
        budget: bytes for tiles of logits.
        float32: project in float32, even under autocast.
        top_k: how many of the model's own likeliest entries are wanted, instead of statistics.
    """

    keep: int
    temperature: float
    targets: Tensor | None = None
    mask: Tensor | None = None
    ref_hidden: Tensor | None = None
    ref_head: Head | None = None
    vocabulary: int | None = None
    entries: Tensor | None = None
    budget: int | None = None
    float32: bool = False
    top_k: int | None = None


@dataclass
class Answer(ModelOutput):
    """Hidden states, or the fields of `TokenStatistics`, or those of `TopEntries`."""

    hidden: Tensor | None = None
    logp: Tensor | None = None
    entropy: Tensor | None = None
    ref_logp: Tensor | None = None
    reverse_kl: Tensor | None = None
    forward_kl: Tensor | None = None
    entries_logp: Tensor | None = None
    ids: Tensor | None = None
    token_logp: Tensor | None = None
    has_token: Tensor | None = None


def add_statistics_forward(model: Any) -> None:
    """Let `model(..., question=Question(...))` return an `Answer`; without a question the forward is unchanged."""
    forward = model.forward

    @wraps(forward)
    def answering(*args: Any, question: Question | None = None, **kwargs: Any) -> Any:
        if question is None:
            return forward(*args, **kwargs)
        last = model.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        hidden = last[:, -question.keep - 1 : -1]
        if question.targets is None:
            return Answer(hidden=hidden)
        with torch.autocast(hidden.device.type, enabled=False) if question.float32 else nullcontext():
            return statistics(hidden, question)

    def statistics(hidden: Tensor, question: Question) -> Answer:
        assert question.targets is not None  # else hidden states are returned
        head = head_of(model, question.temperature, question.vocabulary)
        if question.top_k is not None:
            how = {"mask": question.mask, "budget": question.budget}
            return Answer(**top_entries(hidden, head, question.targets, question.top_k, **how)._asdict())
        found = token_statistics(
            hidden,
            head,
            question.targets,
            question.ref_hidden,
            question.ref_head,
            mask=question.mask,
            entries=question.entries,
            budget=question.budget,
        )
        return Answer(**found._asdict())

    model.forward = answering


@contextmanager
def statistics_forward(model: Any) -> Iterator[None]:
    """`add_statistics_forward` while the context lasts."""
    before, was_own = model.forward, "forward" in vars(model)
    add_statistics_forward(model)
    try:
        yield
    finally:
        if was_own:
            model.forward = before
        else:
            del model.forward


def head_of(model: Any, temperature: float, vocabulary: int | None) -> Head:
    """The model's head: whole, even where DeepSpeed has split its weights, and cut to `vocabulary` entries."""
    output = model.get_output_embeddings()
    bias = getattr(output, "bias", None)
    with gathered([x for x in (output.weight, bias) if x is not None]):
        head = Head.of(model, temperature=temperature)
        if is_split(output.weight):  # gathered only for now: the backward pass needs a copy
            head = replace(head, weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())
    if vocabulary is None or vocabulary == head.vocabulary:
        return head
    return replace(head, weight=head.weight[:vocabulary], bias=None if head.bias is None else head.bias[:vocabulary])


def shared_vocabulary(models: list[Any]) -> int | None:
    """How many entries all heads have, where one is padded beyond another; None where they agree."""
    sizes = {model.config.get_text_config().vocab_size for model in models}
    return min(sizes) if len(sizes) > 1 else None
