"""A head whose vocabulary is split over processes. Running sums are gathered, logits are not."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import state


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a vocabulary of this process.

    Attributes:
        vocabulary: number of entries of the whole vocabulary.
        group: the process group; None if the vocabulary is not split.
        start: the first entry of this part.
    """

    vocabulary: int
    group: Any = None
    start: int = 0

    def merge(self, own: Tensor) -> Tensor:
        """Merge the (FIELDS, N) state of this part with those of all parts."""
        if self.group is None:
            return own
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return state.merge(torch.stack(parts, 1))

    def total(self, x: Tensor) -> Tensor:
        """The sum over all parts."""
        if self.group is not None and x.numel():
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
        return x


def shard_of(vocabulary: int, group: Any, device: torch.device) -> Shard:
    """The part of this process, which begins after the parts of lower ranks."""
    if group is None:
        return Shard(vocabulary)
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.long, device=device)
    sizes[dist.get_rank(group)] = vocabulary
    dist.all_reduce(sizes, group=group)
    return Shard(int(sizes.sum()), group, int(sizes[: dist.get_rank(group)].sum()))
