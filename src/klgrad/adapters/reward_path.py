"""Shared by the adapters of a KL in the reward: scores, a critic, and the remedy."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..audit.batch import Batch
from ..remedies import Remedy

Critic = Callable[[Batch], Tensor]
"""A value (B, T) for the prefix before each token."""


def untrained(batch: Batch) -> Tensor:
    """A critic that is 0 everywhere, as a new value head is. With γλ < 1 GAE then discounts the later KL."""
    return torch.zeros_like(batch.old_logp)


def scores(batch: Batch) -> Tensor:
    """(B, T) the score of each completion on its last token: the advantages of the audit, zero by default."""
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
