"""Numerical faults of a loss: overflow, lost digits, and the curve of its gradient."""

import math
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

from ..enumeration import Problem, bandit, population, with_rational_sampler
from ..errors import LossCallError
from ..targets import TO_REFERENCE
from .batch import Advantages, Batch, advantage_of, from_problem
from .call import UserLoss
from .gradients import Measurement, Parts, evaluate, limit_cases, of_reference, sum_over_rows
from .match import MATCH, Comparison
from .problems import Case
from .subject import Subject

# How a loss behaves in float32 at log-ratios that occur in training and rarely in tests.

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


# The coefficient that a loss puts on the score of one sampled token, as a function of the token's log-ratio.

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


# Single batches that ask one question each: about masks, the order of rows, lengths and large vocabularies.

LOG_RATIO = 0.7
"""log π/ref of the token that `probe_batch` moves."""

LARGE_VOCABULARY = 512
"""Tokens of the large vocabulary. A list of the most likely tokens, as in a top-k, has fewer."""


def reads_masked(subject: Subject) -> bool:
    """Whether the gradient of live tokens depends on what is at masked positions."""
    batch = _masked_at((2, 1), (1, 2))  # inside a completion, and at the end of one
    masked = {
        name: torch.where(_like(batch.mask, x), x, x - (2 if name.startswith("ref") else 1)).detach()
        for name, x in ((f.name, getattr(batch, f.name)) for f in fields(batch))
        if x.is_floating_point() and x.dim() > 1 and name != "advantages"
    }
    return not _same_at(batch.mask, _evaluated(subject, batch), _evaluated(subject, replace(batch, **masked).fresh()))


def stumbles_over_gaps(subject: Subject) -> bool:
    """Whether a masked position between live tokens changes their gradient, has one itself, or is an error.

    The same completions without the gap have the masked position at their end. All have it at the same place, since a
    baseline may compare the tokens at one position.
    """
    batch = _masked_at((0, 1), (1, 1), (2, 1))
    moved = replace(batch, **{f.name: _gap_last(getattr(batch, f.name)) for f in fields(batch)}).fresh()
    found, without = _evaluated(subject, batch), _evaluated(subject, moved)
    if found is None or without is None:
        return found is not without
    back = Parts(*map(_gap_last, without))
    is_clean = bool((found.logp[~batch.mask] == 0).all()) or bool((back.logp[~batch.mask] != 0).any())
    return not (is_clean and _same_at(batch.mask, found, back))


def is_finite_if_empty(subject: Subject) -> bool:
    """Whether loss and gradient are finite, and no error, where one completion of a batch has no token."""
    batch = probe_batch(LOG_RATIO, torch.float64)
    mask = batch.mask.clone()
    mask[0] = False
    try:
        loss, parts = evaluate(subject, replace(batch, mask=mask).fresh())
    except LossCallError:
        return False
    return all(bool(x.isfinite().all()) for x in (loss, *parts))


def order_matters(subject: Subject) -> bool:
    """Whether the gradient of a large batch, of an even or an odd number of completions, depends on its order."""
    if subject.stacks or subject.exchangeable:
        return False
    cases = limit_cases(on_policy=True)
    even = next(c for c in cases if c.varying and c.distance == "far")
    return any(_depends_on_order(subject, case) for case in (even, *(c for c in cases if c.group_size == 3)))


def _depends_on_order(subject: Subject, case: Case) -> bool:
    assert case.parts is not None
    members = population(case.problem, case.group_size, case.parts)
    order = torch.randperm(len(members), generator=torch.Generator().manual_seed(0))
    none = advantage_of(case.problem, "zero")
    listed, mixed = (
        evaluate(subject.large(), from_problem(case.problem, some, none))[1] for some in (members, members[order])
    )
    rows = order[:, None] * case.group_size + torch.arange(case.group_size)
    return not _same_at(None, Parts(*(part[rows.flatten()] for part in listed)), mixed)


