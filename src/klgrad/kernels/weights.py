"""The gradient of a weighted sum of the outputs with respect to one logit, from a few numbers per token.

With p, q the two probabilities of a vocabulary entry v, Δ = log p - log q and y the sampled token,

    d/dz of  w_l·logp + w_r·reverse + w_f·forward + w_e·entropy
      = p (α + w_r Δ - w_e log p) - w_f q + w_l [v = y],   α = w_f - w_l - w_r·reverse - w_e·entropy

and the reference's logits have no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .state import Finished

FIELDS = 7


class Upstream(NamedTuple):
    """The derivatives of the loss with respect to each output, (N,) each."""

    logp: Tensor
    reverse_kl: Tensor
    forward_kl: Tensor
    entropy: Tensor


def per_token(finished: Finished, upstream: Upstream, elsewhere: Tensor | None = None) -> Tensor:
    """The (FIELDS, N) numbers: log-sum-exp, shift, α, w_r, -w_e, w_f, w_l.

    `elsewhere` is the (N,) sum of the weights on other entries' log-probs.
    """
    w = upstream
    total = w.logp if elsewhere is None else w.logp + elsewhere
    alpha = w.forward_kl - total - _product(w.reverse_kl, finished.reverse_kl) - w.entropy * finished.entropy
    return torch.stack(
        [finished.logsumexp, finished.shift, alpha, w.reverse_kl, -w.entropy, w.forward_kl, w.logp]
    ).contiguous()


def _product(weight: Tensor, kl: Tensor) -> Tensor:
    return torch.where(weight == 0, 0.0, weight * kl)  # an infinite KL without a weight contributes nothing


def at_logits(
    rows: Tensor, log_p: Tensor, pair: tuple[Tensor, Tensor] | None, hit: Tensor, extra: Tensor | None
) -> Tensor:
    """The formula above, for a (N, width) tile; `pair` is (Δ, log q), `hit` marks the sampled token."""
    _, _, alpha, w_reverse, minus_w_entropy, w_forward, w_logp = (row[:, None] for row in rows)
    p = log_p.exp()
    inner = alpha + minus_w_entropy * log_p
    out = torch.where(hit, w_logp, 0.0)
    if pair is not None:
        delta, log_q = pair
        inner = inner + w_reverse * delta
        out = out - w_forward * log_q.exp()
    out = out + p * inner
    return out if extra is None else out + extra
