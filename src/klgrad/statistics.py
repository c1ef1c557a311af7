"""Means with standard errors that know what was sampled independently of what, and sums that batches add up to."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """A mean and its standard error, as 0-dimensional tensors (nan where one sample has no error)."""

    mean: Tensor
    standard_error: Tensor

    def __str__(self) -> str:
        return f"{self.mean.item():.4g} ± {self.standard_error.item():.2g}"


def wide_dtype(device: torch.device) -> torch.dtype:
    """Float64, where sums over millions of tokens keep their digits; Apple's MPS has none, and keeps float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide(x: Tensor) -> Tensor:
    """In the dtype that sums are taken in."""
    return x.to(wide_dtype(x.device))


@dataclass(frozen=True, eq=False)
class RatioSums:
    r"""Sums of some completions from which Σ total / Σ count and its standard error follow, for K totals at once.

    The sums of two disjoint sets of completions add up to those of both.

    With counts of 1 the ratio is the mean per sequence; with lengths it is the mean per token, whose error must not
    treat the tokens of one completion as independent. With r = total - mean x count the squared error is
    n/(n - 1) Σ r² / (Σ count)². The residuals are about the mean of the very set, so that nothing cancels.

    Attributes:
        n: completions (or groups of them: what was drawn independently).
        total: (K,) Σ total.
        count: Σ count.
        square: (K,) Σ r².
        product: (K,) Σ r x count.
        count_square: Σ count².
    """

    n: int
    total: Tensor
    count: Tensor
    square: Tensor
    product: Tensor
    count_square: Tensor

    @classmethod
    def of(cls, total: Tensor, count: Tensor) -> "RatioSums":
        """Of (K, n) totals and (n,) counts."""
        total, count = wide(total.detach()), wide(count.detach())
        residual = total - _ratio(total.sum(-1), count.sum())[:, None] * count
        square, product = residual.square().sum(-1), residual @ count
        return cls(len(count), total.sum(-1), count.sum(), square, product, count.square().sum())

    def __add__(self, other: "RatioSums") -> "RatioSums":
        total, count = self.total + other.total, self.count + other.count
        (square, product), (more, further) = (part._about(_ratio(total, count)) for part in (self, other))
        count_square = self.count_square + other.count_square
        return RatioSums(self.n + other.n, total, count, square + more, product + further, count_square)

    def _about(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Σ r² and Σ r x count with residuals about another mean."""
        off = mean - _ratio(self.total, self.count)
        square = self.square - 2 * off * self.product + off.square() * self.count_square
        return square.clamp(min=0), self.product - off * self.count_square

    def estimates(self) -> list[Estimate]:
        """K of them."""
        error = _ratio((self.square * self.n / max(self.n - 1, 1)).sqrt(), self.count)
        error = error if self.n > 1 else torch.full_like(error, float("nan"))
        return [Estimate(m, e) for m, e in zip(_ratio(self.total, self.count), error, strict=True)]


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=torch.finfo(count.dtype).tiny)


def ratio_of_means(total: Tensor, count: Tensor, group: Tensor | None = None) -> Estimate:
    r"""Σ total / Σ count over B completions, with the standard error of that ratio, in the dtype of the totals.

    Completions of one prompt are not independent draws of the data: with several groups the error is clustered by
    group. What else there is to know about it is said of `RatioSums`.
    """
    units = torch.stack([wide(total.detach()), wide(count.detach())])
    if group is not None:
        values, index = torch.unique(group, return_inverse=True)
        if len(values) > 1:
            units = units.new_zeros(2, len(values)).index_add_(1, index.to(units.device), units)
    (found,) = RatioSums.of(units[:1], units[1]).estimates()
    return Estimate(found.mean.to(total.dtype), found.standard_error.to(total.dtype))


KEPT = 2**20
"""Values that a quantile is taken from; of a longer stream a sample of at least half as many."""

SPREAD, KEYS = 2654435769, 2**32
"""i x 2^32 / golden ratio, modulo 2^32, spreads evenly over the keys, and along every period of rows alike."""


class Kept:
    """An even sample of a stream of (..., N) values: all of them, until `limit` would be passed.

    The i-th value stays while its key is below a limit that halves whenever too many are held. Every n-th would do
    for a stream without order; but of completions of n tokens it would see one position alone.
    """

    def __init__(self, limit: int = KEPT) -> None:
        self.limit, self.below, self.seen, self._held = limit, KEYS, 0, 0
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor) -> None:
        """Take what the keys say of these."""
        step = torch.arange(self.seen, self.seen + x.shape[-1], device=x.device)
        self.seen += x.shape[-1]
        self._keep(x, ((step & 2**31 - 1) * SPREAD) & KEYS - 1)
        while self._held > self.limit:
            self.below //= 2
            held, self._parts, self._held = self._parts, [], 0
            for part in held:
                self._keep(*part)

    def _keep(self, x: Tensor, key: Tensor) -> None:
        if self.below < KEYS:
            stays = (key < self.below).nonzero()[:, 0]
            x, key = x.index_select(-1, stays), key.index_select(0, stays)
        self._parts.append((x, key))
        self._held += len(key)

    def values(self) -> Tensor:
        """What is held, in the order it came."""
        return torch.cat([x for x, _ in self._parts], -1) if self._parts else torch.zeros(0)
