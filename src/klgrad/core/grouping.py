"""Groups of completions by their labels."""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor


class Groups(NamedTuple):
    """Groups numbered from 0.

    Attributes:
        number: (B,) the number of each completion's group.
        sizes: (G,) the number of completions in each group.
    """

    number: Tensor
    sizes: Tensor


def number_groups(label: Tensor) -> Groups:
    """Number the groups of completions that share a label.

    Args:
        label: (B,) integers.

    Returns:
        The groups, numbered in the order of their labels.

    Examples:
        >>> import torch
        >>> number_groups(torch.tensor([7, 3, 7]))
        Groups(number=tensor([1, 0, 1]), sizes=tensor([1, 2]))
    """
    unique = cast("Callable[..., tuple[Tensor, Tensor, Tensor]]", torch.unique)  # pyright: ignore[reportUnknownMemberType]
    _, number, sizes = unique(label, return_inverse=True, return_counts=True)
    return Groups(number, sizes)
