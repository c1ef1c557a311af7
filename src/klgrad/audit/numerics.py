"""Numerical faults of a loss: overflow and lost digits in float32, masks with gaps, and empty completions."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import LossCallError
from .batch import Batch
from .gradients import Parts, evaluate
from .subject import Subject

# How a loss behaves in float32 at log-ratios that occur in training and rarely in tests.

LIVE_RANGE = (0.1, 1.0, 2.0, 2.65, 3.0, 4.0, 4.5, 5.0, 7.5, 10.0, 14.0, 16.0, 17.0, 20.0, 25.0, 30.0)
"""|log ref/π| of a token at which its coefficient is compared with that in float64. None is near 15: where exp(-l) is
multiplied by exp(l), float32 is 0.8 to 1.7% off there, and which it is depends on the processor."""

NEIGHBOURS = 4
SPACING = 0.01
"""Each of these sizes stands for this many log-ratios: the rounding of a single one may happen to be small."""

EXTREMES = (50.0, 90.0, 200.0, 1e3, 9e3)
"""|log ref/π| at which loss and gradient must still be finite."""

DIGITS_LOST = 0.01
"""Relative difference between the float32 and the float64 coefficient that counts as wrong."""


class Numerics(NamedTuple):
    """What the probes found; a log-ratio is signed, log π - log ref.

    Attributes:
        wrong_from: the log-ratio smallest in size at which the float32 coefficient is more than 1% off its float64
            value, or None.
        finite: whether loss and gradient stay finite in float32 at every probe. A loss that raises an error there, as
            one that checks its own values, is not finite.
    """

    wrong_from: float | None
    finite: bool


def probe_float32(subject: Subject) -> Numerics:
    """Vary the log-ratio of one token of a group of three, with one group for each log-ratio in one batch."""
    sizes = tuple(x + i * SPACING for x in LIVE_RANGE for i in range(NEIGHBOURS))
    live, extreme = (tuple(sign * x for sign in (-1.0, 1.0) for x in each) for each in (sizes, EXTREMES))
    low, finite = _coefficients(subject, live, torch.float32)
    high, _ = _coefficients(subject, live, torch.float64)
    _, finite_beyond = _coefficients(subject, extreme, torch.float32)
    n = len(sizes)
    wrong = [_wrong_from(-1.0, low[:n], high[:n]), _wrong_from(1.0, low[n:], high[n:])]
    return Numerics(min((x for x in wrong if x is not None), key=abs, default=None), finite and finite_beyond)


def _wrong_from(sign: float, low: list[float], high: list[float]) -> float | None:
    """On one side, the first log-ratio at which float32 is wrong."""
    usual = max(map(abs, high[: 3 * NEIGHBOURS]))
    for i, (x, y) in enumerate(zip(low, high, strict=True)):
        expected = max(usual, abs(y))  # where the coefficient crosses 0, compare with its usual size
        if not abs(x - y) <= DIGITS_LOST * expected:
            return sign * LIVE_RANGE[i // NEIGHBOURS]
    return None


def _coefficients(subject: Subject, log_ratios: tuple[float, ...], dtype: torch.dtype) -> tuple[list[float], bool]:
    """The moved token's coefficient at each log-ratio, and whether the loss and every gradient is finite."""
    try:
        loss, parts = evaluate(subject.large(), probe_batch(*log_ratios, dtype=dtype))
    except LossCallError:
        return [math.nan] * len(log_ratios), False
    return parts[0][:: len(LOGP), 1].tolist(), all(bool(torch.isfinite(x).all()) for x in (loss, *parts))


LOGP = ((-0.7, -0.5, -1.9), (-1.1, -0.3, -0.8), (-2.3, -1.4, -0.6))
REF_LOGP = ((-1.0, -0.5, -1.6), (-0.6, -0.9, -1.2), (-1.7, -1.5, -0.2))
"""Log-probs of the group, before the log-ratio of one token is changed."""


