"""The coefficient that a loss puts on the score of one sampled token, as a function of the token's log-ratio."""

import math

import torch

from .gradient import evaluate
from .numerics import probe_batch
from .subject import Subject

Curve = list[tuple[float, float | None]]
"""(log π/ref, coefficient) in order of the log-ratio; None where the coefficient is not finite."""

GRID = (
    *(float(x) for x in range(-30, -5)),
    *(x / 8 for x in range(-40, 41)),  # common clamps become active here, at -2.61 and at ±4.47
    *(x / 2 for x in range(12, 25)),
)
"""The 119 log-ratios to measure, dense where the curves bend."""

NEAR_ZERO = 1 / 8
"""The smallest log-ratio of the grid."""


def coefficient_curve(subject: Subject) -> Curve:
    """The float32 coefficient of one token of a group of three, for each of its log-ratios.

    It is multiplied by the number of completions, so that for a mean over completions that descends the reverse KL
    it is log π/ref. A loss that differentiates full-vocabulary KLs has an empty curve, since part of its gradient is
    on tokens that were not sampled.
    """
    found: Curve = []
    for log_ratio in GRID:
        batch = probe_batch(log_ratio, torch.float32)
        _, (on_logp, *on_kls) = evaluate(subject, batch)
        if any(bool((part != 0).any()) for part in on_kls):
            return []
        coefficient = float(on_logp[0, 1]) * len(on_logp)
        found.append((log_ratio, coefficient if math.isfinite(coefficient) else None))
    return found


def per_unit(curve: Curve) -> Curve:
    """The curve divided by its slope at 0, so that losses with other reductions and coefficients can be compared.

    A loss that descends a KL has the slope 1 there, times its own scale. Others stay as they are.
    """
    at = dict(curve)
    below, above = at.get(-NEAR_ZERO), at.get(NEAR_ZERO)
    if below is None or above is None or above <= below:
        return curve
    slope = (above - below) / (2 * NEAR_ZERO)
    return [(x, y if y is None else y / slope) for x, y in curve]
