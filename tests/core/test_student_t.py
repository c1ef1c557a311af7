"""Student's quantile against printed tables, closed forms and its own definition."""

import math
from statistics import NormalDist

import pytest
from tolerances import PRINTED, QUANTILE

from klgrad.core.result import SERIES_FROM, t_quantile
from klgrad.errors import MeaningError

TABLE = {
    (0.90, 1): 6.313751515,
    (0.95, 1): 12.706204736,
    (0.99, 1): 63.656741163,
    (0.95, 2): 4.302652730,
    (0.99, 2): 9.924843201,
    (0.90, 3): 2.353363435,
    (0.95, 3): 3.182446305,
    (0.95, 5): 2.570581836,
    (0.95, 7): 2.364624252,
    (0.95, 10): 2.228138852,
    (0.99, 10): 3.169272673,
    (0.95, 15): 2.131449546,
    (0.99, 15): 2.946712883,
    (0.95, 20): 2.085963447,
    (0.95, 30): 2.042272456,
    (0.99, 30): 2.749995654,
    (0.95, 60): 2.000297822,
    (0.95, 120): 1.979930405,
    (0.99, 120): 2.617421145,
}
"""Two-sided, as in every textbook, with nine decimals."""


@pytest.mark.parametrize(("level", "freedom"), TABLE)
def test_the_printed_table(level, freedom):
    PRINTED.check(t_quantile(level, freedom), TABLE[level, freedom])


@pytest.mark.parametrize("level", [1e-3, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-6])
def test_closed_forms_of_1_2_4_and_infinitely_many_degrees_of_freedom(level):
    QUANTILE.check(t_quantile(level, 1), math.tan(math.pi * level / 2))
    QUANTILE.check(t_quantile(level, 2), level * math.sqrt(2 / (1 - level**2)))
    # cos(arccos(√α)/3)/√α with α = 1 - level² (Shaw, Sampling Student's T distribution, 2006)
    alpha = 1 - level**2
    q = math.cos(math.acos(math.sqrt(alpha)) / 3) / math.sqrt(alpha)
    QUANTILE.check(t_quantile(level, 4), 2 * math.sqrt(q - 1))
    QUANTILE.check(t_quantile(level, math.inf), NormalDist().inv_cdf((1 + level) / 2))


def inside(t, freedom, steps=20_000):
    """P(|T| <= t) by Simpson's rule over the density."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = [scale * (1 + (i * t / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps + 1)]
    return 2 * t / steps / 3 * (density[0] + density[-1] + 4 * sum(density[1::2]) + 2 * sum(density[2:-1:2]))


@pytest.mark.parametrize("freedom", [0.7, 1.3, 2.9, 11.7, 63.0, SERIES_FROM - 1, SERIES_FROM, 20_000.0])
def test_any_real_number_of_degrees_of_freedom(freedom):
    for level in (0.5, 0.95):
        QUANTILE.check(inside(t_quantile(level, freedom), freedom), level)


def test_it_falls_with_the_degrees_of_freedom_to_the_normal_quantile():
    found = [t_quantile(0.95, x) for x in (0.05, 0.5, 1, 2, 5, 50, 500, 999.9, 1000, 1e5, 1e12, math.inf)]
    assert found == sorted(found, reverse=True)
    assert t_quantile(0.95, 0.001) == math.inf  # larger than every float


@pytest.mark.parametrize(("level", "freedom"), [(0, 3), (1, 3), (-1, 3), (95, 3), (0.95, 0), (math.nan, 3)])
def test_levels_and_degrees_of_freedom_out_of_range_are_refused(level, freedom):
    with pytest.raises(MeaningError, match="a level between 0 and 1"):
        t_quantile(level, freedom)
