r"""Credit assignment: which terms the score of token t is multiplied by, and which baseline is subtracted.

A token's term can be credited to that token alone, to it and all tokens before it (`to_go`), or to every token of the
completion (`whole`). Only the last two are unbiased for a sequence-level divergence.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ..errors import RolloutError
from .rollout import running_sum

__all__ = ["future", "group_total", "leave_one_out", "to_go", "whole"]


# Groups of completions by their labels.


def number_groups(label: Tensor) -> tuple[Tensor, Tensor]:
    """Number the groups of completions that share a label.

    Args:
        label: (B,) integers.

    Returns:
        (B,) the number of each completion's group, from 0 in the order of the labels; (G,) the sizes of the groups.

    Examples:
        >>> import torch
        >>> number_groups(torch.tensor([7, 3, 7]))
        (tensor([1, 0, 1]), tensor([1, 2]))
    """
    unique = cast("Callable[..., tuple[Tensor, Tensor, Tensor]]", torch.unique)  # pyright: ignore[reportUnknownMemberType]
    _, number, sizes = unique(label, return_inverse=True, return_counts=True)
    return number, sizes


def to_go(x: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    r"""The discounted sum of this and all later terms: R_t = x_t + g R_{t'}, with t' the next live token.

    Steps are counted in live tokens, so that masked tool outputs inside a completion do not discount.

    Args:
        x: (B, T) terms.
        mask: (B, T) live tokens.
        discount: g in [0, 1].

    Returns:
        (B, T), 0 where masked.

    Examples:
        >>> import torch
        >>> from klgrad import credit
        >>> credit.to_go(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, True]]), discount=0.5)
        tensor([[3., 4., 4.]])

    References:
        Tang and Munos, On a few pitfalls in KL divergence gradient estimation for RL, 2025, arXiv:2506.09477.
    """
    return torch.where(mask, _scan(x, mask, discount), 0)


def future(x: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """The discounted sum of all later terms, which `to_go` adds to x_t.

    Args:
        x: (B, T) terms.
        mask: (B, T) live tokens.
        discount: g in [0, 1].

    Returns:
        (B, T), 0 where masked.

    Examples:
        >>> import torch
        >>> from klgrad import credit
        >>> credit.future(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, True]]))
        tensor([[6., 4., 0.]])
    """
    after = torch.zeros_like(x)
    if discount == 0:
        return after
    after[:, :-1] = _scan(x, mask, discount)[:, 1:]
    return torch.where(mask, discount * after, 0)


def _scan(x: Tensor, mask: Tensor, discount: float) -> Tensor:
    """Discounted suffix sums in log2(T) vectorised steps; masked positions copy what follows them.

    R_t = x_t + a_t R_{t+1} with a_t = g at live and 1 at masked positions. Composing the affine maps of
    doubling spans needs no power of 1/g, which makes it stable for every discount in [0, 1].
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
    """The sum over the completion, at each of its live tokens.

    Args:
        x: (B, T) terms.
        mask: (B, T) live tokens.

    Returns:
        (B, T), 0 where masked.

    Examples:
        >>> import torch
        >>> from klgrad import credit
        >>> credit.whole(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, False]]))
        tensor([[3., 3., 0.]])
    """
    total = torch.where(mask, x, 0).sum(-1, keepdim=True)
    return torch.where(mask, total, 0)


def leave_one_out(x: Tensor, group: Tensor | None) -> Tensor:
    r"""The mean of x over the *other* completions of the group.

    It does not depend on the completion itself, so that subtracting it from a coefficient does not change the
    expected gradient. Subtracting the mean of the whole group would shrink the gradient by 1 - 1/n.

    Args:
        x: (B,) one value per completion, or (B, T) one per token.
        group: (B,) integer labels.

    Returns:
        The means, in the shape of x.

    Raises:
        RolloutError: if there is no group, or one of a single completion.

    Examples:
        >>> import torch
        >>> from klgrad import credit
        >>> credit.leave_one_out(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 0]))
        tensor([2.5000, 2.0000, 1.5000])

    References:
        Kool, van Hoof and Welling, Buy 4 REINFORCE samples, get a baseline for free!, ICLR 2019 workshop.
    """
    total, size = group_total(x, group)
    return (total - x) / (size - 1)


def group_total(x: Tensor, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of x over each completion's group, and the group's size.

    Args:
        x: (B,) one value per completion, or (B, T) one per token.
        group: (B,) integer labels.

    Returns:
        The sums in the shape of x, and the sizes in a shape that broadcasts with it.

    Raises:
        RolloutError: if there is no group, or one of a single completion.

    Examples:
        >>> import torch
        >>> from klgrad import credit
        >>> credit.group_total(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 1, 0, 1]))
        (tensor([ 5., 10.,  5., 10.]), tensor([2., 2., 2., 2.]))
    """
    if group is None:
        raise RolloutError("a `group` index per completion for a group statistic", "none", "pass Rollout(group=...)")
    index, sizes = number_groups(group)
    size = sizes[index]
    if bool((size < 2).any()):
        alone = group[size < 2][0].item()
        raise RolloutError(
            "at least 2 completions in every group",
            f"group {alone} with 1",
            "sample more completions per prompt, or use no group baseline",
        )
    index, size = index.to(x.device), size.to(x.device, x.dtype)
    total = torch.zeros(len(sizes), *x.shape[1:], dtype=x.dtype, device=x.device).index_add(0, index, x)
    return total[index], size.reshape(-1, *[1] * (x.ndim - 1))
