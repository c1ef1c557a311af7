"""Bounds on importance ratios. They limit the variance of a weighted estimate and add bias."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MeaningError


@dataclass(frozen=True)
class Truncate:
    """min(w, high): small ratios stay as they are.

    Args:
        high: the largest weight, 1 or more.

    Examples:
        >>> import torch
        >>> from klgrad import Truncate
        >>> Truncate(2.0)(torch.tensor([0.1, 1.0, 5.0]))
        tensor([0.1000, 1.0000, 2.0000])

    References:
        Ionides, Truncated importance sampling, Journal of Computational and Graphical Statistics 17 (2008).
    """

    high: float

    def __post_init__(self) -> None:
        _check_band(0.0, self.high)

    def __call__(self, ratio: Tensor) -> Tensor:
        """Bound the ratios."""
        return ratio.clamp(max=self.high)


@dataclass(frozen=True)
class Clip:
    """clamp(w, low, high).

    Args:
        low: the smallest weight, at most 1.
        high: the largest weight, 1 or more.

    Examples:
        >>> import torch
        >>> from klgrad import Clip
        >>> Clip(0.5, 2.0)(torch.tensor([0.1, 1.0, 5.0]))
        tensor([0.5000, 1.0000, 2.0000])
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, ratio: Tensor) -> Tensor:
        """Bound the ratios."""
        return ratio.clamp(self.low, self.high)


@dataclass(frozen=True)
class Mask:
    """w inside [low, high], 0 outside: the sample is dropped.

    Args:
        low: the smallest ratio that is kept, at most 1.
        high: the largest ratio that is kept, 1 or more.

    Examples:
        >>> import torch
        >>> from klgrad import Mask
        >>> Mask(0.5, 2.0)(torch.tensor([0.1, 1.0, 5.0]))
        tensor([0., 1., 0.])
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, ratio: Tensor) -> Tensor:
        """Bound the ratios."""
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0)


Bound = Truncate | Clip | Mask


def _check_band(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high < float("inf"):
        raise MeaningError(
            "a finite band around 1, 0 <= low <= 1 <= high",
            f"low={low:g}, high={high:g}",
            "keep the on-policy ratio 1 inside the band; write bound=None for no bound",
        )
