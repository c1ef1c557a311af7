"""The means over tokens and completions, and the advantages within a group, that the published losses use."""

import torch
from torch import Tensor

from ..core.grouping import number_groups

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""


def sum_per_completion(per_token: Tensor, mask: Tensor) -> Tensor:
    """The sum over the tokens of each completion, averaged over completions."""
    return torch.where(mask, per_token, 0).sum(-1).mean()


def mean_per_completion(per_token: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens of each completion, averaged over completions; 0 for one without tokens."""
    return (torch.where(mask, per_token, 0).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def mean_over_tokens(per_token: Tensor, mask: Tensor) -> Tensor:
    """The mean over all tokens of the batch."""
    return torch.where(mask, per_token, 0).sum() / mask.sum().clamp(min=1)


def token_ratio(logp: Tensor, sampled_logp: Tensor) -> Tensor:
    """(B, T) π/μ of each token; a padded token may have any value."""
    return (logp - sampled_logp).exp()


def sequence_ratio(logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) π/μ of each completion."""
    return torch.where(mask, logp - sampled_logp, 0).sum(-1, keepdim=True).exp()


def geometric_ratio(logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) the geometric mean of π/μ over the tokens of each completion; 1 for one without tokens."""
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return (torch.where(mask, logp - sampled_logp, 0).sum(-1, keepdim=True) / length).exp()


def centred(rewards: Tensor, group: Tensor) -> Tensor:
    """(B, 1) the rewards minus the mean of their group."""
    number, sizes = number_groups(group)
    mean = torch.zeros(len(sizes), dtype=rewards.dtype).index_add(0, number, rewards) / sizes
    return (rewards - mean[number])[:, None]


def apart_from_others(rewards: Tensor, group: Tensor) -> Tensor:
    """(B, 1) the rewards minus the mean of the others of their group."""
    number, sizes = number_groups(group)
    size = sizes[number, None]
    return centred(rewards, group) * size / (size - 1)


def normalised(rewards: Tensor, group: Tensor) -> Tensor:
    """(B, 1) the rewards minus the mean of their group, divided by the standard deviation of the group."""
    number, sizes = number_groups(group)
    apart = centred(rewards, group)
    squares = torch.zeros(len(sizes), dtype=rewards.dtype).index_add(0, number, apart[:, 0] ** 2)
    return apart / ((squares / (sizes - 1)).sqrt()[number, None] + EPSILON)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's pessimistic objective, as a loss: -min(r A, clip(r, 1 - low, 1 + high) A)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
