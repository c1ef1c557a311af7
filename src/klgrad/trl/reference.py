"""The reference of a run that is only observed: its weights, and forward passes of both models."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor
from transformers import Trainer

from ..errors import MeaningError
from ..kernels import Head
from ..support import Json, Model
from . import compat
from .compat import OLD_LOGP, REF_LOGP, Batch, CompletionRows, base_of, has_adapters, without_adapters
from .scorer import (
    ReferencePass,
    StatisticsRequest,
    ask,
    compare_head,
    head_of,
    shared_vocabulary,
    some_tokens,
    statistics_forward,
    without_dropout,
)

# How much memory of a device a measurement may use.


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a GPU, with what torch holds unused; 0 on a CPU, where it is not known."""
    if device.type != "cuda":
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


# The reference of a run: a given model, the trainer's own, the policy without adapters, or the start weights.

PINNED = 2**32
"""Bytes of weights up to which their copy is kept in pinned memory, from which a GPU loads them several times faster.
Pinned memory cannot be swapped out, and each tensor takes a power of 2 of it."""


class StartWeights:
    """A copy on the CPU of the weights that are trained."""

    def __init__(self, model: Model) -> None:
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self._kept: dict[str, Tensor] = {name: p.detach().to("cpu", copy=True) for name, p in trained}

    def pin(self) -> None:
        """Move a copy of up to `PINNED` bytes into pinned memory, when it is known that a GPU will load it."""
        if sum(x.nbytes for x in self._kept.values()) <= PINNED:
            with suppress(RuntimeError):  # the system may limit how much memory can be pinned
                self._kept.update({name: x.pin_memory() for name, x in self._kept.items()})

    @contextmanager
    def loaded(self, model: Model) -> Iterator[None]:
        """While the context lasts, the policy has its start weights; afterwards it has its own again, bit for bit.

        The weights are copied in place, so that what refers to their storage (optimizer, DDP) is not affected. The
        policy's own wait on the device meanwhile if half of its free memory is enough, else on the CPU.
        """
        pairs = self._pairs(model)
        devices = {p.device for p, _ in pairs}
        room = all(2 * sum(p.nbytes for p, _ in pairs if p.device == x) <= free_bytes(x) for x in devices)
        values = [p.data.clone() if room else p.data.to("cpu", copy=True) for p, _ in pairs]
        try:
            for p, start in pairs:
                p.data.copy_(start, non_blocking=True)
            yield
        finally:
            for (p, _), value in zip(pairs, values, strict=True):
                p.data.copy_(value)

    def _pairs(self, model: Model) -> list[tuple[Tensor, Tensor]]:
        now = dict(model.named_parameters())
        is_split = lambda p: hasattr(p, "ds_id") or hasattr(p, "device_mesh")  # by DeepSpeed, or by FSDP2
        for name, start in self._kept.items():
            if name not in now or now[name].shape != start.shape or is_split(now[name]):
                raise MeaningError(
                    "the policy's parameters whole, as they were at the start",
                    f"`{name}` missing, or split between processes",
                    "give the reference as a model: KLCallback(reference=model)",
                )
        return [(now[name], start) for name, start in self._kept.items()]


class Reference:
    """The reference of a run, in the first of these forms that there is.

    1. the model that was given; it stays on its device, and is moved to the policy's only while it is used;
    2. the trainer's own: `ref_model` (TRL, with beta > 0) or `teacher_model` (TRL's distillation);
    3. with PEFT, the policy without its adapters, or with the adapter `ref` if TRL made one;
    4. the start weights.

    Args:
        trainer: the trainer.
        given: the model that was given, or None.
        start: the start weights, for form 4.
    """

    def __init__(self, trainer: Trainer, given: Model, start: StartWeights | None) -> None:
        self._trainer, self._given = trainer, given
        models = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
        self._own = next((model for model in models if model is not None), None)
        self.start = start

    @property
    def is_the_trainers(self) -> bool:
        """Whether it is the one that the trainer itself uses, so that log-probs in its batches may be taken."""
        return self._given is None

    @property
    def needs_start_weights(self) -> bool:
        """Whether there is no other form of it."""
        return self._given is None and self._own is None and not has_adapters(self._policy)

    @property
    def separate(self) -> Model:
        """The model, if it is another one than the policy."""
        return self._given if self._given is not None else self._own

    @property
    def _policy(self) -> Model:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    @contextmanager
    def model(self) -> Iterator[Model]:
        """The model to call, while the context lasts."""
        if self._given is not None:
            with _on_device(self._given, self._trainer.accelerator.device):
                yield self._given
        elif self._own is not None:
            yield self._own
        elif has_adapters(self._policy):
            with without_adapters(self._policy):
                yield self._trainer.model
        else:
            assert self.start is not None  # kept whenever `needs_start_weights`
            with self.start.loaded(self._policy):
                yield self._trainer.model


@contextmanager
def _on_device(model: Model, device: torch.device) -> Iterator[None]:
    home = next(iter(model.parameters())).device
    if home.type == device.type:
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


# Log-probs and exact KLs of completions by the policy and its reference, without an effect on the training.

LOGITS, MOST_LOGITS = 2**28, 2**31
"""Bytes of logits in memory at once, unless one completion needs more: the first number on a CPU and on a full GPU, up
to the second where a quarter of the free memory of a single GPU is enough. Fewer passes are faster on a GPU."""

Columns = Json
"""(B, T) tensors of one micro-batch by role, or None, and (B,) the keys of its prompts under `group`."""


