r"""Importance ratios of π to the sampler μ, their bounds, and the effective sample size.

Ratios are detached weights. They are computed in log space and saturate at exp(`MAX_LOG_RATIO`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from ..errors import MeaningError, RolloutError
from .rollout import Rollout, running_sum

# Bounds on importance ratios. They limit the variance of a weighted estimate and add bias.


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


Ratio = Literal["token", "prefix", "sequence"]
"""r_t, r_1...r_t or r_1...r_T, with r_t = π(y_t)/μ(y_t)."""

MAX_LOG_RATIO = 20.0
"""Ratios saturate at e^20 = 5e8, so that the product of two of them (a weighted leave-one-out baseline)
with an estimator at its own cap stays finite in float32. A batch with such a ratio has an effective sample size of
about one."""


def token_ratio(rollout: Rollout) -> Tensor:
    """The ratio of each token, r_t = π(y_t)/μ(y_t).

    Args:
        rollout: the batch; without `behavior_logp` every ratio is 1.

    Returns:
        (B, T), detached; 1 where masked.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout, importance
        >>> log2 = torch.tensor(2.0).log()
        >>> rollout = Rollout(-log2.expand(1, 2), -log2.expand(1, 2), torch.ones(1, 2), -2 * log2.expand(1, 2))
        >>> importance.token_ratio(rollout)
        tensor([[2., 2.]])
    """
    return _bounded_exp(_log_token_ratio(rollout))


def prefix_ratio(rollout: Rollout) -> Tensor:
    """The ratio of each prefix, w_t = r_1 ... r_t, token t included.

    Args:
        rollout: the batch.

    Returns:
        (B, T), detached.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout, importance
        >>> log2 = torch.tensor(2.0).log()
        >>> rollout = Rollout(-log2.expand(1, 2), -log2.expand(1, 2), torch.ones(1, 2), -2 * log2.expand(1, 2))
        >>> importance.prefix_ratio(rollout)
        tensor([[2., 4.]])
    """
    return _bounded_exp(running_sum(_log_token_ratio(rollout)))


def sequence_ratio(rollout: Rollout) -> Tensor:
    """The ratio of each completion, w_T = r_1 ... r_T.

    Args:
        rollout: the batch.

    Returns:
        (B, 1), detached: one number per completion, which broadcasts over its tokens.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout, importance
        >>> log2 = torch.tensor(2.0).log()
        >>> rollout = Rollout(-log2.expand(1, 2), -log2.expand(1, 2), torch.ones(1, 2), -2 * log2.expand(1, 2))
        >>> importance.sequence_ratio(rollout)
        tensor([[4.]])
    """
    return _bounded_exp(_log_token_ratio(rollout).sum(-1, keepdim=True))


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _log_token_ratio(rollout: Rollout) -> Tensor:
    return rollout.logp.detach() - rollout.sampler_logp


class Weights(NamedTuple):
    """The importance weights of one batch.

    Attributes:
        own: (B, T) the weight of token t's own term.
        before: (B, T) the weight of token t's prefix, without token t.
        raw: the ratios before their bound, (B, T) or (B, 1), for diagnostics; None for on-policy terms.

    Examples:
        >>> import torch
        >>> from klgrad import ImportanceWeighting, Rollout, Truncate
        >>> log2 = torch.tensor(2.0).log()
        >>> rollout = Rollout(-log2.expand(1, 2), -log2.expand(1, 2), torch.ones(1, 2), -2 * log2.expand(1, 2))
        >>> weights = ImportanceWeighting("prefix", bound=Truncate(3.0)).weights(rollout)
        >>> weights.own, weights.before
        (tensor([[2., 3.]]), tensor([[1., 2.]]))
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
        >>> import torch
        >>> from klgrad import ImportanceWeighting, KLTerm, Truncate
        >>> KLTerm(weighting=ImportanceWeighting("prefix", bound=Truncate(2.0))).name
        'reverse-sequence-k1-prefix-ratio-truncate2'
    """

    ratio: Ratio
    bound: Bound | None

    def __post_init__(self) -> None:
        ratio, bound = cast("tuple[object, object]", (self.ratio, self.bound))
        if ratio not in get_args(Ratio):
            remedy = "write ImportanceWeighting('prefix', bound=None)"
            raise MeaningError(f"ratio in {get_args(Ratio)}", repr(ratio), remedy)
        if bound is not None and not isinstance(bound, Bound):
            raise MeaningError(
                "bound=None, Truncate(high), Clip(low, high) or Mask(low, high)",
                repr(bound),
                "write bound=Truncate(2.0), for example",
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
            before = running_sum(_log_token_ratio(rollout)).roll(1, -1)
            before[:, 0] = 0
            return Weights(self._bounded(raw), self._bounded(_bounded_exp(before)), raw)
        raw = sequence_ratio(rollout)
        weight = self._bounded(raw).expand_as(rollout.log_ratio)
        return Weights(weight, weight, raw)

    def _bounded(self, ratio: Tensor) -> Tensor:
        return ratio if self.bound is None else self.bound(ratio)


def effective_sample_size(weight: Tensor) -> Tensor:
    """(Σw)² / Σw² as a share of the number of weights.

    Args:
        weight: the weights, 0 or more.

    Returns:
        A scalar in (0, 1]; 0 if all weights are 0.

    Examples:
        >>> import torch
        >>> from klgrad import importance
        >>> importance.effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        tensor(0.5000)

    References:
        Kong, A note on importance sampling using standardized weights, University of Chicago, 1992.
    """
    # Dividing by the largest first keeps the squares finite and changes nothing else.
    w = weight / weight.max().clamp(min=torch.finfo(weight.dtype).tiny)
    return effective_share(w.numel(), w.sum(), w.square().sum())


def effective_share(n: int, total: Tensor, square: Tensor) -> Tensor:
    """`effective_sample_size` from sums, which can be added over batches.

    Args:
        n: the number of weights.
        total: Σw.
        square: Σw².

    Returns:
        A scalar in (0, 1]; 0 if all weights are 0.

    Examples:
        >>> import torch
        >>> from klgrad import importance
        >>> importance.effective_share(4, torch.tensor(2.0), torch.tensor(2.0))
        tensor(0.5000)
    """
    return total.square() / (square.clamp(min=torch.finfo(square.dtype).tiny) * n)
