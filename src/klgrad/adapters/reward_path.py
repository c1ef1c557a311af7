"""What the adapters of a KL in the reward share: scores, a critic, and the advice."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..audit.batch import Batch
from ..remedies import Remedy

Critic = Callable[[Batch], Tensor]
"""A value (B, T) for the prefix before each token."""


def untrained(batch: Batch) -> Tensor:
    """0 everywhere, as a new value head. Then γλ < 1 discounts the KL to come; at γ = λ = 1 nothing is lost."""
    return torch.zeros_like(batch.old_logp)


def scores(batch: Batch) -> Tensor:
    """(B, T) a completion's score on its last token: the audit's advantages, zero unless asked otherwise."""
    last = torch.arange(batch.mask.shape[1]) == batch.mask.sum(-1, keepdim=True) - 1
    return torch.where(last, batch.advantages, 0)


def instead(*, k1: str = "", unwhitened: str = "") -> Remedy | None:
    """The remedy for a KL in the reward.

    Args:
        k1: the setting that selects k1; empty where it is selected already.
        unwhitened: the setting that stops dividing by the standard deviation of the batch; empty where nothing does.

    Returns:
        The settings to use, or None where neither is needed.
    """
    reasons = ["in the reward only k1 descends the reverse KL"] if k1 else []
    if unwhitened:
        reasons.append("whitening divides β by the standard deviation of the batch")
    return Remedy(use=(" with ".join(filter(None, [k1, unwhitened])),), why="; ".join(reasons)) if reasons else None
