"""Log-probs and exact KLs of completions by the policy and its reference, without an effect on the training."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...errors import MeaningError
from ...kernels import Head
from ..head_check import HeadCheck, without_dropout
from ..model_forward import Answer, Question, head_of, shared_vocabulary, statistics_forward
from ..seam import batch as scored
from ..seam.batch import Batch, Completions
from ..seam.models import base_of
from .device_memory import free_bytes
from .reference import Reference

LOGITS, MOST_LOGITS = 2**28, 2**31
"""Bytes of logits in memory at once, unless one completion needs more: the first number on a CPU and on a full GPU, up
to the second where a quarter of the free memory of a single GPU is enough. Fewer passes are faster on a GPU."""

Columns = dict[str, Any]
"""(B, T) tensors of one micro-batch by role, or None, and (B,) the keys of its prompts under `group`."""


class Passes:
    """Scores micro-batches: all of them by the reference, which may have to be loaded, then all by the policy.

    Both models are in evaluation mode, so that no dropout is active, and the state of the random numbers is restored.

    Args:
        trainer: whose model, temperature and precision are used.
        reference: the reference.
        exact: compute the KLs over the whole vocabulary, and not from the sampled tokens alone.
    """

    def __init__(self, trainer: Any, reference: Reference, exact: bool) -> None:
        self._trainer, self._reference, self._exact = trainer, reference, exact
        self._check_head = HeadCheck()
        self.vocabulary: int | None = None
        self.temperature = float(getattr(trainer, "temperature", 1.0))

    def __call__(self, batches: list[Batch]) -> list[Columns]:
        """The columns of each micro-batch."""
        for batch in batches:
            if scored.has_images(batch):
                raise MeaningError("prompts of text", "images", "remove KLCallback: it scores text alone")
        with torch.no_grad(), _own_random_numbers(self._trainer.accelerator.device):
            found = self._exact_kls(batches) if self._exact else self._log_probs(batches)
        return [{**_given(batch, columns["logp"]), **columns} for batch, columns in zip(batches, found, strict=True)]

    # Sampled

    def _log_probs(self, batches: list[Batch]) -> list[dict[str, Tensor]]:
        if self._reference.is_the_trainers and all(map(scored.has_reference_log_probs, batches)):
            ref_logps = [scored.reference_log_probs(batch) for batch in batches]
        else:
            with self._reference.model() as model, without_dropout(model):
                ref_logps = [self._of_model(model, Completions.of(batch)) for batch in batches]
        policy = self._trainer.model
        with without_dropout(policy):
            logps = [self._of_model(policy, Completions.of(batch)) for batch in batches]
        return [{"logp": a, "ref_logp": b} for a, b in zip(logps, ref_logps, strict=True)]

    def _of_model(self, model: Any, batch: Completions) -> Tensor:
        """(B, T) log-probs, from the model's own logits, some rows at a time."""
        base = base_of(self._trainer.accelerator.unwrap_model(model))
        short = {"logits_to_keep": batch.keep + 1} if _has_parameter(base.forward, "logits_to_keep") else {}
        vocabulary = base.config.get_text_config().vocab_size
        rows = max(1, self._bytes_for_logits(batch.ids.device) // (4 * vocabulary * (batch.keep + 1)))
        found = []
        for ids, attention in zip(batch.ids.split(rows), batch.attention.split(rows), strict=True):
            with self._trainer.accelerator.autocast():
                logits = model(input_ids=ids, attention_mask=attention, use_cache=False, **short).logits
            rows_of_logits = zip(logits[:, -batch.keep - 1 : -1], ids[:, -batch.keep :], strict=True)
            # One completion at a time, because float32 logits of all would be a second copy.
            found += [_picked(each.float(), tokens, self.temperature) for each, tokens in rows_of_logits]
        return torch.stack(found)

    def _bytes_for_logits(self, device: torch.device) -> int:
        """With several processes always the same: a pass may be a collective of all of them, as in FSDP."""
        if self._trainer.accelerator.num_processes > 1:
            return LOGITS
        return max(LOGITS, min(MOST_LOGITS, free_bytes(device) // 4))

    # Exact

    def _exact_kls(self, batches: list[Batch]) -> list[dict[str, Tensor]]:
        given = [Completions.of(batch) for batch in batches]
        policy = self._trainer.model
        with ExitStack() as stack:
            ref = stack.enter_context(self._reference.model())
            bases = [self._base(policy), *([] if self._reference.separate is None else [self._base(ref)])]
            self.vocabulary = shared_vocabulary(bases)
            for base in bases:
                stack.enter_context(statistics_forward(base))
            stack.enter_context(without_dropout(policy))
            stack.enter_context(without_dropout(ref))
            view: Any = SimpleNamespace(
                accelerator=self._trainer.accelerator,
                temperature=self.temperature,
                ref_model=self._reference.separate,
            )
            self._check_head(self, view, policy, given[0])
            hidden = [self.ask(ref, each, Question(each.keep, self.temperature)).hidden for each in given]
            head = self._head(ref)
        with statistics_forward(self._base(policy)), without_dropout(policy):
            return [self._statistics(each, h, head) for each, h in zip(given, hidden, strict=True)]

    def ask(self, model: Any, batch: Completions, question: Question) -> Answer:
        """Call a model as training calls it."""
        with self._trainer.accelerator.autocast():
            return model(input_ids=batch.ids, attention_mask=batch.attention, question=question)

    def question(self, batch: Completions) -> Question:
        """A question about the statistics of completions."""
        cast = bool(getattr(self._trainer.args, "cast_lm_head_to_fp32", False))
        return Question(
            batch.keep, self.temperature, batch.targets, batch.mask, vocabulary=self.vocabulary, float32=cast
        )

    def _base(self, model: Any) -> Any:
        return base_of(self._trainer.accelerator.unwrap_model(model))

    def _head(self, ref: Any) -> Head:
        """The reference's head; a copy where the policy's parameters only stand for it while it is loaded."""
        head = head_of(self._trainer.accelerator.unwrap_model(ref), self.temperature, self.vocabulary)
        if self._reference.separate is not None:
            return head
        return replace(head, weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())

    def _statistics(self, batch: Completions, hidden: Tensor | None, head: Head) -> dict[str, Tensor]:
        asked = replace(self.question(batch), ref_hidden=hidden, ref_head=head)
        found = self.ask(self._trainer.model, batch, asked)
        names = {"ref_logp": "ref_logp", "token_reverse_kl": "reverse_kl", "token_forward_kl": "forward_kl"}
        return {name: found[field] for name, field in {"logp": "logp", **names}.items()}


def _picked(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """(T,) log-probs of the tokens of one completion."""
    logits = logits if temperature == 1 else logits / temperature
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def _given(batch: Batch, logp: Tensor) -> Columns:
    """What the batch itself has."""
    return {
        "mask": scored.sampled_tokens(batch),
        "behavior_logp": scored.sampler_log_probs(batch, logp),
        "old_logp": scored.old_log_probs(batch),
        "token_id": Completions.of(batch).targets,
        "group": scored.prompt_keys(batch),
    }


def _has_parameter(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
