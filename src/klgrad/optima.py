r"""The optima of max_π E_π[r] - β KL, in closed form, for distributions small enough to write down."""

import torch
from torch import Tensor

from .errors import MeaningError

BISECTIONS = 200
"""Halvings of the bracket of λ*: more than the 53 bits of a float64 mantissa and 11 of its exponent."""


def reverse_optimum(ref_logp: Tensor, reward: Tensor, beta: float) -> Tensor:
    r"""Log π* of max E[r] - β KL(π‖ref):  π*(y) ∝ ref(y) exp(r(y)/β), over the last axis."""
    _check(beta)
    return torch.log_softmax(ref_logp + reward / beta, dim=-1)


def forward_optimum(ref_logp: Tensor, reward: Tensor, beta: float) -> Tensor:
    r"""Log π*_rev of max E[r] - β KL(ref‖π):  π(y) = β ref(y) / (λ* - r(y)), λ* > max r by bisection.

    This is where k3 as a loss takes a policy, instead of `reverse_optimum`.
    """
    _check(beta)
    gap = reward.amax(-1, keepdim=True) - reward  # >= 0, so that λ - r = slack + gap has no cancellation
    # At slack = β the masses sum to at most 1; at slack = β ref(best) that one entry alone reaches 1.
    high = torch.full_like(gap[..., :1], beta)
    low = beta * torch.where(gap == 0, ref_logp.exp(), 0).amax(-1, keepdim=True)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_heavy = (beta * ref_logp.exp() / (middle + gap)).sum(-1, keepdim=True) > 1
        low, high = torch.where(too_heavy, middle, low), torch.where(too_heavy, high, middle)
    return torch.log_softmax(ref_logp - ((low + high) / 2 + gap).log(), dim=-1)


def _check(beta: float) -> None:
    if not 0 < beta < float("inf"):
        raise MeaningError("beta > 0", f"{beta:g}", "without regularisation the optimum is an argmax")
