r"""The optima of max_π E_π[r] - β KL, in closed form, for distributions small enough to write down."""

import math

import torch
from torch import Tensor

from ..errors import MeaningError

BISECTIONS = 100
"""Halvings of the bracket of log(λ* - max r): it is at most some thousands wide, and 2^-100 of that is
beyond every float."""


def reverse_optimum(ref_logp: Tensor, reward: Tensor, beta: float) -> Tensor:
    r"""Log π* of max E[r] - β KL(π‖ref):  π*(y) ∝ ref(y) exp(r(y)/β), over the last axis."""
    _check(beta)
    return torch.log_softmax(ref_logp + reward / beta, dim=-1)


def forward_optimum(ref_logp: Tensor, reward: Tensor, beta: float) -> Tensor:
    r"""Log π*_rev of max E[r] - β KL(ref‖π):  π(y) = β ref(y) / (λ* - r(y)), λ* > max r by bisection.

    This is where k3 as a loss takes a policy, instead of `reverse_optimum`.
    """
    _check(beta)
    if not bool(torch.isfinite(ref_logp).all()):
        raise MeaningError("a ref that gives every outcome some probability", "-inf or NaN", "leave such outcomes out")
    gap = reward.amax(-1, keepdim=True) - reward  # >= 0, so that λ - r = slack + gap has no cancellation
    scaled = math.log(beta) + ref_logp
    # The masses β ref / (slack + gap) sum to at most 1 at slack = β; at slack = β ref(best) the best alone has 1.
    high = torch.full_like(gap[..., :1], math.log(beta))
    low = torch.where(gap == 0, scaled, -math.inf).amax(-1, keepdim=True)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_heavy = (scaled - torch.logaddexp(middle, gap.log())).logsumexp(-1, keepdim=True) > 0
        low, high = torch.where(too_heavy, middle, low), torch.where(too_heavy, high, middle)
    return torch.log_softmax(scaled - torch.logaddexp((low + high) / 2, gap.log()), dim=-1)


def _check(beta: float) -> None:
    if not 0 < beta < float("inf"):
        raise MeaningError("beta > 0", f"{beta:g}", "without regularisation the optimum is an argmax")
