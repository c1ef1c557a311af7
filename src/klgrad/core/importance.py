r"""Importance ratios of π to the sampler μ, their bounds, and what the bounds cost.

Ratios are detached weights. They are computed in log space and saturate at exp(`MAX_LOG_RATIO`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import MeaningError
from .rollout import Rollout
from .running_sum import running_sum

Ratio = Literal["token", "prefix", "sequence"]

MAX_LOG_RATIO = 20.0
"""Ratios saturate at e^20 = 5e8, so that the product of two of them (a weighted leave-one-out baseline)
with an estimator at its own cap stays finite in float32. A sample that heavy has left no effective sample
size to speak of long before."""


def token_ratio(rollout: Rollout) -> Tensor:
    """r_t = π(y_t)/μ(y_t), (B, T); 1 where masked."""
    return _bounded_exp(_log_token_ratio(rollout))


def prefix_ratio(rollout: Rollout) -> Tensor:
    """w_t = r_1 ... r_t, token t included, (B, T)."""
    return _bounded_exp(running_sum(_log_token_ratio(rollout)))


def prefix_ratio_before(rollout: Rollout) -> Tensor:
    """w_{t-1} = r_1 ... r_{t-1}, token t excluded, (B, T); 1 at the first token."""
    log_ratio = _log_token_ratio(rollout)
    before = torch.zeros_like(log_ratio)
    before[:, 1:] = running_sum(log_ratio)[:, :-1]
    return _bounded_exp(before)


def sequence_ratio(rollout: Rollout) -> Tensor:
    """w_T = r_1 ... r_T, (B, 1): one number per completion, to be broadcast on purpose."""
    return _bounded_exp(_log_token_ratio(rollout).sum(-1, keepdim=True))


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _log_token_ratio(rollout: Rollout) -> Tensor:
    return rollout.logp.detach() - rollout.sampler_logp


@dataclass(frozen=True)
class Truncate:
    """min(w, high): keeps small ratios as they are."""

    high: float

    def __post_init__(self) -> None:
        _check_band(0.0, self.high)

    def __call__(self, ratio: Tensor) -> Tensor:
        """The bounded ratio."""
        return ratio.clamp(max=self.high)


@dataclass(frozen=True)
class Clip:
    """clamp(w, low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, ratio: Tensor) -> Tensor:
        """The bounded ratio."""
        return ratio.clamp(self.low, self.high)


@dataclass(frozen=True)
class Mask:
    """w inside [low, high], 0 outside: the sample is dropped."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, ratio: Tensor) -> Tensor:
        """The bounded ratio."""
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0)


Bound = Truncate | Clip | Mask


def _check_band(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high < float("inf"):
        raise MeaningError(
            "a finite band around 1, 0 <= low <= 1 <= high",
            f"low={low:g}, high={high:g}",
            "leave the on-policy ratio 1 inside it; bound=None means unbounded",
        )


def effective_sample_size(weight: Tensor) -> Tensor:
    """(Σw)² / Σw² as a share of the number of weights, in (0, 1]; 0 when all are 0."""
    # Dividing by the largest first keeps the squares finite and changes nothing else.
    w = weight / weight.max().clamp(min=torch.finfo(weight.dtype).tiny)
    return effective_share(w.numel(), w.sum(), w.square().sum())


def effective_share(n: int, total: Tensor, square: Tensor) -> Tensor:
    """The same from n, Σw and Σw², which batches add up to."""
    return total.square() / (square.clamp(min=torch.finfo(square.dtype).tiny) * n)
