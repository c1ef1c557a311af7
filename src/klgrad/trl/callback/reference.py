"""The reference of a run: a given model, the trainer's own, the policy without adapters, or the start weights."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import MeaningError
from ..seam.models import has_adapters, is_split, without_adapters
from .device_memory import free_bytes

PINNED = 2**32
"""Bytes of weights up to which their copy is kept in pinned memory, from which a GPU loads them several times faster.
Pinned memory cannot be swapped out, and each tensor takes a power of 2 of it."""


class StartWeights:
    """A copy on the CPU of the weights that are trained.

    Args:
        model: the policy before training.
    """

    def __init__(self, model: Any) -> None:
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self._kept: dict[str, Tensor] = {name: p.detach().to("cpu", copy=True) for name, p in trained}

    def pin(self) -> None:
        """Move a copy of up to `PINNED` bytes into pinned memory, when it is known that a GPU will load it."""
        if sum(x.nbytes for x in self._kept.values()) <= PINNED:
            for name in self._kept:
                self._kept[name] = _pinned(self._kept[name])

    @contextmanager
    def loaded(self, model: Any) -> Iterator[None]:
        """While the context lasts, the policy has its start weights; afterwards it has its own again, bit for bit.

        The weights are copied in place, so that what refers to their storage (optimizer, DDP) is not affected. The
        policy's own wait on the device meanwhile if half of its free memory is enough, else on the CPU.
        """
        pairs = self._pairs(model)
        room = all(2 * size <= free_bytes(device) for device, size in _sizes(pairs).items())
        own = [p.data.clone() if room else p.data.to("cpu", copy=True) for p, _ in pairs]
        try:
            for p, start in pairs:
                p.data.copy_(start, non_blocking=True)
            yield
        finally:
            for (p, _), value in zip(pairs, own, strict=True):
                p.data.copy_(value)

    def _pairs(self, model: Any) -> list[tuple[Tensor, Tensor]]:
        now = dict(model.named_parameters())
        for name, start in self._kept.items():
            if name not in now or now[name].shape != start.shape or is_split(now[name]) or _is_sharded(now[name]):
                raise MeaningError(
                    "the policy's parameters whole, as they were at the start",
                    f"`{name}` missing, or split between processes",
                    "give the reference as a model: KLCallback(reference=model)",
                )
        return [(now[name], start) for name, start in self._kept.items()]


def _pinned(x: Tensor) -> Tensor:
    try:
        return x.pin_memory()
    except RuntimeError:  # the system may limit how much memory can be pinned
        return x


def _sizes(pairs: list[tuple[Tensor, Tensor]]) -> dict[torch.device, int]:
    """Bytes of the parameters on each device."""
    found: dict[torch.device, int] = defaultdict(int)
    for p, _ in pairs:
        found[p.device] += p.nbytes
    return found


def _is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "device_mesh")  # a DTensor, as FSDP2 has


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

    def __init__(self, trainer: Any, given: Any, start: StartWeights | None) -> None:
        self._trainer, self._given = trainer, given
        own = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
        self._own = next((model for model in own if model is not None), None)
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
    def separate(self) -> Any:
        """The model, if it is another one than the policy."""
        return self._given if self._given is not None else self._own

    @property
    def _policy(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    @contextmanager
    def model(self) -> Iterator[Any]:
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
def _on_device(model: Any, device: torch.device) -> Iterator[None]:
    home = next(iter(model.parameters())).device
    if home.type == device.type:
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(home)
