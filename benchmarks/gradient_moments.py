"""Squared means, squared biases and variances of random vectors, with standard errors, without keeping the vectors.

The vectors of an arm are added to `BLOCKS` sums in turn. A product of the sums of two different blocks has no part of
the variance, because their errors are independent; so squared means and squared biases, which use such products only,
are unbiased. Standard errors are those of the jackknife that leaves out one block at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCKS = 8
"""More blocks make the standard errors more precise; each takes the memory of a vector for each arm."""
AT_ONCE = 1 << 22
"""Elements of a vector that are multiplied at once, in float64."""


@dataclass(frozen=True)
class Products:
    """What the moments of an arm are computed from, by block.

    Attributes:
        own: (K, K) products of the arm's sums.
        cross: (K, K) products of the arm's sums and those of the true arm.
        true: (K, K) products of the true arm's sums.
        squares: (K,) sums of the squared lengths of the arm's vectors.
        counts: (K,) number of vectors.
    """

    own: Tensor
    cross: Tensor
    true: Tensor
    squares: Tensor
    counts: Tensor

    def without(self, block: int) -> "Products":
        """The same of all other blocks."""
        kept = [i for i in range(len(self.counts)) if i != block]
        own, cross, true = (x[kept][:, kept] for x in (self.own, self.cross, self.true))
        return Products(own, cross, true, self.squares[kept], self.counts[kept])

    def between(self, products: Tensor) -> float:
        """An unbiased estimate of the product of two expected vectors; noise may make that of a square negative."""
        pairs = self.counts.sum() ** 2 - self.counts.square().sum()
        return float((products.sum() - products.diagonal().sum()) / pairs)

    def variance(self) -> float:
        """The expected squared distance of one vector from the mean."""
        n = self.counts.sum()
        return float((self.squares.sum() - self.own.sum() / n) / (n - 1))


class Moments:
    """Vectors of several arms, to which those of one batch are added together."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.squares: dict[str, list[float]] = {}

    def add(self, arm: str, vector: Tensor) -> None:
        """One more vector of an arm."""
        seen = self.squares.setdefault(arm, [])
        if arm not in self.sums:
            self.sums[arm] = vector.new_zeros(BLOCKS, len(vector))
        self.sums[arm][len(seen) % BLOCKS] += vector
        seen.append(float(vector.double().square().sum()))

    def products(self, arm: str, true: str) -> Products:
        """The products of an arm and the true one, of the blocks that have vectors."""
        squares = self.squares[arm]
        used = min(BLOCKS, len(squares))
        a, t = self.sums[arm][:used], self.sums[true][:used]
        by_block = [squares[i::BLOCKS] for i in range(used)]
        total, count = (torch.tensor([f(x) for x in by_block], dtype=torch.float64) for f in (sum, len))
        return Products(_gram(a, a), _gram(a, t), _gram(t, t), total, count)


def _gram(a: Tensor, b: Tensor) -> Tensor:
    parts = zip(a.split(AT_ONCE, 1), b.split(AT_ONCE, 1), strict=True)
    return sum((x.double() @ y.double().T for x, y in parts), start=a.new_zeros((), dtype=torch.float64)).cpu()


def relative_moments(found: Products) -> dict[str, float]:
    """Moments of an arm in units of the squared length of the true arm's mean."""
    own, cross, scale = found.between(found.own), found.between(found.cross), found.between(found.true)
    return {
        "relative_squared_norm": own / scale,
        "relative_squared_bias": (own - 2 * cross + scale) / scale,
        "relative_variance": found.variance() / scale,
        "cosine": cross / (own * scale) ** 0.5 if own > 0 and scale > 0 else math.nan,
    }


def with_errors(
    found: Products, moments: Callable[[Products], dict[str, float]] = relative_moments
) -> dict[str, float]:
    """Moments and their standard errors (`_se`), which are NaN with fewer than three blocks."""
    blocks = len(found.counts)
    without = [moments(found.without(i)) for i in range(blocks)] if blocks > 2 else []
    errors = {f"{name}_se": _jackknife([each[name] for each in without]) for name in moments(found)}
    return {**moments(found), **errors}


def _jackknife(values: Sequence[float]) -> float:
    """The standard error of a number, from its values with each block left out."""
    if not values:
        return math.nan
    n, mean = len(values), sum(values) / len(values)
    return ((n - 1) / n * sum((x - mean) ** 2 for x in values)) ** 0.5
