"""Take a loss apart by probing its derivative.

The derivative of a loss by the log-prob of a sampled token is the coefficient that the loss puts on that token's score.
Log-ratios to the reference, and ratios to the sampler, are inputs that can be chosen freely: so each part of a loss is
read off from how the coefficients respond to one input at a time. This module reads losses of sampled log-probs;
full-vocabulary losses, divisions by a spread and functions of a completion's sum are not taken apart yet.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..core.divergences import CHI_SQUARE, FORWARD_KL, HELLINGER, REVERSE_KL, TOTAL_VARIATION, alpha, jensen_shannon
from ..core.estimators import k2, k3
from .batch import PADDING_LOGP, PADDING_REF_LOGP, Batch
from .gradients import evaluate
from .subject import Subject

ROWS, TOKENS, GROUP = 8, 6, 4
"""Two groups of four completions of six tokens: statistics of a group differ from those of the batch."""

DEPTH = -32.0
"""log π of the probed tokens, so that log ref = log π - l stays below 0 for every log-ratio of the curve."""

REACH = 30.0
"""The largest |log π/ref| of the curve."""

SAME = 1e-9
"""Relative difference of numbers that are equal up to rounding in float64."""

FLAT = 1e-12
"""A coefficient that rises by less than this share of the largest one does not rise."""


@dataclass(frozen=True, eq=False)
class ProbeInputs:
    """What a loss is probed with: (B, T) log-ratios, log π/μ, log π, mask, full-vocabulary KLs, and (B,) groups."""

    log_ratio: Tensor
    log_weight: Tensor
    logp: Tensor
    mask: Tensor
    group: Tensor
    token_reverse_kl: Tensor
    token_forward_kl: Tensor

    @classmethod
    def at_reference(cls, lengths: list[int], width: int = TOKENS, group: int = GROUP) -> "ProbeInputs":
        """Completions of these lengths, with the policy at the reference and at the sampler."""
        none = torch.zeros(len(lengths), width, dtype=torch.float64)
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        return cls(none, none, none + DEPTH, mask, torch.arange(len(lengths)) // group, none, none)

    def with_entries(self, name: str, entries: dict[tuple[int, int], float]) -> "ProbeInputs":
        """One table with some of its entries replaced."""
        table = getattr(self, name).clone()
        for place, value in entries.items():
            table[place] = value
        return replace(self, **{name: table})

    def batch(self) -> Batch:
        """As a loss receives it. The logits have three entries, of which the first is sampled."""
        padded = lambda x, fill: torch.where(self.mask, x, fill)
        logp = padded(self.logp, PADDING_LOGP)
        turn = (torch.arange(len(logp))[:, None] + torch.arange(logp.shape[1])) % 2
        ref_logp = padded(self.logp - self.log_ratio, torch.tensor(PADDING_REF_LOGP, dtype=logp.dtype)[turn])
        behavior = padded(self.logp - self.log_weight, PADDING_LOGP)
        advantages = torch.zeros_like(logp)
        return Batch(
            logp=logp,
            ref_logp=ref_logp,
            old_logp=behavior,
            behavior_logp=behavior,
            mask=self.mask,
            advantages=advantages,
            rewards=advantages[:, 0],
            group=self.group,
            token_reverse_kl=self.token_reverse_kl,
            token_forward_kl=self.token_forward_kl,
            logits=_logits(logp, 0.7),
            ref_logits=_logits(ref_logp, 0.4),
            behavior_logits=_logits(behavior, 0.7),
            tokens=torch.zeros_like(self.mask, dtype=torch.long),
        ).fresh()


def _logits(logp: Tensor, share: float) -> Tensor:
    """(B, T, 3) log-probs of which the first is `logp`; the second has `share` of the rest."""
    rest = torch.log(-torch.expm1(logp.clamp(max=-FLAT)))
    return torch.stack([logp, rest + math.log(share), rest + math.log(1 - share)], -1)


Coefficients = Callable[[ProbeInputs], Tensor]
"""(B, T) the coefficient of each token's score."""


