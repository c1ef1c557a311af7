r"""The limits that a temperature sets for each token, in any context.

If the sampler's distribution is the trainer's to the power a = 1/T, normalised, then with p and q the probabilities
that trainer and sampler give the sampled token

    logit q = a logit p + (a - 1) H,

where H >= 0 is the Rényi entropy of order a of the other tokens. So at a temperature below 1 every token has
logit q >= a logit p, and above 1 every token has logit q <= a logit p, in any context. A likely token limits a from one
side, an unlikely token from the other. The limit is reached where two tokens have nearly all of the probability. These
limits hold for every sample. In contrast, a mean of importance ratios depends, at a low temperature, on tokens that
are never drawn.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LOWEST, HIGHEST, STEP = 0.2, 4.0, 1.02
"""Temperatures that are tried, and the ratio of one to the next."""

ALLOWED = 0.005
"""Share of the sum of squared differences beyond the limits, up to which a temperature explains the data."""

ROOM = 1e-4
"""A temperature whose share is larger than the smallest one by no more than this is still possible: rounding."""

TESTED = 0.02
"""Smallest share of the sum of squared differences on tokens with a probability above 1/2. If every context is flat,
the limits are so wide that they exclude nothing."""

HALVINGS = 5
"""How often the step at each end of the range is halved: a true temperature may be between two that are tried."""

TOKENS = 2**15
"""Number of tokens that are compared with the limits. They are drawn at random: every n-th token could always be at the
same position of a completion."""


@dataclass(frozen=True)
class Range:
    """The temperatures that the limits allow.

    Attributes:
        low, high: the lowest and highest of them.
        beyond: share of the sum of squared differences that is beyond the limits of the best temperature.
        one_sided: whether all of them are on one side of 1.
        tested: whether the data could have excluded them.
    """

    low: float
    high: float
    beyond: float
    one_sided: bool
    tested: bool

    @property
    def holds(self) -> bool:
        """Whether there is a temperature that explains the data."""
        return self.beyond <= ALLOWED

    def contains(self, t: float) -> bool:
        """Whether a temperature is in the range, extended by one step."""
        return self.low / STEP <= t <= self.high * STEP


def allowed(x: Tensor, y: Tensor) -> Range:
    """The temperatures that are possible for given log-probs.

    Args:
        x: log-probs of the trainer at sampled tokens, float64.
        y: log-probs of the sampler at the same tokens, float64.

    Returns:
        The range.
    """
    if len(x) > TOKENS:
        some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:TOKENS]
        x, y = x[some], y[some]
    x = x.clamp(max=0)  # a trainer's float32 may be above 0 by its rounding
    square = (y - x).square()
    whole = float(square.sum())
    logit = x - torch.log(-torch.expm1(x))  # infinite at probability 1, where it is used as such
    share = lambda t: _beyond(logit, y, 1 / t) / whole
    shares = {t: share(t) for t in _tried()}
    least = min(shares.values())
    most = max(2 * least, least + ROOM)
    possible = [t for t in shares if shares[t] <= most]
    low, high = (
        _end(lambda t: share(t) <= most, t, by) for t, by in ((min(possible), 1 / STEP), (max(possible), STEP))
    )
    one_sided = max(possible) < 1 / STEP or min(possible) > STEP
    tested = float(square[logit > 0].sum()) >= TESTED * whole
    return Range(low, high, least, one_sided, tested)


def _end(is_possible: Callable[[float], bool], t: float, step: float) -> float:
    """The end of the range that is less than one step beyond a possible temperature, and not within the range."""
    beyond = t * step
    for _ in range(HALVINGS):
        middle = math.sqrt(t * beyond)
        t, beyond = (middle, beyond) if is_possible(middle) else (t, middle)
    return beyond


def _tried() -> list[float]:
    """Temperatures with evenly spaced logarithms, without 1."""
    first, last = (round(math.log(t) / math.log(STEP)) for t in (LOWEST, HIGHEST))
    return [STEP**n for n in range(first, last + 1) if n]


def _beyond(logit: Tensor, y: Tensor, a: float) -> float:
    """Sum of squares of how far the sampler's log-probs are beyond the limit."""
    limit = logsigmoid(a * logit)
    return float((limit - y if a > 1 else y - limit).clamp(min=0).square().sum())
