"""Exact statistics inside a model's own forward, where DDP, FSDP and DeepSpeed expect its parameters to be used."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput
from trl.trainer.utils import maybe_gather_lm_head_ctx

from ..errors import MeaningError
from ..kernels import Head, TokenStatistics, TopEntries, token_statistics, top_entries


@dataclass(frozen=True, eq=False)
class Question:
    """What to ask a model for instead of logits: hidden states, its top entries, or statistics of its last tokens.

    Attributes:
        keep: how many last tokens are wanted.
        temperature: that the tokens were sampled at.
        targets: (B, keep) tokens, or None for the hidden states that predict them.
        mask: (B, keep) live ones.
        ref_hidden: (B, keep, H') of the reference.
        ref_head: its head.
        vocabulary: how many entries both models share, where one of them pads its head; None for all.
        entries: (B, keep, k) vocabulary entries whose log-probs are wanted too.
        budget: bytes for tiles of logits.
        float32: project in float32, whatever autocast says.
        top_k: how many of its own likeliest entries are wanted, and no statistics.
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
    """Hidden states, or the fields of `TokenStatistics`, or of `TopEntries`."""

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


def refuse_images(found: bool, where: str) -> None:
    """Scored without its picture, a completion would have other log-probs, and nobody would notice."""
    if found:
        raise MeaningError("prompts of text", f"images, with {where}", "a sampled estimator in the loss takes them")


def base_of(model: Any) -> Any:
    """The language model itself, inside its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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
        with torch.autocast(hidden.device.type, enabled=False) if question.float32 else nullcontext():
            return statistics(hidden, question)

    def statistics(hidden: Tensor, question: Question) -> Answer:
        assert question.targets is not None  # or hidden states would do
        head = _head(model, question.temperature, question.vocabulary)
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


def _head(model: Any, temperature: float, vocabulary: int | None) -> Head:
    """The model's, whole even where DeepSpeed has spread its weights, and cut where another pads less."""
    output = model.get_output_embeddings()
    bias = getattr(output, "bias", None)
    with maybe_gather_lm_head_ctx(*(x for x in (output.weight, bias) if x is not None)):
        head = Head.of(model, temperature=temperature)
        if hasattr(output.weight, "ds_id"):  # gathered for now: backward needs a copy that stays
            head = replace(head, weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())
    if vocabulary is None or vocabulary == head.vocabulary:
        return head
    return replace(head, weight=head.weight[:vocabulary], bias=None if head.bias is None else head.bias[:vocabulary])


@dataclass(frozen=True, eq=False)
class Completions:
    """Prompts and completions joined, of which the last `keep` tokens are completion, live where `mask` is 1."""

    ids: Tensor
    attention: Tensor
    keep: int
    mask: Tensor

    @classmethod
    def of(cls, batch: dict[str, Any]) -> "Completions":
        """From what TRL makes of prompts and completions."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        return cls(ids, attention, batch["completion_ids"].shape[1], batch["completion_mask"])

    @property
    def targets(self) -> Tensor:
        """(B, keep) the completions' tokens."""
        return self.ids[:, -self.keep :]


def exact_statistics(trainer: Any, model: Any, batch: Completions) -> TokenStatistics:
    """Log-probs, both exact KLs and the entropy of the completions, no logits held."""
    heat, shared = trainer.temperature, trainer.shared_vocabulary
    with torch.no_grad(), reference(trainer) as ref:
        ref_hidden = ask(trainer, ref, batch, Question(batch.keep, heat)).hidden
        ref_head = _head(trainer.accelerator.unwrap_model(ref), heat, shared)
        asked = (batch.keep, heat, batch.targets, batch.mask, ref_hidden, ref_head, shared)
        question = Question(*asked, **_how(trainer))
    return _statistics(ask(trainer, model, batch, question))


def top_k_statistics(trainer: Any, model: Any, batch: Completions, k: int) -> tuple[TokenStatistics, TopEntries]:
    """The policy's log-probs and entropy, also of the reference's k likeliest entries, and these."""
    asked = (batch.keep, trainer.temperature, batch.targets, batch.mask)
    plain = Question(*asked, vocabulary=trainer.shared_vocabulary, **_how(trainer))
    with torch.no_grad(), reference(trainer) as ref:
        best = ask(trainer, ref, batch, replace(plain, top_k=k))
    found = TopEntries(*(best[name] for name in ("ids", "logp", "token_logp", "has_token")))
    return _statistics(ask(trainer, model, batch, replace(plain, entries=found.ids))), found


def _how(trainer: Any) -> dict[str, Any]:
    return {"budget": trainer.args.kl_memory << 20, "float32": trainer.args.cast_lm_head_to_fp32}


def ask(trainer: Any, model: Any, batch: Completions, question: Question) -> Answer:
    """What a model answers, called as training calls it."""
    with trainer.accelerator.autocast():
        return model(input_ids=batch.ids, attention_mask=batch.attention, question=question)


def _statistics(said: Answer) -> TokenStatistics:
    return TokenStatistics(*(getattr(said, name) for name in TokenStatistics._fields))


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
