r"""Sampled estimates of a KL as functions of the log-ratio l = log π - log ref, each with its slope.

The *value* estimates a divergence. The *slope* dk/dl is the factor that autograd through the value puts on the
score ∇log π of the sampled token. It decides what the estimator descends when it is used as a loss, which is usually
another divergence. Each estimator declares both, and its backward pass uses the declared slope, so that no gradient
runs through an overflowing exp.

References:
    Schulman, Approximating KL divergence, 2020, http://joschu.net/blog/kl-approx.html (k1, k2 and k3 as values).
    Tang and Munos, On a few pitfalls in KL divergence gradient estimation for RL, 2025, arXiv:2506.09477 (what they
    descend as losses).
"""

from collections.abc import Callable
from functools import partial, update_wrapper

import torch
from torch import Tensor

MAX_EXPONENT = 30.0
"""The largest argument of exp: e^30 = 1e13, so that products with ratios stay finite in float32. A larger log-ratio
saturates: the result stays huge with the right sign, and never becomes inf, NaN or 0."""

SERIES_BELOW = 1e-2
"""Below this |x|, expm1(x) - x loses digits to cancellation, and its series to the sixth order is exact to rounding."""

Function = Callable[[Tensor], Tensor]


class Estimator:
    """A function of the log-ratio with a declared slope.

    Args:
        value: the estimate as a function of the log-ratio; its name and docstring become the estimator's.
        slope: the derivative that the backward pass uses.

    Examples:
        >>> import torch
        >>> from klgrad import estimators
        >>> # The value of k3 with the gradient of k2:
        >>> both = estimators.Estimator(estimators.k3.value, estimators.k2.slope)
        >>> log_ratio = torch.tensor(-1.0, requires_grad=True)
        >>> both(log_ratio)
        tensor(0.7183, grad_fn=<AddBackward0>)
        >>> torch.autograd.grad(both(log_ratio), log_ratio)
        (tensor(-1.),)
    """

    __name__: str

    def __init__(self, value: Function, slope: Function) -> None:
        self._value, self._slope = value, slope
        update_wrapper(self, value)

    def value(self, log_ratio: Tensor) -> Tensor:
        """The value, without the declared slope; half precision is converted to float32."""
        return self._value(_at_least_float32(log_ratio))

    def slope(self, log_ratio: Tensor) -> Tensor:
        """The declared slope; half precision is converted to float32."""
        return self._slope(_at_least_float32(log_ratio))

    def __call__(self, log_ratio: Tensor) -> Tensor:
        """The value, with gradient slope x ∇log_ratio."""
        at = log_ratio.detach()
        return self.value(at) + self.slope(at) * (log_ratio - at)

    def __repr__(self) -> str:
        return self.__name__


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def exp_capped(x: Tensor) -> Tensor:
    """exp(min(x, `MAX_EXPONENT`)).

    Args:
        x: the exponent.

    Returns:
        A finite tensor of the same shape.

    Examples:
        >>> import torch
        >>> from klgrad import estimators
        >>> estimators.exp_capped(torch.tensor([0.0, 1000.0]))
        tensor([1.0000e+00, 1.0686e+13])
    """
    return x.clamp(max=MAX_EXPONENT).exp()


def _expm1_capped(x: Tensor) -> Tensor:
    """exp(min(x, `MAX_EXPONENT`)) - 1, without cancellation near 0."""
    return torch.expm1(x.clamp(max=MAX_EXPONENT))


def _expm1_minus_x(x: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0, without cancellation near 0 and without overflow."""
    small = x.clamp(-SERIES_BELOW, SERIES_BELOW)
    series = small * small * (1 / 2 + small * (1 / 6 + small * (1 / 24 + small * (1 / 120 + small / 720))))
    return torch.where(x.abs() < SERIES_BELOW, series, _expm1_capped(x) - x)


@partial(Estimator, slope=torch.ones_like)
def k1(log_ratio: Tensor) -> Tensor:
    r"""The log-ratio itself, "vanilla".

    Estimates:
        KL(π‖ref), unbiased, of either sign.
    Gradient:
        as a loss `nothing`: slope 1, and the mean score is zero whatever ref is.
    Requires:
        y ~ π.

    Examples:
        >>> import torch
        >>> from klgrad import estimators
        >>> estimators.k1(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  2.])
    """
    return log_ratio


@partial(Estimator, slope=lambda log_ratio: log_ratio)
def k2(log_ratio: Tensor) -> Tensor:
    r"""Half the squared log-ratio, "squared".

    Estimates:
        KL(π‖ref) with a bias of second order, never negative.
    Gradient:
        as a loss `reverse-kl-token`: slope l, the coefficient of k1 in the reward.
    Requires:
        y ~ π.

    Examples:
        >>> import torch
        >>> from klgrad import estimators
        >>> estimators.k2(torch.tensor([-1.0, 2.0])), estimators.k2.slope(torch.tensor([-1.0, 2.0]))
        (tensor([0.5000, 2.0000]), tensor([-1.,  2.]))
    """
    return log_ratio * log_ratio / 2


@partial(Estimator, slope=lambda log_ratio: -_expm1_capped(-log_ratio))
def k3(log_ratio: Tensor) -> Tensor:
    r"""The "variance reduced" estimate exp(-l) - 1 + l, also "low_var_kl".

    Estimates:
        KL(π‖ref), unbiased, never negative.
    Gradient:
        as a loss `forward-kl-token`: slope 1 - exp(-l), whose mean score is ∇KL(ref‖π).
    Requires:
        y ~ π. The variance of its slope is the χ² divergence of ref from π, which may be infinite.

    Examples:
        >>> import torch
        >>> from klgrad import estimators
        >>> estimators.k3(torch.tensor([-1.0, 2.0])), estimators.k3.slope(torch.tensor([-1.0, 2.0]))
        (tensor([0.7183, 1.1353]), tensor([-1.7183,  0.8647]))
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

    Args:
        lam: the weight λ of the control variate exp(-l) - 1, whose mean is 0.

    Returns:
        The estimator.

    Examples:
        >>> import torch
        >>> from klgrad import estimators
        >>> estimators.k_lambda(0.5)
        k_lambda(0.5)
        >>> estimators.k_lambda(0.5)(torch.tensor([-1.0, 2.0]))
        tensor([-0.1409,  1.5677])
    """

    @partial(Estimator, slope=lambda log_ratio: 1 - lam * exp_capped(-log_ratio))
    def k(log_ratio: Tensor) -> Tensor:
        return log_ratio + lam * _expm1_capped(-log_ratio)

    k.__name__ = f"k_lambda({lam:g})"
    k.__doc__ = k_lambda.__doc__
    return k


@partial(Estimator, slope=lambda log_ratio: log_ratio * exp_capped(-log_ratio))
def forward_k3(log_ratio: Tensor) -> Tensor:
    r"""The value r log r - r + 1 with r = exp(-l) = ref/π: k3 of the other direction, on samples of π.

    Estimates:
        KL(ref‖π) from samples of π, unbiased, never negative.
    Gradient:
        as a loss `unknown`: slope l exp(-l). A value to report, not a loss.
    Requires:
        y ~ π.

    Examples:
        >>> import torch
        >>> from klgrad import estimators
        >>> estimators.forward_k3(torch.tensor([-1.0, 2.0]))
        tensor([1.0000, 0.5940])
    """
    # r log r - r + 1 = r (exp(l) - 1 - l): positive factors, so no cancellation near l = 0.
    bounded = log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return exp_capped(-log_ratio) * _expm1_minus_x(bounded)