def probe_batch(*log_ratios: float, dtype: torch.dtype = torch.float64) -> Batch:
    """Three completions of three tokens, on-policy, for each log-ratio, which the second token of the first one has."""
    moved, n = torch.tensor(log_ratios, dtype=torch.float64), len(log_ratios)
    logp, ref = (torch.tensor(x, dtype=torch.float64).repeat(n, 1) for x in (LOGP, REF_LOGP))
    logp[:: len(LOGP), 1] += moved.clamp(max=0.0)
    ref[:: len(LOGP), 1] -= moved.clamp(min=0.0)
    kl = (logp - ref).abs()
    two_tokens = lambda x: torch.stack([x, torch.log1p(-x.exp())], -1)  # logits in which token 0 has these log-probs
    batch = Batch(
        logp=logp,
        ref_logp=ref,
        old_logp=logp,
        behavior_logp=logp,
        mask=torch.ones_like(logp, dtype=torch.bool),
        advantages=torch.zeros_like(logp),
        rewards=torch.zeros_like(logp[:, 0]),
        group=torch.arange(n).repeat_interleave(len(LOGP)),
        token_reverse_kl=kl,
        token_forward_kl=kl,
        logits=two_tokens(logp),
        ref_logits=two_tokens(ref),
        behavior_logits=two_tokens(logp),
        tokens=torch.zeros(logp.shape, dtype=torch.long),
    )
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in vars(batch).items()}
    return Batch(**cast).fresh()


# Single batches that ask one question each, about masks.

SAME = 1e-5
"""Relative difference of derivatives that are the same, also for a loss that casts to float32."""

LOG_RATIO = 0.7
"""log π/ref of the token that `probe_batch` moves."""


def reads_masked(subject: Subject) -> bool:
    """Whether the gradient of live tokens depends on what is at masked positions."""
    batch = _masked_at((2, 1), (1, 2))  # inside a completion, and at the end of one
    other = {
        name: torch.where(_like(batch.mask, x), x, x - (2 if name.startswith("ref") else 1)).detach()
        for name, x in vars(batch).items()
        if x.is_floating_point() and x.dim() > 1 and name != "advantages"
    }
    return not _same_at(batch.mask, _evaluated(subject, batch), _evaluated(subject, replace(batch, **other).fresh()))


def probe_gaps(subject: Subject) -> tuple[bool, bool]:
    """Whether a masked position between live tokens has a gradient, and whether it changes theirs or is an error.

    The same completions without the gap have the masked position at their end. All have it at the same place, since a
    baseline may compare the tokens at one position.
    """
    # The second and the third column in the other order; a tensor without columns stays as it is.
    gap_last = lambda x: x if x.dim() == 1 else x.detach()[:, [0, 2, 1]]
    batch = _masked_at((0, 1), (1, 1), (2, 1))
    moved = Batch(**{name: gap_last(x) for name, x in vars(batch).items()}).fresh()
    inside, last = _evaluated(subject, batch), _evaluated(subject, moved)
    if inside is None or last is None:
        return False, inside is not last
    back = Parts(*map(gap_last, last))
    at_gap, at_end = (bool((x.logp[~batch.mask] != 0).any()) for x in (inside, back))
    return at_gap and not at_end, not _same_at(batch.mask, inside, back)


def is_finite_if_empty(subject: Subject) -> bool:
    """Whether loss and gradient are finite, and no error, where one completion of a batch has no token."""
    try:
        loss, parts = evaluate(subject, _masked_at((0, 0), (0, 1), (0, 2)))
    except LossCallError:
        return False
    return all(bool(x.isfinite().all()) for x in (loss, *parts))


def _masked_at(*positions: tuple[int, int]) -> Batch:
    """Three completions of three tokens, without those at some positions."""
    batch = probe_batch(LOG_RATIO)
    mask = batch.mask.clone()
    for position in positions:
        mask[position] = False
    return replace(batch, mask=mask).fresh()


def _evaluated(subject: Subject, batch: Batch) -> Parts | None:
    """The derivatives, or None if the loss raises an error."""
    try:
        return evaluate(subject, batch)[1]
    except LossCallError:
        return None


def _same_at(mask: Tensor, one: Parts | None, other: Parts | None) -> bool:
    """Whether derivatives at the positions of a mask are the same up to rounding."""
    if one is None or other is None:
        return one is other
    for pair in zip(one, other, strict=True):
        a, b = (torch.where(_like(mask, x), x, 0).nan_to_num() for x in pair)
        if float((a - b).norm()) > SAME * max(float(a.norm()), float(b.norm()), math.ulp(0.0)):
            return False
    return True


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask if x.dim() == mask.dim() else mask[..., None]
