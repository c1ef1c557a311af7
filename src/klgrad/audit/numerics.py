"""How a loss behaves in float32 at log-ratios that training meets and tests do not."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .batch import Batch
from .gradient import evaluate
from .subject import Subject

LIVE_RANGE = (1.0, 2.0, 2.65, 3.0, 4.0, 4.5, 5.0, 7.5, 10.0, 15.0, 16.0, 17.0, 20.0, 25.0, 30.0)
"""|log ref/π| of a token whose coefficient must neither vanish nor lose its digits."""

EXTREMES = (50.0, 90.0, 200.0, 1e3, 9e3)
"""|log ref/π| at which loss and gradient must still be finite."""

DEAD = 1e-6
"""A coefficient below this share of the one at |log ref/π| = 1 is dead."""

DIGITS_LOST = 0.01
"""Relative difference between the float32 and the float64 coefficient that counts as wrong."""


@dataclass(frozen=True)
class Numerics:
    """What probing found; a log-ratio is signed, log π - log ref.

    Attributes:
        dead_from: the smallest log-ratio (by size) at which the coefficient is gone, or None.
        wrong_from: the same for a float32 coefficient more than 1% off its float64 value, or None.
        finite: whether loss and gradient stay finite in float32 at every probe.
    """

    dead_from: float | None
    wrong_from: float | None
    finite: bool


def probe(subject: Subject) -> Numerics:
    """Move one token's log-ratio through the ranges, the rest of a group of three held fixed."""
    dead, wrong, finite = zip(*(_probe_side(subject, sign) for sign in (-1.0, 1.0)), strict=True)
    first = lambda found: min((x for x in found if x is not None), key=abs, default=None)
    return Numerics(first(dead), first(wrong), all(finite))


def _probe_side(subject: Subject, sign: float) -> tuple[float | None, float | None, bool]:
    """Where on one side the coefficient dies for good, where float32 first loses it, and whether all is finite."""
    low, finite = zip(*(_probe(subject, sign * x, torch.float32) for x in (*LIVE_RANGE, *EXTREMES)), strict=True)
    low = low[: len(LIVE_RANGE)]
    high = [_probe(subject, sign * size, torch.float64)[0] for size in LIVE_RANGE]
    dead = wrong = None
    for size, x in zip(reversed(LIVE_RANGE), reversed(low), strict=True):
        if not abs(x) <= DEAD * abs(high[0]) or high[0] == 0:
            break  # alive here: a zero further in is a crossing, not a zone
        dead = sign * size
    usual = max(map(abs, high[:2]))
    for size, x, y in zip(LIVE_RANGE, low, high, strict=True):
        expected = max(usual, abs(y))  # a coefficient that crosses 0 is not held to 1% of 0
        if wrong is None and not abs(x - y) <= DIGITS_LOST * expected:
            wrong = sign * size
    return dead, wrong, all(finite)


def _probe(subject: Subject, log_ratio: float, dtype: torch.dtype) -> tuple[float, bool]:
    """The token's coefficient, and whether the loss and its whole gradient are finite."""
    loss, parts = evaluate(subject, probe_batch(log_ratio, dtype))
    return float(parts[0][0, 1]), all(bool(torch.isfinite(x).all()) for x in (loss, *parts))


def probe_batch(log_ratio: float, dtype: torch.dtype) -> Batch:
    """Three completions of three tokens, on-policy; token [0, 1] has the given log-ratio."""
    logp = torch.tensor([[-0.7, -0.5, -1.9], [-1.1, -0.3, -0.8], [-2.3, -1.4, -0.6]], dtype=torch.float64)
    ref = torch.tensor([[-1.0, -0.5, -1.6], [-0.6, -0.9, -1.2], [-1.7, -1.5, -0.2]], dtype=torch.float64)
    logp[0, 1] += min(log_ratio, 0.0)
    ref[0, 1] -= max(log_ratio, 0.0)
    kl = (logp - ref).abs()
    batch = Batch(
        logp=logp,
        ref_logp=ref,
        old_logp=logp.clone(),
        behavior_logp=logp.clone(),
        mask=torch.ones_like(logp, dtype=torch.bool),
        advantages=torch.zeros_like(logp),
        group=torch.zeros(len(logp), dtype=torch.long),
        token_kl=kl,
        token_forward_kl=kl,
    )
    cast = {f.name: _cast(getattr(batch, f.name), dtype) for f in fields(batch)}
    return Batch(**cast).fresh()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
