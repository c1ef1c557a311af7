"""One tile of the logits: some tokens times some of the vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .head import Transform


@dataclass(frozen=True, eq=False)
class Tile:
    """Raw logits of both models, before bias and transform, with the tokens' targets.

    Attributes:
        start: the first vocabulary entry; `targets` count from 0 of the whole head.
        raw: (N, width) in the accumulation dtype, or None where the tile was kept.
        ref_raw: likewise, or None without a reference.
        projected: raw logits are a matrix product; given ones may be -inf on purpose.
        extra: (N, width) added to the gradient towards the logits, for weights on other entries' log-probs.
    """

    start: int
    width: int
    targets: Tensor
    raw: Tensor | None
    ref_raw: Tensor | None
    bias: Tensor | None
    ref_bias: Tensor | None
    transform: Transform
    ref_transform: Transform
    projected: bool = True
    extra: Tensor | None = None

    @property
    def finite(self) -> bool:
        """Whether all logits are known to be: those of a matrix product are, or an input was not."""
        return self.projected and self.bias is None and self.ref_bias is None

    def locate(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of vocabulary entries within the tile (any where it does not hold them), and whether it does."""
        local = entries - self.start
        return local.clamp(0, self.width - 1), (local >= 0) & (local < self.width)


LARGEST_KEPT = 60000.0
"""Kept values beyond this are held at it, so that float16 stays finite: such an entry has no probability."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What is kept of a tile: a = z - top of its slice, and d = a - b. Both are exact where they matter.

    Near the top of the distribution a is near 0, near the reference d is, and floating point is finest there; so
    16 bits lose less than the bf16 gradient that is made of them.
    """

    a: Tensor
    d: Tensor | None

    def store(self, a: Tensor, d: Tensor | None) -> None:
        """Round and copy."""
        self.a.copy_(a.clamp(-LARGEST_KEPT, LARGEST_KEPT))
        if self.d is not None and d is not None:
            self.d.copy_(d.clamp(-LARGEST_KEPT, LARGEST_KEPT))

    def cut(self, rows: slice, columns: range) -> "Kept | None":
        """The part of a tile, or None if the tile lies beyond what is kept."""
        if columns.start >= self.a.shape[1]:
            return None
        part = (rows, slice(columns.start, columns.stop))
        return Kept(self.a[part], None if self.d is None else self.d[part])


def kept_dtype(inputs: torch.dtype) -> torch.dtype:
    """Float16 for half-precision inputs, else the inputs' own."""
    return torch.float16 if inputs in (torch.bfloat16, torch.float16) else inputs
