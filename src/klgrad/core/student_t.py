"""Quantiles of Student's t distribution for any real number of degrees of freedom, in plain Python."""

import math
from functools import lru_cache
from statistics import NormalDist

from ..errors import MeaningError

SERIES_FROM = 1000.0
"""Degrees of freedom from which the series in 1/ν is used: its next term is below 1e-13 for |z| < 4."""

NEWTON_STEPS = 100
"""An upper limit: about 6 steps are needed, and the iteration stops when it has converged."""


@lru_cache(maxsize=256)
def t_quantile(level: float, degrees_of_freedom: float) -> float:
    r"""The t with P(|T| <= t) = level: how many standard errors a two-sided interval extends to each side.

    Args:
        level: probability inside the interval, in (0, 1).
        degrees_of_freedom: ν > 0; infinity gives the normal quantile.

    Returns:
        The quantile.

    Raises:
        MeaningError: if the level or the degrees of freedom are out of range.

    Examples:
        >>> import math
        >>> from klgrad.core.student_t import t_quantile
        >>> round(t_quantile(0.95, 15), 6)
        2.13145
        >>> round(t_quantile(0.95, math.inf), 6)
        1.959964

    References:
        Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.1 (tail as an incomplete beta function) and
        26.7.5 (series for many degrees of freedom).
    """
    if not (0 < level < 1 and degrees_of_freedom > 0):
        raise MeaningError(
            "a level between 0 and 1, and more than 0 degrees of freedom",
            f"level={level:g}, degrees_of_freedom={degrees_of_freedom:g}",
            "write level=0.95 for 95%; a single cluster has no interval",
        )
    z = NormalDist().inv_cdf((1 + level) / 2)
    if degrees_of_freedom >= SERIES_FROM:
        return z + _beyond_normal(z, 1 / degrees_of_freedom)
    # Newton's method for log P(|T| > t) as a function of log t. It is concave, so all steps but the first decrease t.
    log_t, target = math.log(z), math.log1p(-level)
    for _ in range(NEWTON_STEPS):
        log_tail, slope = _log_tail(log_t, degrees_of_freedom)
        step = (target - log_tail) / slope
        log_t += step
        if abs(step) < 1e-15 * max(1.0, abs(log_t)):
            break
    return math.exp(log_t) if log_t < math.log(1e300) else math.inf


def _beyond_normal(z: float, h: float) -> float:
    """The sum over k of g_k(z) h^k with h = 1/ν (26.7.5)."""
    s = z * z
    g = (
        z * (s + 1) / 4,
        z * ((5 * s + 16) * s + 3) / 96,
        z * (((3 * s + 19) * s + 17) * s - 15) / 384,
        z * ((((79 * s + 776) * s + 1482) * s - 1920) * s - 945) / 92160,
    )
    return h * (g[0] + h * (g[1] + h * (g[2] + h * g[3])))


def _log_tail(log_t: float, nu: float) -> tuple[float, float]:
    """The log of P(|T| > t), and its derivative by log t."""
    # With x = ν/(ν + t²) the tail is the regularised incomplete beta function I_x(ν/2, 1/2).
    odds = 2 * log_t - math.log(nu)  # log of t²/ν = (1 - x)/x
    log_x, log_rest = -_log1pexp(odds), -_log1pexp(-odds)
    a, b = nu / 2, 0.5
    log_power = a * log_x + b * log_rest + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    if math.exp(log_x) < (a + 1) / (a + b + 2):
        log_tail = log_power + math.log(_beta_fraction(math.exp(log_x), a, b) / a)
    else:
        log_tail = math.log1p(-math.exp(log_power) * _beta_fraction(math.exp(log_rest), b, a) / b)
    # -dI/d(log t) = 2 x^a (1 - x)^b / B(a, b)
    return log_tail, -2 * math.exp(log_power - log_tail)


def _log1pexp(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of I_x(a, b) x B(a, b) a / (x^a (1-x)^b) (26.5.8), from its front by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = value
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            value *= c * d
        if abs(value - before) <= 1e-16 * abs(value):
            break
    return value
