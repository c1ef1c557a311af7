r"""Importance ratios of π to the sampler μ, their bounds, and what the bounds cost.

Ratios are detached weights. They are computed in log space and saturate at exp(`MAX_LOG_RATIO`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..errors import MeaningError, RolloutError
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


class Weights(NamedTuple):
    """The importance weights of one batch.

    Attributes:
        own: (B, T) the weight of token t's own term.
        before: (B, T) the weight of token t's prefix, without token t.
        raw: the ratios before their bound, (B, T) or (B, 1), for diagnostics; None for on-policy terms.
    """

    own: Tensor
    before: Tensor
    raw: Tensor | None


@dataclass(frozen=True)
class ImportanceWeighting:
    r"""Weight tokens that another policy μ sampled back to π, by an importance ratio.

    Args:
        ratio: `token` is r_t = π(y_t)/μ(y_t), which keeps the sampler's prefixes (a target of its own); `prefix` is
            r_1...r_t; `sequence` is r_1...r_T.
        bound: `Truncate`, `Clip` or `Mask`. Pass None explicitly for no bound (ratios still saturate at e^20, to stay
            finite in float32). A bound limits the variance and adds bias; the result's diagnostics report the share of
            ratios that were bounded and the effective sample size.

    Raises:
        MeaningError: if the ratio or the bound does not exist.

    Examples:
        >>> from klgrad import ImportanceWeighting, KLTerm, Truncate
        >>> KLTerm(weighting=ImportanceWeighting("prefix", bound=Truncate(2.0))).name
        'reverse-sequence-k1-prefix-ratio-truncate2'
    """

    ratio: Ratio
    bound: Bound | None

    def __post_init__(self) -> None:
        if self.ratio not in get_args(Ratio):
            raise MeaningError(
                f"ratio in {get_args(Ratio)}", repr(self.ratio), "write ImportanceWeighting('prefix', bound=None)"
            )
        bound: object = self.bound
        if bound is not None and not isinstance(bound, Bound):
            raise MeaningError(
                "bound=None, Truncate(high), Clip(low, high) or Mask(low, high)",
                repr(bound),
                "write bound=Truncate(2.0), say",
            )

    def weights(self, rollout: Rollout) -> Weights:
        """The weights of a batch.

        Args:
            rollout: the batch, with `behavior_logp`.

        Returns:
            The bounded weights and the raw ratios.
        """
        if rollout.behavior_logp is None:
            raise RolloutError(
                "`behavior_logp` for an off-policy term",
                "none",
                "pass the log-probs of the policy that sampled the tokens, or weighting=None if that was π itself",
            )
        if self.ratio == "token":
            raw = token_ratio(rollout)
            return Weights(self._bounded(raw), torch.ones_like(raw), raw)
        if self.ratio == "prefix":
            raw = prefix_ratio(rollout)
            return Weights(self._bounded(raw), self._bounded(prefix_ratio_before(rollout)), raw)
        raw = sequence_ratio(rollout)
        weight = self._bounded(raw).expand_as(rollout.log_ratio)
        return Weights(weight, weight, raw)

    def _bounded(self, ratio: Tensor) -> Tensor:
        return ratio if self.bound is None else self.bound(ratio)


def on_policy_weights(rollout: Rollout) -> Weights:
    """Weights of 1, for samples of π itself."""
    one = torch.ones_like(rollout.log_ratio)
    return Weights(one, one, None)


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
