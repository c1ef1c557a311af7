"""What a loss puts on the score of one sampled token, against that token's log-ratio."""

import math
from itertools import takewhile

import torch

from .gradient import evaluate
from .numerics import DEAD, probe_batch
from .subject import Subject

Curve = list[tuple[float, float | None]]
"""(log π/ref, coefficient) by rising log-ratio; None where the coefficient is not finite."""

GRID = (
    *(float(x) for x in range(-30, -5)),
    *(x / 8 for x in range(-40, 41)),  # clamps in common use bite here, at -2.61 and at ±4.47
    *(x / 2 for x in range(12, 25)),
)
"""Log-ratios that are measured: closely where the curves bend, 119 in all."""


def coefficient_curve(subject: Subject) -> Curve:
    """The float32 coefficient of one token of a group of three, for each of its log-ratios.

    It is times the number of completions, so that a mean over them that descends the reverse KL reads
    log π/ref. A loss that differentiates full-vocabulary KLs has no curve (an empty one): part of its gradient
    is on tokens that were not sampled.
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


def dead_zones(curve: Curve) -> list[tuple[float, float]]:
    """Where the coefficient is gone for good, up to the end of the curve: none, one or two intervals.

    As in the audit's probes, gone is below `DEAD` of the coefficient at a log-ratio of one on the same side.
    """
    at = dict(curve)
    zones = []
    for outwards in (-1.0, 1.0):
        usual = at.get(outwards)
        if not usual:  # no gradient even there: a loss without gradient has no zone of its own
            continue
        side = sorted((x for x in at if x * outwards > 0), key=abs, reverse=True)
        gone = list(takewhile(lambda x, usual=usual: _is_gone(at[x], usual), side))
        if gone:
            zones.append((min(gone), max(gone)))
    return zones


def _is_gone(coefficient: float | None, usual: float) -> bool:
    return coefficient is not None and abs(coefficient) <= DEAD * abs(usual)
