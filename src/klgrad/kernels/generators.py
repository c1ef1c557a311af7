r"""f-divergences over a whole vocabulary: the term of one entry, without overflow and without cancellation.

With p, q the two probabilities of an entry, l = log p/q, c the slope and φ(x) = e^x - 1 - x, a divergence and its
gradient by the logit of entry v are

    D_f = Σ p f(u)/u    dD_f/dz_v = p_v (c(l_v) - Σ_w p_w c(l_w))

The excess f(u)/u of `core.divergences` is that of a sample of π: it saturates where π is e^30 times less likely than
ref, which no sample of π shows. In the sum over all entries these may have all of the mass of ref, so the term of an
entry is computed from both probabilities: far from the reference by the first formula, near it by the second, where
φ is its series.

    reverse KL                  q - p + p l                                p φ(-l)
    forward KL                  p - q - q l                                q φ(l)
    α-divergence, s = 1 - α     (s q + α p - p^α q^s) / (s α)              p (s φ(-l) - φ(-s l)) / (s α)
    Jensen-Shannon, r = 1 - β   r p log p/m - β q log m/q                  r p φ(log m/p) + β q φ(log m/q)
    total variation             |p - q|                                    p |φ(-l) - l|
    Huber, n = clip(l, -c, c)   p n + q e^n (φ(-n) - n), with φ as it is near and far

The same formulas in Triton are in `tiles_triton.py`.
"""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.divergences import TOTAL_VARIATION, Divergence, Mixture, alpha, huber, jensen_shannon
from ..core.estimators import Function
from .state import NEAR

Kind = Literal["alpha", "jensen-shannon", "total-variation", "huber"]

LARGEST_EXPONENT = 70.0
"""Of a term: the sum of e^70 over any vocabulary is a float32."""
DIGITS = 12
"""Decimals of a parameter that is read off: order 0 and 1 are then exact."""


class GeneratorPart(NamedTuple):
    """A weight, and a generator of this file with its parameter: order, β, bound, or 0 for none."""

    weight: float
    kind: Kind
    parameter: float


def parts_of(divergence: Divergence) -> tuple[GeneratorPart, ...] | None:
    """The generators of which a divergence is the weighted sum; None if one of them is not in this file.

    A generator is known by its curve, whoever wrote it: a few points give its parameter, and the others must agree.
    """
    if not isinstance(divergence, Mixture):
        return _alone(divergence.slope, divergence.excess)
    parts: list[GeneratorPart] = []
    for weight, one in divergence.parts:
        inner = parts_of(one)
        if inner is None:
            return None
        parts += [part._replace(weight=weight * part.weight) for part in inner]
    return tuple(parts)


@lru_cache
def _alone(slope: Function, excess: Function) -> tuple[GeneratorPart] | None:
    """Those of one divergence. Its functions are the key, because two divergences may have one name."""
    points = torch.tensor([-40.0, -30.0, -1.0, 1.0, 600.0], dtype=torch.float64)
    lowest, low, left, right, highest = slope(points).tolist()
    candidates: list[tuple[Kind, float, Divergence]] = [("total-variation", 0.0, TOTAL_VARIATION)]
    if left * right < 0:
        order = round(1 - math.log(-left / right), DIGITS)
        candidates.append(("alpha", order, alpha(order)))
    beta = round(1 - (low - lowest) / 10, DIGITS)  # far below 0 the slope of Jensen-Shannon rises by 1 - β
    if 0 < beta < 1:
        candidates.append(("jensen-shannon", beta, jensen_shannon(beta)))
    if 0 < highest < math.inf:
        candidates.append(("huber", highest, huber(highest)))
    at = torch.linspace(-25, 25, 101, dtype=torch.float64)
    same = lambda one, other: torch.allclose(one(at), other(at), rtol=1e-9, atol=1e-12)
    for kind, parameter, known in candidates:
        if same(slope, known.slope) and same(excess, known.excess):
            return (GeneratorPart(1.0, kind, parameter),)
    return None


def terms(divergence: Divergence, log_p: Tensor, log_q: Tensor, log_ratio: Tensor) -> Tensor:
    """Compute p f(u)/u of each entry."""
    parts = parts_of(divergence)
    if parts is None:
        return log_p.exp() * divergence.excess(log_ratio)
    total = torch.zeros_like(log_p)
    for weight, kind, parameter in parts:
        total = total + weight * TERMS[kind](log_p, log_q, log_ratio, parameter)
    return total


def _alpha_term(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, order: float) -> Tensor:
    p, q, rest = log_p.exp(), log_q.exp(), 1 - order
    if rest == 0:
        return torch.where(_near(log_ratio), p * _phi_series(-log_ratio), q - p + p * log_ratio)
    if order == 0:
        return torch.where(_near(log_ratio), q * _phi_series(log_ratio), p - q - q * log_ratio)
    product = (order * log_p + rest * log_q).clamp(max=LARGEST_EXPONENT).exp()
    near = p * (rest * _phi_series(-log_ratio) - _phi_series(-rest * log_ratio))
    is_near = _near(log_ratio * max(1.0, abs(rest)))
    return torch.where(is_near, near, rest * q + order * p - product) / (rest * order)


def _jensen_shannon_term(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    p, q, rest = log_p.exp(), log_q.exp(), 1 - beta
    positive = log_ratio > 0
    shrunk = torch.expm1(-log_ratio.abs())
    small = torch.log1p(torch.where(positive, beta * shrunk, rest * shrunk))
    mixture_by_q = torch.where(positive, log_ratio + small, small)  # log m/q
    p_by_mixture = torch.where(positive, -small, log_ratio - small)
    near = rest * p * _phi_series(-p_by_mixture) + beta * q * _phi_series(mixture_by_q)
    return torch.where(_near(log_ratio), near, rest * p * p_by_mixture - beta * q * mixture_by_q)


def _total_variation_term(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, _: float) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    return torch.where(_near(log_ratio), p * (_phi_series(-log_ratio) - log_ratio).abs(), (p - q).abs())


def _huber_term(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, bound: float) -> Tensor:
    clipped = log_ratio.clamp(-bound, bound)
    share = torch.where(log_ratio.abs() <= bound, log_p, log_q + clipped).exp()  # p e^(n - l)
    phi = torch.where(_near(clipped), _phi_series(-clipped), torch.expm1(-clipped) + clipped)
    return share * phi + clipped * (log_p.exp() - share)


TERMS = {
    "alpha": _alpha_term,
    "jensen-shannon": _jensen_shannon_term,
    "total-variation": _total_variation_term,
    "huber": _huber_term,
}


def _near(x: Tensor) -> Tensor:
    return x.abs() < NEAR[x.dtype]


def _phi_series(x: Tensor) -> Tensor:
    """e^x - 1 - x for |x| below `NEAR`; 0 stands for others, whose powers might overflow."""
    small = torch.where(_near(x), x, 0.0)
    series = torch.full_like(x, 1 / math.factorial(9))
    for power in range(8, 1, -1):
        series = series * small + 1 / math.factorial(power)
    return small * small * series