class Passes:
    """Scores micro-batches: all of them by the reference, which may have to be loaded, then all by the policy.

    Both models are in evaluation mode, so that no dropout is active, and the state of the random numbers is restored.
    The exact KLs are over the whole vocabulary.
    """

    def __init__(self, trainer: Trainer, reference: Reference, exact: bool) -> None:
        self._trainer, self._reference, self._exact = trainer, reference, exact
        self._heads_compared = False
        self.vocabulary: int | None = None
        self.temperature = float(getattr(trainer, "temperature", 1.0))

    def __call__(self, batches: list[Batch]) -> list[Columns]:
        for batch in batches:
            if batch.get("pixel_values") is not None:
                raise MeaningError("prompts of text", "images", "remove KLCallback: it scores text alone")
        device = self._trainer.accelerator.device
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            scores = self._exact_kls(batches) if self._exact else self._log_probs(batches)
        return [{**_given(batch, columns["logp"]), **columns} for batch, columns in zip(batches, scores, strict=True)]

    # Sampled

    def _log_probs(self, batches: list[Batch]) -> list[dict[str, Tensor]]:
        if self._reference.is_the_trainers and all(REF_LOGP in batch for batch in batches):
            ref_logps = [batch[REF_LOGP] for batch in batches]
        else:
            with self._reference.model() as model, without_dropout(model):
                ref_logps = [self._of_model(model, CompletionRows.of(batch)) for batch in batches]
        policy = self._trainer.model
        with without_dropout(policy):
            logps = [self._of_model(policy, CompletionRows.of(batch)) for batch in batches]
        return [{"logp": a, "ref_logp": b} for a, b in zip(logps, ref_logps, strict=True)]

    def _of_model(self, model: Model, batch: CompletionRows) -> Tensor:
        """(B, T) log-probs, from the model's own logits, some rows at a time."""
        base = self._base(model)
        can_cut = "logits_to_keep" in inspect.signature(base.forward).parameters
        short = {"logits_to_keep": batch.keep + 1} if can_cut else {}
        vocabulary = base.config.get_text_config().vocab_size
        rows = max(1, self._bytes_for_logits(batch.ids.device) // (4 * vocabulary * (batch.keep + 1)))
        logps = list[Tensor]()
        for ids, attention in zip(batch.ids.split(rows), batch.attention.split(rows), strict=True):
            with self._trainer.accelerator.autocast():
                logits = model(input_ids=ids, attention_mask=attention, use_cache=False, **short).logits
            for row, tokens in zip(logits[:, -batch.keep - 1 : -1], ids[:, -batch.keep :], strict=True):
                # One completion at a time, because float32 logits of all would be a second copy.
                row = row.float() if self.temperature == 1 else row.float() / self.temperature
                logps.append(row.gather(-1, tokens[:, None])[:, 0] - row.logsumexp(-1))
        return torch.stack(logps)

    def _bytes_for_logits(self, device: torch.device) -> int:
        """With several processes always the same: a pass may be a collective of all of them, as in FSDP."""
        several = self._trainer.accelerator.num_processes > 1
        return LOGITS if several else max(LOGITS, min(MOST_LOGITS, free_bytes(device) // 4))

    # Exact

    def _exact_kls(self, batches: list[Batch]) -> list[dict[str, Tensor]]:
        texts = [CompletionRows.of(batch) for batch in batches]
        policy = self._trainer.model
        with ExitStack() as stack:
            ref = stack.enter_context(self._reference.model())
            bases = [self._base(policy), *([] if self._reference.separate is None else [self._base(ref)])]
            self.vocabulary = shared_vocabulary(bases)
            for base in bases:
                stack.enter_context(statistics_forward(base))
            stack.enter_context(without_dropout(policy))
            stack.enter_context(without_dropout(ref))
            if not self._heads_compared:
                self._heads_compared = True
                for model in (policy, self._reference.separate):
                    if model is not None:
                        compare_head(self._trainer.accelerator, model, some_tokens(batches[0]))
            plain = [StatisticsRequest(text.keep, self.temperature) for text in texts]
            hidden = [ask(self._trainer.accelerator, ref, *text)["hidden"] for text in zip(texts, plain, strict=True)]
            head = self._head(ref)
        with statistics_forward(self._base(policy)), without_dropout(policy):
            return [self._statistics(text, h, head) for text, h in zip(texts, hidden, strict=True)]

    def _base(self, model: Model) -> Model:
        return base_of(self._trainer.accelerator.unwrap_model(model))

    def _head(self, ref: Model) -> Head:
        """The reference's head; a copy where the policy's parameters only stand for it while it is loaded."""
        head = head_of(self._trainer.accelerator.unwrap_model(ref), self.temperature, self.vocabulary)
        return head if self._reference.separate is not None else head.clone()

    def _statistics(self, batch: CompletionRows, hidden: Tensor, head: Head) -> dict[str, Tensor]:
        question = StatisticsRequest(
            batch.keep,
            self.temperature,
            batch.targets,
            batch.mask,
            (ReferencePass(hidden, head),),
            self.vocabulary,
            float32=bool(getattr(self._trainer.args, "cast_lm_head_to_fp32", False)),
        )
        answer = ask(self._trainer.accelerator, self._trainer.model, batch, question)
        kls = {"token_reverse_kl": answer["reverse_kl"], "token_forward_kl": answer["forward_kl"]}
        return {"logp": answer["logp"], "ref_logp": answer["ref_logp"], **kls}


def _given(batch: Batch, logp: Tensor) -> Columns:
    """What the batch itself has."""
    return {
        "mask": compat.sampled_tokens(batch),
        "behavior_logp": compat.sampler_log_probs(batch, logp),
        "old_logp": batch.get(OLD_LOGP),
        "token_id": CompletionRows.of(batch).targets,
        "group": compat.prompt_keys(batch),
    }