def divides_by_length(subject: Subject) -> bool:
    """Whether each completion's gradient is that of a target, divided by its length or by the square of it.

    Near ref, where no clamp is active.
    """
    cases = [c for c in limit_cases(on_policy=True) if c.varying and c.distance == "near"]
    for power in (1, 2):
        found = []
        for case in cases:
            assert case.parts is not None
            members = population(case.problem, case.group_size, case.parts)
            batch = from_problem(case.problem, members, advantage_of(case.problem, "zero"))
            lengths = batch.mask.sum(-1).double() ** power
            parts = Parts(*(_rowwise(lengths, part) * part for part in evaluate(subject.large(), batch)[1]))
            found.append(Measurement(case, sum_over_rows(case.problem, members, parts)))
        if Comparison(found, TO_REFERENCE).match is not None:
            return True
    return False


def in_large_vocabulary(subject: Subject, advantages: Advantages, *, on_policy: bool) -> Measurement | None:
    """The gradient of a loss that takes logits where the vocabulary is large; None for another loss.

    One batch holds each token as often as the sampler draws it. This is exact for a loss whose rows do not influence
    each other; of other losses it is not measured. A framework's trainer has a vocabulary of its own.
    """
    if subject.kind == "framework":
        return None
    problem, parts = _large_vocabulary(on_policy)
    case = Case("middle", problem, 1, False, f"a vocabulary of {LARGE_VOCABULARY} tokens", parts=parts)
    few = from_problem(problem, torch.arange(3)[:, None], advantage_of(problem, "zero"))
    other = replace(few, **{name: _in_last_row(getattr(few, name)) for name in ("ref_logp", "ref_logits")}).fresh()
    one, moved = _evaluated(subject, few), _evaluated(subject, other)
    if one is None or moved is None or not (_takes_logits(subject) or bool((one.logits != 0).any())):
        return None
    first = torch.tensor([[True], [True], [False]])
    if not _same_at(first, one, moved):
        return None
    members = population(problem, 1, parts)
    batch = from_problem(problem, members, advantage_of(problem, advantages))
    batch = replace(batch, group=torch.zeros_like(batch.group))  # a mean over the others of a group needs others
    return Measurement(case, sum_over_rows(problem, members, of_reference(subject.large(), batch)))


def _takes_logits(subject: Subject) -> bool:
    return isinstance(subject.loss, UserLoss) and subject.loss.uses("logits")


@cache
def _large_vocabulary(on_policy: bool) -> tuple[Problem, int]:
    parts = 4 * LARGE_VOCABULARY
    drawn = bandit(LARGE_VOCABULARY, seed=0, away_from_ref=1.0)
    sampler = with_rational_sampler(drawn.on_policy(), parts, on_policy=True)
    to_ref, to_sampler = drawn.ref_logits - drawn.logits, drawn.behavior_logits - drawn.logits
    logits = sampler.logits if on_policy else sampler.logits - to_sampler
    return replace(sampler, logits=logits, ref_logits=logits + to_ref), parts


def _masked_at(*positions: tuple[int, int]) -> Batch:
    """Three completions of three tokens, without those at some positions."""
    batch = probe_batch(LOG_RATIO, torch.float64)
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


def _same_at(mask: Tensor | None, one: Parts | None, other: Parts | None) -> bool:
    """Whether derivatives are the same up to rounding, at all positions or at those of a mask."""
    if one is None or other is None:
        return one is other
    for a, b in zip(one, other, strict=True):
        if mask is not None:
            a, b = (torch.where(_like(mask, x), x, 0) for x in (a, b))
        a, b = a.nan_to_num(), b.nan_to_num()
        if float((a - b).norm()) > MATCH * max(float(a.norm()), float(b.norm()), math.ulp(0.0)):
            return False
    return True


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask if x.dim() == mask.dim() else mask[..., None]


def _rowwise(per_row: Tensor, x: Tensor) -> Tensor:
    return per_row.reshape(-1, *[1] * (x.dim() - 1))


def _gap_last(x: Tensor) -> Tensor:
    """The second and the third column in the other order; a tensor without columns stays as it is."""
    return x if x.dim() == 1 else x.detach()[:, [0, 2, 1]]


def _in_last_row(x: Tensor) -> Tensor:
    """Other log-probs or logits in the last row."""
    moved = x.detach().clone()
    moved[-1] = moved[-1].flip(-1) if x.dim() == 3 else moved[-1] - 1
    return moved
