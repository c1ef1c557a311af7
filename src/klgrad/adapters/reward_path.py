"""What the adapters of a KL in the reward share: scores, a critic, and the advice."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..audit.batch import Batch

Critic = Callable[[Batch], Tensor]
"""A value (B, T) for the prefix before each token."""


def untrained(batch: Batch) -> Tensor:
    """0 everywhere, as a new value head. Then γλ < 1 discounts the KL to come; at γ = λ = 1 nothing is lost."""
    return torch.zeros_like(batch.old_logp)


def scores(batch: Batch) -> Tensor:
    """(B, T) a completion's score on its last token: the audit's advantages, zero unless asked otherwise."""
    last = torch.arange(batch.mask.shape[1]) == batch.mask.sum(-1, keepdim=True) - 1
    return torch.where(last, batch.advantages, 0)


def instead(*, k1: str = "", unwhitened: str = "") -> str:
    """The settings to take instead: of another estimator, of an advantage that is whitened over the batch."""
    found = [f"in the reward only k1 keeps its meaning, {k1}"] if k1 else []
    if unwhitened:
        found.append(f"the batch's spread divides β, and in a large batch does no more; {unwhitened} leaves β alone")
    return "; ".join(found)
