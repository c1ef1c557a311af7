r"""The optima of max_π E_π[r] - β KL, in closed form, for distributions small enough to write down."""

import math

import torch
from torch import Tensor

from ..errors import MeaningError

BISECTIONS = 100
"""Halvings of the bracket of log(λ* - max r). It is at most some thousands wide, and 2^-100 of that is below the
precision of every float."""


def reverse_optimum(ref_logp: Tensor, reward: Tensor, beta: float) -> Tensor:
    r"""The optimum of E_π[r] - β KL(π‖ref), as log-probs: π*(y) ∝ ref(y) exp(r(y)/β).

    Args:
        ref_logp: (..., Y) log-probs of ref over all outcomes.
        reward: (..., Y) reward of each outcome.
        beta: strength of the regularisation, > 0.

    Returns:
        (..., Y) log π*.

    Raises:
        MeaningError: if beta is not positive and finite.

    Examples:
        >>> import torch
        >>> from klgrad import reverse_optimum
        >>> reverse_optimum(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]), beta=1.0).exp()
        tensor([0.7311, 0.2689])
    """
    _check(beta)
    return torch.log_softmax(ref_logp + reward / beta, dim=-1)


def forward_optimum(ref_logp: Tensor, reward: Tensor, beta: float) -> Tensor:
    r"""The optimum of E_π[r] - β KL(ref‖π), as log-probs: π(y) = β ref(y) / (λ* - r(y)).

    λ* > max r is found by bisection. A policy trained with k3 as a loss converges to this optimum instead of
    `reverse_optimum`.

    Args:
        ref_logp: (..., Y) log-probs of ref over all outcomes, all finite.
        reward: (..., Y) reward of each outcome.
        beta: strength of the regularisation, > 0.

    Returns:
        (..., Y) log-probs of the optimum.

    Raises:
        MeaningError: if beta is not positive and finite, or ref gives an outcome no probability.

    Examples:
        >>> import torch
        >>> from klgrad import forward_optimum
        >>> forward_optimum(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]), beta=1.0).exp()
        tensor([0.7071, 0.2929])

    References:
        Grill, Altché, Tang, Hubert, Valko, Antonoglou and Munos, Monte-Carlo tree search as regularized policy
        optimization, ICML 2020, arXiv:2007.12509 (the closed form and its bisection).
    """
    _check(beta)
    if not bool(torch.isfinite(ref_logp).all()):
        raise MeaningError("a ref that gives every outcome some probability", "-inf or NaN", "remove such outcomes")
    gap = reward.amax(-1, keepdim=True) - reward  # >= 0, so that λ - r = slack + gap does not cancel
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
        raise MeaningError(
            "beta > 0", f"{beta:g}", "pass a positive, finite beta; at beta = 0 the optimum is an argmax"
        )
