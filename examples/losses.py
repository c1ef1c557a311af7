"""Typical KL losses of trainers, to audit: `klgrad audit examples/losses.py:grpo_k3`.

Copy one, or audit your own file. A loss names the tensors that it needs in its signature, and returns a scalar or one
value per token.
"""

import torch
from torch import Tensor


def grpo_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """GRPO's penalty, per token: k3 differentiated."""
    away = ref_logp - logp
    return torch.exp(away) - away - 1


def k1_penalty(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The log-ratio itself, added to the loss."""
    return logp - ref_logp


def squared(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Half the squared log-ratio, per token."""
    return 0.5 * (logp - ref_logp) ** 2


def clipped_policy_loss(
    logp: Tensor, old_logp: Tensor, ref_logp: Tensor, advantages: Tensor, mask: Tensor, beta: float = 0.04
) -> Tensor:
    """A whole loss: the clipped policy term, and a KL averaged over the batch's tokens."""
    ratio = torch.exp(logp - old_logp)
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    per_token = policy + beta * squared(logp, ref_logp)
    return (per_token * mask).sum() / mask.sum()
