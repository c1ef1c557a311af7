"""The specification in plain torch, over full logits. All other implementations are tested and timed against it."""

import torch
from torch import Tensor

from .fused_statistics import TokenStatistics
from .head import Head


def logits(hidden: Tensor, head: Head) -> Tensor:
    """(..., V) logits, in the dtype of the product."""
    raw = hidden @ head.weight.T
    return head.transform.apply(raw if head.bias is None else raw + head.bias)


def statistics_of_logits(
    z: Tensor, targets: Tensor, z_ref: Tensor | None = None, entries: Tensor | None = None
) -> TokenStatistics:
    """Compute all outputs by their definitions."""
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    pick = lambda table, index: table.gather(-1, index)
    logp = pick(log_p, targets[..., None])[..., 0]
    entropy = -(p * log_p).sum(-1)
    others = None if entries is None else pick(log_p, entries)
    if z_ref is None:
        return TokenStatistics(logp, entropy, None, None, None, others)
    log_q = torch.log_softmax(z_ref.detach(), -1)
    return TokenStatistics(
        logp,
        entropy,
        pick(log_q, targets[..., None])[..., 0],
        (p * (log_p - log_q)).sum(-1),
        (log_q.exp() * (log_q - log_p)).sum(-1),
        others,
    )


def token_statistics(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    ref_hidden: Tensor | None = None,
    ref_head: Head | None = None,
    entries: Tensor | None = None,
) -> TokenStatistics:
    """Compute the same as `klgrad.kernels.token_statistics`, with all logits in memory."""
    z_ref = None if ref_hidden is None or ref_head is None else logits(ref_hidden, ref_head)
    return statistics_of_logits(logits(hidden, head), targets, z_ref, entries)