def coefficients_of(subject: Subject) -> Coefficients:
    """The coefficients that a loss puts on the scores of the sampled tokens, also where it takes logits."""

    def read(inputs: ProbeInputs) -> Tensor:
        batch = inputs.batch()
        parts = evaluate(subject, batch)[1]
        # Behind a softmax the score of the sampled token is (1 - π) on its own logit.
        return parts.logp + parts.logits[..., 0] / -torch.expm1(batch.logp.detach())

    return read


# The shape of a response: which function of the log-ratio it is.

KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    **{d.name: d.slope for d in (REVERSE_KL, FORWARD_KL, CHI_SQUARE, HELLINGER, TOTAL_VARIATION, jensen_shannon())},
    "k2": k2.value,
    "k3": k3.value,
}
"""The slopes of the usual divergences, and the values of the estimators; k1 is the slope of the reverse KL."""

SUMS = (("reverse-kl", "forward-kl"), ("reverse-kl", "k2"), ("reverse-kl", "chi-square"), ("forward-kl", "chi-square"))
"""Pairs whose weighted sums are tried if no single function fits; k3 is the reverse minus the forward KL."""

GRID = torch.cat([torch.linspace(-REACH, REACH, 61), torch.linspace(-1.95, 1.95, 40)]).sort().values.double()


@dataclass(frozen=True, eq=False)
class Curve:
    """A function of the log-ratio that was read at `points`.

    Attributes:
        shares: weight of each known function that it is the sum of; empty if it is none.
        points: log-ratios and values.
        low, high: the log-ratios beyond which it is constant, or None.
        below, above: its values there.
    """

    shares: dict[str, float]
    points: tuple[Tensor, Tensor] = field(repr=False)
    low: float | None = None
    high: float | None = None
    below: float = 0.0
    above: float = 0.0

    @property
    def is_zero(self) -> bool:
        """Whether it responds to no log-ratio."""
        return bool((self.points[1] == 0).all())

    def __call__(self, log_ratio: Tensor) -> Tensor:
        """The value, from the known functions; between the points by interpolation if there are none."""
        if self.shares:
            value = sum((w * known(name)(log_ratio) for name, w in self.shares.items()), torch.zeros_like(log_ratio))
        else:
            value = _interpolated(log_ratio, *self.points)
        if self.low is not None:
            value = torch.where(log_ratio < self.low, self.below, value)
        return value if self.high is None else torch.where(log_ratio > self.high, self.above, value)

    @property
    def scale(self) -> float:
        """The derivative at the reference: by how much the loss multiplies β there."""
        step = torch.tensor([-1e-4, 1e-4], dtype=torch.float64)
        down, up = self(step)
        return float(up - down) / 2e-4


def known(name: str) -> Callable[[Tensor], Tensor]:
    """A function by its name, `alpha(-1)` and `jensen-shannon(0.1)` included."""
    kind, _, order = name.rstrip(")").partition("(")
    if order:
        return (alpha if kind == "alpha" else jensen_shannon)(float(order)).slope
    return KNOWN[name]


