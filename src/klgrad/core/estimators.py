r"""Sampled values of a KL as functions of the log-ratio l = log π - log ref, each with its slope.

The *value* estimates a divergence. The *slope* dk/dl is what autograd through the value puts on the
score ∇log π of the sampled token: it decides what the estimator descends when it is used as a loss,
and that is usually another divergence. Value and slope are written down side by side, and the slope is
what is differentiated, so that no backward pass runs through an overflowing exp.
"""

from collections.abc import Callable
from functools import update_wrapper

import torch
from torch import Tensor

MAX_EXPONENT = 30.0
"""exp is evaluated at no more than this: e^30 = 1e13, so that products with ratios stay finite in float32.
A log-ratio beyond it saturates (it keeps its sign and a huge size; it never becomes inf, NaN or 0)."""

SERIES_BELOW = 1e-2
"""Below this |x|, expm1(x) - x loses digits to cancellation and six terms of its series have them all."""

Function = Callable[[Tensor], Tensor]


class Estimator:
    """A value of the log-ratio with a declared slope; calling it gives the value, differentiable by the slope."""

    __name__: str

    def __init__(self, value: Function, slope: Function) -> None:
        self._value, self._slope = value, slope
        update_wrapper(self, value)

    def value(self, log_ratio: Tensor) -> Tensor:
        """The value; half precision is lifted to float32."""
        return self._value(_lifted(log_ratio))

    def slope(self, log_ratio: Tensor) -> Tensor:
        """The derivative of the value by the log-ratio, likewise."""
        return self._slope(_lifted(log_ratio))

    def __call__(self, log_ratio: Tensor) -> Tensor:
        """The value, whose gradient is slope x ∇log_ratio."""
        at = log_ratio.detach()
        return self.value(at) + self.slope(at) * (log_ratio - at)

    def __repr__(self) -> str:
        return self.__name__


def _with_slope(slope: Function) -> Callable[[Function], Estimator]:
    return lambda value: Estimator(value, slope)


def _lifted(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def exp_capped(x: Tensor) -> Tensor:
    """exp(x) for x up to `MAX_EXPONENT`, constant beyond it."""
    return x.clamp(max=MAX_EXPONENT).exp()


def _expm1_minus_x(x: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0, without cancellation near 0 and without overflow."""
    small = x.clamp(-SERIES_BELOW, SERIES_BELOW)
    series = small * small * (1 / 2 + small * (1 / 6 + small * (1 / 24 + small * (1 / 120 + small / 720))))
    return torch.where(x.abs() < SERIES_BELOW, series, torch.expm1(x.clamp(max=MAX_EXPONENT)) - x)


def _k3_slope(log_ratio: Tensor) -> Tensor:
    return -torch.expm1((-log_ratio).clamp(max=MAX_EXPONENT))


@_with_slope(torch.ones_like)
def k1(log_ratio: Tensor) -> Tensor:
    r"""The log-ratio itself, "vanilla".

    Estimates:
        KL(π‖ref), unbiased, of either sign.
    Gradient:
        as a loss `nothing`: slope 1, and the mean score is zero whatever ref is.
    Requires:
        y ~ π.
    """
    return log_ratio


@_with_slope(lambda log_ratio: log_ratio)
def k2(log_ratio: Tensor) -> Tensor:
    r"""Half the squared log-ratio, "squared".

    Estimates:
        KL(π‖ref) with a bias of second order, never negative.
    Gradient:
        as a loss `reverse-kl-token`: slope l, the coefficient of k1 in the reward.
    Requires:
        y ~ π.
    """
    return log_ratio * log_ratio / 2


@_with_slope(_k3_slope)
def k3(log_ratio: Tensor) -> Tensor:
    r"""The "variance reduced" estimate exp(-l) - 1 + l, also "low_var_kl".

    Estimates:
        KL(π‖ref), unbiased, never negative.
    Gradient:
        as a loss `forward-kl-token`: slope 1 - exp(-l), whose mean score is ∇KL(ref‖π).
    Requires:
        y ~ π. Its slope has the χ² divergence of ref from π as variance, which may be infinite.
    """
    return _expm1_minus_x(-log_ratio)


def k_lambda(lam: float) -> Estimator:
    r"""The family l + λ (exp(-l) - 1): k1 at λ = 0, k3 at λ = 1.

    Estimates:
        KL(π‖ref), unbiased for every λ.
    Gradient:
        as a loss `forward-kl-token` times λ: slope 1 - λ exp(-l).
    Requires:
        y ~ π.
    """

    @_with_slope(lambda log_ratio: 1 - lam * exp_capped(-log_ratio))
    def k(log_ratio: Tensor) -> Tensor:
        return log_ratio + lam * torch.expm1((-log_ratio).clamp(max=MAX_EXPONENT))

    k.__name__ = f"k_lambda({lam:g})"
    k.__doc__ = k_lambda.__doc__
    return k


@_with_slope(lambda log_ratio: log_ratio * exp_capped(-log_ratio))
def forward_k3(log_ratio: Tensor) -> Tensor:
    r"""The value r log r - r + 1 with r = exp(-l) = ref/π: k3 of the other direction, on samples of π.

    Estimates:
        KL(ref‖π) from samples of π, unbiased, never negative.
    Gradient:
        as a loss `unknown`: slope l exp(-l). A value to report, not a loss.
    Requires:
        y ~ π.
    """
    # r log r - r + 1 = r (exp(l) - 1 - l): positive factors, so no cancellation near l = 0.
    bounded = log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return exp_capped(-log_ratio) * _expm1_minus_x(bounded)
