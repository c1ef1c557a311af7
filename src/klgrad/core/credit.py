r"""Credit: which later terms the score of token t is paired with, and which baseline is taken off.

A token's term belongs to that token alone (*token*), to it and all before it (*to go*), or to every token
of the completion (*whole*). Only the last two are unbiased for a sequence-level divergence.
"""

import torch
from torch import Tensor

from ..errors import RolloutError
from .running_sum import running_sum


def to_go(x: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    r"""The sum R_t = x_t + g R_{t'} with t' the next live token; (B, T) to (B, T), 0 where masked.

    Steps are counted in live tokens, so that masked-out tool outputs inside a completion do not discount.
    """
    return torch.where(mask, _scan(x, mask, discount), 0)


def future(x: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """What `to_go` adds to x_t: the discounted terms strictly after token t."""
    after = torch.zeros_like(x)
    if discount == 0:
        return after
    after[:, :-1] = _scan(x, mask, discount)[:, 1:]
    return torch.where(mask, discount * after, 0)


def _scan(x: Tensor, mask: Tensor, discount: float) -> Tensor:
    """Discounted suffix sums in log2(T) vectorised steps; dead positions pass on what follows them.

    R_t = x_t + a_t R_{t+1} with a_t = g at live and 1 at dead positions; composing the affine maps of
    doubling spans needs no power of 1/g, so that it is stable for every discount in [0, 1].
    """
    total = torch.where(mask, x, 0)
    if discount == 1:
        return running_sum(total.flip(-1)).flip(-1)
    decay = torch.ones_like(total).masked_fill(mask, discount)
    span = 1
    while span < x.shape[-1]:
        reach = decay[:, :-span]
        total = torch.cat([total[:, :-span] + reach * total[:, span:], total[:, -span:]], -1)
        decay = torch.cat([reach * decay[:, span:], decay[:, -span:]], -1)
        span *= 2
    return total


def whole(x: Tensor, mask: Tensor) -> Tensor:
    """The sum over the completion, at each of its live tokens."""
    total = torch.where(mask, x, 0).sum(-1, keepdim=True)
    return torch.where(mask, total, 0)


def leave_one_out(x: Tensor, group: Tensor | None) -> Tensor:
    r"""Mean of x over the *other* completions of the group: (B,) per sequence, or (B, T) per step.

    It does not look at the completion it is taken from, so subtracting it from a coefficient leaves the
    expected gradient as it is. A mean over the whole group would shrink it by 1 - 1/n.
    """
    total, size = group_total(x, group)
    return (total - x) / (size - 1)


def group_total(x: Tensor, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum of x over each completion's group, and the group's size, in shapes that broadcast with x."""
    if group is None:
        raise RolloutError("a `group` index per completion for a group statistic", "none", "pass Rollout(group=...)")
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)
    size = counts[index]
    if bool((size < 2).any()):
        alone = group[size < 2][0].item()
        raise RolloutError(
            "at least 2 completions in every group",
            f"group {alone} with 1",
            "sample more completions per prompt, or do without a group baseline",
        )
    index, size = index.to(x.device), size.to(x.device, x.dtype)
    total = torch.zeros(len(counts), *x.shape[1:], dtype=x.dtype, device=x.device).index_add(0, index, x)
    return total[index], size.reshape(-1, *[1] * (x.ndim - 1))
