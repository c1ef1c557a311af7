"""One tile of the logits: some of the tokens times some of the vocabulary entries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.divergences import Divergence
from .head import Transform


@dataclass(frozen=True, eq=False)
class Tile:
    """Raw logits of both models, before bias and transform, with the tokens' targets.

    Attributes:
        start: the first vocabulary entry of the tile, counted from the start of the head.
        width: number of vocabulary entries.
        targets: (N,) sampled tokens, counted from the start of the head.
        raw: (N, width) logits of the policy in the accumulation dtype, or None if the tile was kept.
        ref_raw: (N, width) logits of the reference, or None if the tile was kept or without a reference.
        bias: (V,) bias of the policy's head, or None.
        ref_bias: (V,) bias of the reference's head, or None.
        transform: of the policy's logits.
        ref_transform: of the reference's logits.
        projected: whether the raw logits are a matrix product; logits that the caller passed may be -inf.
        extra: (N, width) added to the gradient of the logits, for weights on other entries' log-probs.
        places: (N,) the row of each token in `raw`, in `ref_raw` and in the gradient; None if that is its own number.
        divergence: whose sums, or gradient, are wanted beside the rest.
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
    places: Tensor | None = None
    divergence: Divergence | None = None

    @property
    def finite(self) -> bool:
        """Whether all logits are known to be finite: a matrix product is, unless an input is not."""
        return self.projected and self.bias is None and self.ref_bias is None

    def locate(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of vocabulary entries within the tile, clamped to its width, and whether they are in it."""
        local = entries - self.start
        return local.clamp(0, self.width - 1), (local >= 0) & (local < self.width)


LARGEST_KEPT = 60000.0
"""Kept values are clamped to this, so that float16 stays finite: such an entry has no probability."""
MARKED = 128
"""Entries of a slice, where kept logits have statistics of their own slices."""


@dataclass(frozen=True, eq=False)
class CachedLogits:
    """The logits that are kept until the backward pass, in 16 bits for half-precision inputs.

    With a = z - max z and b = z_ref - max z_ref over a slice and d = a - b, an entry is kept as two numbers. Rounding
    changes each of them by at most 2^-11 of its size, so they are chosen to be small where the gradient is large:

    - where d >= 0 (the entry is relatively more likely under the policy): a, and d minus its mean under the policy over
      the slice. The gradient of the reverse KL is p times the distance of d from its mean, so its relative error is
      2^-11. If d itself were kept, the error would be p·|d|·2^-11. For a confident token this is more than the
      gradient, because d is then equal to its mean up to a factor 1 - p.
    - where d < 0: -b, and d. Here |b| + |d| = |a|, so p is as accurate as from a, and q is more accurate.

    The sign of the first number distinguishes the two cases: a <= 0, and -b > 0.

    Attributes:
        a_or_minus_b: (N, columns) a or -b, from the larger one of a and b. The backward pass overwrites it with the
            gradient.
        delta: (N, columns) d or d minus its mean; None without a reference, where `a_or_minus_b` is always a.
        slice_stats: (3, N, slices) max z, max z_ref and the mean of d over slices of `MARKED` entries; None if the
            slices are those of the backend's states. A token's are side by side: a program reads those of one.
    """

    a_or_minus_b: Tensor
    delta: Tensor | None
    slice_stats: Tensor | None = None

    def store(self, a: Tensor, b: Tensor | None, mean: Tensor | None) -> None:
        """Round and store; `mean` is the (N, 1) mean of d over the slice."""
        if self.delta is None or b is None or mean is None:
            self.a_or_minus_b.copy_(a.clamp(min=-LARGEST_KEPT))
            return
        d = a - b
        own = d >= 0
        self.a_or_minus_b.copy_(torch.where(own, a, (-b).clamp(min=self.tiny)).clamp(-LARGEST_KEPT, LARGEST_KEPT))
        self.delta.copy_(torch.where(own, d - mean, d).clamp(-LARGEST_KEPT, LARGEST_KEPT))

    def load(self, dtype: torch.dtype, mean: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a and d, in a wider dtype."""
        a_or_minus_b = self.a_or_minus_b.to(dtype)
        if self.delta is None or mean is None:
            return a_or_minus_b, None
        own = a_or_minus_b <= 0
        d = self.delta.to(dtype) + torch.where(own, mean, 0.0)
        return torch.where(own, a_or_minus_b, d - a_or_minus_b), d

    @property
    def tiny(self) -> float:
        """The smallest value of -b, so that rounding does not change its sign."""
        return torch.finfo(self.a_or_minus_b.dtype).tiny

    def cut(self, rows: slice, columns: range) -> "CachedLogits | None":
        """The part of a tile, or None if the tile is not kept."""
        if columns.start >= self.a_or_minus_b.shape[1]:
            return None
        part = (rows, slice(columns.start, columns.stop))
        slices = slice(columns.start // MARKED, -(-columns.stop // MARKED))
        slice_stats = None if self.slice_stats is None else self.slice_stats[:, rows, slices]
        return CachedLogits(self.a_or_minus_b[part], None if self.delta is None else self.delta[part], slice_stats)


def kept_dtype(inputs: torch.dtype) -> torch.dtype:
    """Float16 for half-precision inputs, else the dtype of the inputs."""
    return torch.float16 if inputs in (torch.bfloat16, torch.float16) else inputs
