"""Does β move the gradient? Looks once whether the gradient of the training loss depends on the reference.

With beta > 0 a trainer loads a reference and scores every completion by it. A subclass whose loss leaves the KL out
trains without an error, and without a KL.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ..seam import batch as scored
from ..seam.batch import Batch
from ..seam.observe import loss_leaves_no_trace, scores_a_reference

Verdict = Literal["moves", "does not move", "unknown"]
Loss = Callable[[Any, Batch], Tensor]

PROBES, LARGEST = 8, 2**20
"""The gradient is looked at for a few of the last parameters, each of at most this many elements."""

SHIFT = 1.0
"""Nats by which the reference's log-probs are moved for the second look."""

NOISE = 10.0
"""A change of the gradient is one if it exceeds this multiple of the difference between two equal evaluations."""


class BetaCheck:
    """Wraps the training loss until there is a verdict.

    The first look costs one forward pass: the reference's log-probs r are given to the loss as a leaf of the graph, and
    ∂²L/∂r∂θ is computed, which is zero if and only if ∂L/∂θ does not depend on r near its values. (∂L/∂θ itself would
    not do: where π = ref the KL has the gradient 0.) A loss that detaches r has no such derivative; so before a verdict
    against it, on the next micro-batch, ∂L/∂θ is computed with r and with r - 1.

    The training has a graph of its own: some layers, such as Liger's, overwrite in a backward pass what another pass of
    the same graph needs.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._looks = 0
        beta = getattr(trainer, "beta", 0.0)
        self.beta = float(beta) if isinstance(beta, int | float) else 0.0
        self.verdict: Verdict | None = None

    @property
    def is_due(self) -> bool:
        """Whether there is something to look at: β is set, and the loss is one that reads the reference's log-probs."""
        return self.beta > 0 and self.verdict is None and scores_a_reference(self._trainer)

    def __call__(self, loss: Loss, model: Any, batch: Batch) -> Tensor:
        """The training loss of a micro-batch, after or before a look at it."""
        if not self.is_due or not self._has_tokens_everywhere(batch):
            return loss(model, batch)
        if not scored.has_reference_log_probs(batch):
            self.verdict = "does not move"  # the loss has nothing to compute a KL from
            return loss(model, batch)
        self._looks += 1
        look = self._first_look if self._looks == 1 else self._second_look
        try:
            found = look(loss, model, batch)
        except Exception:  # too little memory, for example: the training goes on
            if self._trainer.accelerator.num_processes > 1:
                raise  # the others wait for this process within the loss
            found = "unknown"
        found = self._agreed(found)
        if self._looks > 1 or found == "moves":
            self.verdict = found
        return loss(model, batch)

    def message(self) -> str:
        """The warning for a verdict against the loss."""
        name = type(self._trainer).__name__
        return (
            f"expected a loss whose gradient depends on the reference, as beta={self.beta:g} declares; received the "
            f"same gradient for another reference, from {name}.compute_loss; remedy: the KL is left out of the loss "
            "although the reference is loaded and scored: add beta * per_token_kl to the loss, or set beta=0, which "
            "saves the reference's memory and time. KLCallback(check_beta=False) silences this"
        )

    def _first_look(self, loss: Loss, model: Any, batch: Batch) -> Verdict:
        ref_logp = scored.reference_log_probs(batch).detach().clone().requires_grad_()
        with self._apart(model):
            return _depends(loss(model, scored.with_reference_log_probs(batch, ref_logp)), ref_logp, probes(model))

    def _second_look(self, loss: Loss, model: Any, batch: Batch) -> Verdict:
        ref_logp, parameters = scored.reference_log_probs(batch), probes(model)

        def gradient(shift: float) -> list[Tensor | None]:
            moved = scored.with_reference_log_probs(batch, ref_logp - shift)
            with self._apart(model):
                return list(torch.autograd.grad(loss(model, moved), parameters, allow_unused=True))

        here, again, away = gradient(0.0), gradient(0.0), gradient(SHIFT)
        return "moves" if _distance(here, away) > NOISE * _distance(here, again) else "does not move"

    @contextmanager
    def _apart(self, model: Any) -> Iterator[None]:
        """For a loss that is not trained on: it leaves no trace, and each has the same random numbers, for dropout."""
        accelerator = self._trainer.accelerator
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        with loss_leaves_no_trace(self._trainer), accelerator.no_sync(model), torch.random.fork_rng(devices=devices):
            yield

    def _has_tokens_everywhere(self, batch: Batch) -> bool:
        """Whether each process has a token to train on. All must look, or none: the loss exchanges metrics."""
        return bool(self._of_all(int(scored.sampled_tokens(batch).any())).min())

    def _agreed(self, own: Verdict) -> Verdict:
        """The verdict of all processes, which must take the same way: one that sees a dependence is enough."""
        order: tuple[Verdict, ...] = ("unknown", "does not move", "moves")
        return order[int(self._of_all(order.index(own)).max())]

    def _of_all(self, own: int) -> Tensor:
        accelerator = self._trainer.accelerator
        found: Any = accelerator.gather(torch.tensor([own], device=accelerator.device))
        return found


def probes(model: Any) -> list[Tensor]:
    """The last small parameters that are trained: their gradient needs the least of a backward pass."""
    trained = [p for p in model.parameters() if p.requires_grad]
    small = [p for p in trained if 0 < p.numel() <= LARGEST]
    return (small or sorted(trained, key=lambda p: p.numel())[:1])[-PROBES:]


def _depends(loss: Tensor, ref_logp: Tensor, parameters: list[Tensor]) -> Verdict:
    """Whether ∂²L/∂r∂θ is not zero, summed over tokens with weights that do not cancel by chance."""
    try:
        (slope,) = torch.autograd.grad(loss, ref_logp, create_graph=True, allow_unused=True)
        if slope is None or not slope.requires_grad:
            return "does not move"
        weights = 1.5 + torch.arange(slope.numel(), device=slope.device, dtype=slope.dtype).cos().view_as(slope)
        mixed = torch.autograd.grad((weights * slope).sum(), parameters, retain_graph=True, allow_unused=True)
    except RuntimeError:  # a fused loss without a second derivative, or reentrant checkpointing
        return "unknown"
    return "moves" if any(x is not None and bool(x.count_nonzero()) for x in mixed) else "does not move"


def _distance(a: list[Tensor | None], b: list[Tensor | None]) -> float:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return max((float((x - y).abs().max()) for x, y in pairs), default=0.0)
