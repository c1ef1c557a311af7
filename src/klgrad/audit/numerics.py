"""How a loss behaves in float32 at log-ratios that occur in training and rarely in tests."""

import math
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

from ..errors import LossCallError
from .batch import Batch
from .gradient import evaluate
from .subject import Subject

LIVE_RANGE = (0.1, 1.0, 2.0, 2.65, 3.0, 4.0, 4.5, 5.0, 7.5, 10.0, 15.0, 16.0, 17.0, 20.0, 25.0, 30.0)
"""|log ref/π| of a token at which its coefficient is compared with that in float64."""

EXTREMES = (50.0, 90.0, 200.0, 1e3, 9e3)
"""|log ref/π| at which loss and gradient must still be finite."""

DEAD = 1e-6
"""A float32 coefficient below this share of the one in float64 at the same log-ratio is dead; both are 0 behind a
clamp."""

HALVINGS = 20
"""Halvings of the interval between a dead probe and a live one, which is at most 5 wide."""

DIGITS = 4
"""Decimal places of the log-ratio from which on a coefficient is dead."""

DIGITS_LOST = 0.01
"""Relative difference between the float32 and the float64 coefficient that counts as wrong."""


@dataclass(frozen=True)
class Numerics:
    """What the probes found; a log-ratio is signed, log π - log ref.

    Attributes:
        dead_below: the log-ratio below which the coefficient is zero, or None.
        dead_above: the one above which it is, or None.
        wrong_from: the log-ratio smallest in size at which the float32 coefficient is more than 1% off its float64
            value, or None.
        finite: whether loss and gradient stay finite in float32 at every probe. A loss that raises an error there, as
            one that checks its own values, is not finite.
    """

    dead_below: float | None
    dead_above: float | None
    wrong_from: float | None
    finite: bool


def probe(subject: Subject) -> Numerics:
    """Vary the log-ratio of one token, with the rest of a group of three held fixed."""
    live, extreme = (tuple(sign * x for sign in (-1.0, 1.0) for x in sizes) for sizes in (LIVE_RANGE, EXTREMES))
    low, finite = _coefficients(subject, live, torch.float32)
    high, _ = _coefficients(subject, live, torch.float64)
    _, finite_beyond = _coefficients(subject, extreme, torch.float32)
    n = len(LIVE_RANGE)
    below, above = (low[:n], high[:n]), (low[n:], high[n:])
    wrong = [x for x in (_wrong_from(-1.0, *below), _wrong_from(1.0, *above)) if x is not None]
    return Numerics(
        _dead_from(subject, -1.0, *below),
        _dead_from(subject, 1.0, *above),
        min(wrong, key=abs, default=None),
        finite and finite_beyond,
    )


def _dead_from(subject: Subject, sign: float, low: list[float], high: list[float]) -> float | None:
    """The log-ratio beyond which the coefficient is zero on one side; None if it is not, or is zero everywhere."""
    live = [i for i, (x, y) in enumerate(zip(low, high, strict=True)) if not _is_dead(x, y)]
    if high[0] == 0 or not live or live[-1] == len(LIVE_RANGE) - 1:
        return None  # a zero at a smaller log-ratio is then a crossing, not a zone
    alive, dead = LIVE_RANGE[live[-1]], LIVE_RANGE[live[-1] + 1]
    for _ in range(HALVINGS):
        middle = (alive + dead) / 2
        (x,), (y,) = (_coefficients(subject, (sign * middle,), t)[0] for t in (torch.float32, torch.float64))
        alive, dead = (alive, middle) if _is_dead(x, y) else (middle, dead)
    return round(sign * (alive + dead) / 2, DIGITS)


def _is_dead(low: float, high: float) -> bool:
    return abs(low) <= DEAD * abs(high)


def _wrong_from(sign: float, low: list[float], high: list[float]) -> float | None:
    """On one side, the first log-ratio at which float32 is wrong."""
    usual = max(map(abs, high[:3]))
    for size, x, y in zip(LIVE_RANGE, low, high, strict=True):
        expected = max(usual, abs(y))  # where the coefficient crosses 0, compare with its usual size
        if not abs(x - y) <= DIGITS_LOST * expected:
            return sign * size
    return None


def _coefficients(subject: Subject, log_ratios: tuple[float, ...], dtype: torch.dtype) -> tuple[list[float], bool]:
    """The moved token's coefficient at each log-ratio, and whether every loss and gradient is finite."""
    # One call for all log-ratios if the subject stacks: padded to a power of two, so that a mean over all rows has the
    # rounding in float32 of a mean over one group.
    filled = log_ratios + log_ratios[-1:] * ((1 << (len(log_ratios) - 1).bit_length()) - len(log_ratios))
    calls = [filled] if subject.stacks else [(x,) for x in log_ratios]
    found, finite = [], True
    for some in calls:
        try:
            loss, parts = evaluate(subject, _probes(some, dtype).fresh())
        except LossCallError:
            found, finite = found + [math.nan] * len(some), False
            continue
        found += (parts[0][:: len(LOGP), 1].double() * len(some)).tolist()
        finite = finite and all(bool(torch.isfinite(x).all()) for x in (loss, *parts))
    return found[: len(log_ratios)], finite


@cache
def _probes(log_ratios: tuple[float, ...], dtype: torch.dtype) -> Batch:
    """A group for each log-ratio, in one batch."""
    each = [probe_batch(x, dtype) for x in log_ratios]
    together = {f.name: torch.cat([getattr(batch, f.name).detach() for batch in each]) for f in fields(Batch)}
    return Batch(**together | {"group": torch.arange(len(each)).repeat_interleave(len(LOGP))})


LOGP = ((-0.7, -0.5, -1.9), (-1.1, -0.3, -0.8), (-2.3, -1.4, -0.6))
REF_LOGP = ((-1.0, -0.5, -1.6), (-0.6, -0.9, -1.2), (-1.7, -1.5, -0.2))
"""Log-probs of the group, before the log-ratio of one token is changed."""


def probe_batch(log_ratio: float, dtype: torch.dtype) -> Batch:
    """Three completions of three tokens, on-policy; token [0, 1] has the given log-ratio."""
    logp, ref = torch.tensor(LOGP, dtype=torch.float64), torch.tensor(REF_LOGP, dtype=torch.float64)
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
        rewards=torch.zeros_like(logp[:, 0]),
        group=torch.zeros(len(logp), dtype=torch.long),
        token_reverse_kl=kl,
        token_forward_kl=kl,
        logits=_two_tokens(logp),
        ref_logits=_two_tokens(ref),
        behavior_logits=_two_tokens(logp),
        tokens=torch.zeros(logp.shape, dtype=torch.long),
    )
    cast = {f.name: _cast(getattr(batch, f.name), dtype) for f in fields(batch)}
    return Batch(**cast).fresh()


def _two_tokens(logp: Tensor) -> Tensor:
    """Logits over a vocabulary of two, in which token 0 has these log-probs."""
    return torch.stack([logp, torch.log1p(-logp.exp())], -1)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
