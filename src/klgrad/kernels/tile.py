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
    """What is kept of a tile until backward, in 16 bits for half-precision inputs.

    With a = z - max z and b = z_ref - max z_ref over a slice and d = a - b, an entry is kept as two numbers. Rounding
    moves each of them by at most 2^-11 of its size, so they are chosen to be small where the gradient is large:

    - where d >= 0 (the policy likes the entry more than the reference does): a, and d minus its mean under the policy
      over the slice. The gradient of the reverse KL is p times the distance of d from its mean, so its error stays
      2^-11 of itself. Were d itself kept, the error would be p·|d|·2^-11. For a confident token this is more than the
      gradient, because d is then equal to its mean up to a factor 1 - p.
    - where d < 0: -b, and d. Here |b| + |d| = |a|, so p is as accurate as from a, and q is more accurate.

    The sign of the first number, a <= 0 or -b > 0, says which of the two it is.

    Attributes:
        larger: (N, columns) a or -b, of the larger one of a and b. Backward overwrites it with the gradient.
        apart: (N, columns) d or d minus its mean; None without a reference, where `larger` is always a.
    """

    larger: Tensor
    apart: Tensor | None

    def store(self, a: Tensor, b: Tensor | None, mean: Tensor | None) -> None:
        """Round and copy; `mean` is the (N, 1) mean of d over the slice."""
        if self.apart is None or b is None or mean is None:
            self.larger.copy_(a.clamp(min=-LARGEST_KEPT))
            return
        d = a - b
        own = d >= 0
        self.larger.copy_(torch.where(own, a, (-b).clamp(min=self.tiny)).clamp(-LARGEST_KEPT, LARGEST_KEPT))
        self.apart.copy_(torch.where(own, d - mean, d).clamp(-LARGEST_KEPT, LARGEST_KEPT))

    def load(self, dtype: torch.dtype, mean: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Give a and d back, in a wider dtype."""
        larger = self.larger.to(dtype)
        if self.apart is None or mean is None:
            return larger, None
        own = larger <= 0
        d = self.apart.to(dtype) + torch.where(own, mean, 0.0)
        return torch.where(own, larger, d - larger), d

    @property
    def tiny(self) -> float:
        """What -b is at least, so that rounding leaves its sign."""
        return torch.finfo(self.larger.dtype).tiny

    def cut(self, rows: slice, columns: range) -> "Kept | None":
        """The part of a tile, or None if the tile lies beyond what is kept."""
        if columns.start >= self.larger.shape[1]:
            return None
        part = (rows, slice(columns.start, columns.stop))
        return Kept(self.larger[part], None if self.apart is None else self.apart[part])


def kept_dtype(inputs: torch.dtype) -> torch.dtype:
    """Float16 for half-precision inputs, else the inputs' own."""
    return torch.float16 if inputs in (torch.bfloat16, torch.float16) else inputs