def _interpolated(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    right = torch.searchsorted(at, x.contiguous()).clamp(1, len(at) - 1)
    share = (x - at[right - 1]) / (at[right] - at[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def read_curve(read: Callable[[Tensor], Tensor]) -> Curve:
    """Name a function that can be read at any log-ratios and is 0 at 0."""
    values = read(GRID)
    if not bool(torch.isfinite(values).all()) or bool((values == 0).all()):
        return Curve({}, (GRID, values))
    shares = _fit(GRID, values)
    if shares is not None:
        return Curve(shares, (GRID, values))
    low, below = _edge(read, GRID, values)
    high, above = _edge(read, GRID.flip(0), values.flip(0))
    inside = ((-math.inf if low is None else low) < GRID) & ((math.inf if high is None else high) > GRID)
    shares = _fit(GRID[inside], values[inside]) if int(inside.sum()) > 4 else None
    return Curve(shares or {}, (GRID, values), low, high, below, above)


def _edge(read: Callable[[Tensor], Tensor], at: Tensor, values: Tensor) -> tuple[float | None, float]:
    """Where the constant part at the first end of a curve ends, by bisection; None if it has none."""
    level = float(values[0])
    is_level = lambda v: abs(v - level) <= FLAT * (1 + abs(level))
    other = next((i for i, v in enumerate(values.tolist()) if not is_level(v)), None)
    if other is None or other < 2:
        return None, 0.0
    flat, moving = float(at[other - 1]), float(at[other])
    for _ in range(40):
        middle = (flat + moving) / 2
        if is_level(float(read(torch.tensor([middle], dtype=torch.float64))[0])):
            flat = middle
        else:
            moving = middle
    return flat, level


def _fit(x: Tensor, y: Tensor) -> dict[str, float] | None:
    """The known function, or the sum of two, that these points lie on."""
    for name, function in KNOWN.items():
        shares = _weigh(x, y, {name: function(x)})
        if shares:
            return shares
    for a, b in SUMS:
        shares = _weigh(x, y, {a: KNOWN[a](x), b: KNOWN[b](x)})
        if shares:
            return shares
    return None


def _weigh(x: Tensor, y: Tensor, functions: dict[str, Tensor]) -> dict[str, float] | None:
    near = x.abs() <= 4
    if int(near.sum()) <= len(functions):
        near = torch.ones_like(near)
    table = torch.stack(list(functions.values()), -1)
    weights = torch.linalg.lstsq(table[near], y[near, None]).solution[:, 0]
    # exp cancels against exp in some losses: what is left has the rounding of the exponential.
    allowed = SAME * (1 + y.abs()) + 1e-14 * x.abs().exp() * y.abs().clamp(min=1e-3).max().clamp(max=1)
    if bool(((table @ weights - y).abs() > allowed).any()):
        return None
    return {name: _rounded(float(w)) for name, w in zip(functions, weights, strict=True)}


def _rounded(x: float) -> float:
    """The nearest number of few digits, if it is that up to rounding."""
    short = float(f"{x:.9g}")
    return short if abs(short - x) <= SAME * abs(x) else x


# The parts of a loss.

PLACE = (0, 2)
"""The token whose log-ratio is moved: it has tokens before it, tokens after it, and other rows."""

STEP = 0.75
"""A log-ratio at which the known functions differ, and a log importance ratio that no usual bound cuts off."""


@dataclass(frozen=True)
class Unit:
    """What a loss divides by.

    Attributes:
        name: `sum` over the completion, `completion-mean`, `token-mean` over the batch, `padded-mean` (by the width of
            the batch), or `other`.
        rows: whether it is a mean over the completions of the batch, and no sum.
    """

    name: str
    rows: bool

    def shares(self, inputs: ProbeInputs) -> Tensor:
        """(B, 1) what each completion's coefficients are multiplied by."""
        lengths = inputs.mask.sum(-1, keepdim=True).double()
        rows = len(lengths) if self.rows else 1
        if self.name == "completion-mean":
            return 1 / (rows * lengths)
        if self.name == "token-mean":
            return torch.ones_like(lengths) / lengths.sum()
        if self.name == "padded-mean":
            return torch.ones_like(lengths) / (rows * inputs.mask.shape[1])
        return torch.ones_like(lengths) / rows


UNITS = tuple(Unit(name, rows) for name in ("sum", "completion-mean", "padded-mean") for rows in (True, False))
UNITS += (Unit("token-mean", True),)

SHAPES = (([6] * 8, 6), ([6, 5, 6, 3, 6, 6, 2, 6], 6), ([4, 6, 6, 3], 6), ([4, 6, 6, 3], 9))
"""Lengths of completions, and the padded width, of the batches in which the unit is measured."""


def read_unit(read: Coefficients) -> Unit:
    """The unit by which responses in batches of several shapes are all alike; `other` if none is."""
    responses, inputs = [], []
    for lengths, width in SHAPES:
        base = ProbeInputs.at_reference(lengths, width)
        start = read(base)
        for row in (0, 3):
            moved = read(base.with_entries("log_ratio", {(row, 1): STEP}))
            responses.append(float((moved - start)[row, 1]))
            inputs.append((base, row))
    for unit in UNITS:
        scaled = [r / float(unit.shares(base)[row, 0]) for r, (base, row) in zip(responses, inputs, strict=True)]
        if max(scaled) - min(scaled) <= SAME * max(map(abs, scaled)):
            return unit
    return Unit("other", True)


@dataclass(frozen=True)
class Samples:
    """How the coefficient of a token depends on the ratio π/μ of a token before it, of itself, and of one after it.

    Attributes:
        ratio: `none`, `token`, `prefix`, `sequence`, `mean` (a geometric mean over the completion) or `other`.
        bound: kind and edges of a bound on it, as ratios.
    """

    ratio: str
    bound: tuple[str, float | None, float | None] | None = None


def read_samples(read: Coefficients, base: ProbeInputs, at: tuple[int, int] = PLACE) -> Samples:
    """Which ratios multiply a token's own response."""
    row, token = at

    def weight(entries: dict[tuple[int, int], float]) -> float:
        weighted = base.with_entries("log_weight", entries)
        moved = weighted.with_entries("log_ratio", {at: STEP})
        return float((read(moved) - read(weighted))[at])

    plain = weight({})
    if plain == 0:
        return Samples("none")
    places = {"before": (row, token - 1), "own": at, "after": (row, token + 2)}
    small = STEP / 10
    factors = {name: weight({place: small}) / plain for name, place in places.items()}
    moves = {name for name, f in factors.items() if abs(f - math.exp(small)) <= SAME}
    still = {name for name, f in factors.items() if abs(f - 1) <= SAME}
    if len(still) == 3:
        return Samples("none")
    ratio = (
        {
            frozenset(["own"]): "token",
            frozenset(["own", "before"]): "prefix",
            frozenset(["own", "before", "after"]): "sequence",
            frozenset(["before"]): "prefix-before",
        }.get(frozenset(moves), "other")
        if len(moves | still) == 3
        else "other"
    )
    lengths = base.mask[row].sum()
    if all(abs(f - math.exp(small / float(lengths))) <= SAME for f in factors.values()):
        ratio = "mean"
    return Samples(ratio, _read_bound(lambda x: weight({places["own"]: x}) / plain) if "own" in moves else None)


def _read_bound(factor: Callable[[float], float]) -> tuple[str, float | None, float | None] | None:
    """The bound on a ratio: where the factor stops following it, and whether it is then constant or 0."""
    edges, kinds = [], set()
    for sign in (-1.0, 1.0):
        follows = lambda x, sign=sign: abs(factor(sign * x) / math.exp(sign * x) - 1) <= SAME
        if follows(15.0):
            edges.append(None)
            continue
        low, high = 0.0, 15.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if follows(middle) else (low, middle)
        edges.append(_rounded(math.exp(sign * low)))
        kinds.add("mask" if factor(sign * 15.0) == 0 else "truncate")
    if not kinds:
        return None
    kind = kinds.pop() if len(kinds) == 1 else "other"
    if kind == "truncate" and edges[0] is not None:
        kind = "clip"
    return kind, edges[0], edges[1]


@dataclass(frozen=True, eq=False)
class Horizon:
    """How the log-ratios of later tokens enter the coefficient of a token.

    Attributes:
        kind: `none`, `all`, `discount` or `other`.
        weights: of the tokens after it, by distance.
        discount: of one step, for kind `discount`.
        estimate: the function of a later token's log-ratio: `k1`, `k2`, `k3` or `other`.
        curve: that function.
    """

    kind: str
    weights: tuple[float, ...]
    discount: float | None
    estimate: str
    curve: Curve


ESTIMATES = {"reverse-kl": "k1", "k2": "k2", "k3": "k3"}
"""Names of the functions of a later token's log-ratio that stand for its KL."""


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What a loss is made of.

    The coefficient of a token is, in the unit of the loss, `constant` + `own`(its log-ratio) + Σ over later tokens of
    weight times `horizon.curve` + the same of earlier tokens by `past` + of the other completions of its group by
    `others` and of the rest of the batch by `strangers`.
    """

    unit: Unit
    own: Curve
    horizon: Horizon
    past: tuple[float, ...]
    others: float
    strangers: float
    constant: float
    samples: Samples


class ResponseReader:
    """Reads the responses of the coefficients to one log-ratio at a time, several in one call where rows allow it."""

    def __init__(self, read: Coefficients) -> None:
        self.read = read
        self.unit = read_unit(read)
        self.base = ProbeInputs.at_reference([TOKENS] * ROWS)
        self.start = read(self.base) / self.unit.shares(self.base)
        moved = self.responses({PLACE: STEP})
        self.couples_rows = bool((moved[1:] != 0).any())

    def responses(self, entries: dict[tuple[int, int], float]) -> Tensor:
        """(B, T) what these log-ratios add to the coefficients, in the unit of the loss."""
        moved = self.base.with_entries("log_ratio", entries)
        return self.read(moved) / self.unit.shares(self.base) - self.start

    def along(self, log_ratios: Tensor, moved: int, seen: int) -> Tensor:
        """The coefficient of one token as the log-ratio of another of its completion takes these values."""
        at_once = 1 if self.couples_rows else ROWS
        values = []
        for some in log_ratios.split(at_once):
            entries = {(row, moved): x for row, x in enumerate(some.tolist())}
            values.append(self.responses(entries)[: len(some), seen])
        return torch.cat(values)


def read_anatomy(read: Coefficients) -> Anatomy:
    """Read each part by its own probe."""
    reader = ResponseReader(read)
    row, token = PLACE
    own = read_curve(lambda x: reader.along(x, token, token))
    response = reader.responses({PLACE: STEP})
    past, later = tuple(response[row, token + 1 :].tolist()), tuple(response[row, :token].flip(0).tolist())
    group = reader.base.group == reader.base.group[row]
    group[row] = False
    others = float(response[group][:, token].mean())
    strangers = float(response[reader.base.group != reader.base.group[row]][:, token].mean())
    curve = read_curve(lambda x: reader.along(x, token, token - 1)) if any(later) else Curve({}, (GRID, 0 * GRID))
    return Anatomy(
        reader.unit,
        own,
        _horizon(curve, later),
        past,
        others,
        strangers,
        float(reader.start[PLACE]),
        read_samples(read, reader.base),
    )


def _horizon(curve: Curve, responses: tuple[float, ...]) -> Horizon:
    if curve.is_zero:
        return Horizon("none", (), None, "", curve)
    strength = next(iter(curve.shares.values())) if len(curve.shares) == 1 else 1.0
    weights = tuple(_rounded(x / responses[0] * strength) for x in responses)
    estimate = ESTIMATES.get(next(iter(curve.shares)), "other") if len(curve.shares) == 1 else "other"
    steps = [b / a for a, b in pairwise(weights)]
    if all(abs(step - 1) <= SAME for step in steps):
        return Horizon("all", weights, None, estimate, curve)
    if all(abs(step - steps[0]) <= SAME for step in steps):
        return Horizon("discount", weights, _rounded(steps[0]), estimate, curve)
    return Horizon("other", weights, None, estimate, curve)
