"""What a loss is given, chosen freely, and the curves in what it answers.

The derivative of a loss by the log-prob of a sampled token is the coefficient that the loss puts on that token's score.
Log-ratios to the reference, ratios to the sampler and full-vocabulary KLs are set one at a time, and the derivatives
are read. A response that is a function of one log-ratio is a curve, which is named after the divergence that it is the
slope of.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.divergences import (
    CHI_SQUARE,
    FORWARD_KL,
    HELLINGER,
    REVERSE_KL,
    TOTAL_VARIATION,
    Divergence,
    jensen_shannon,
    named,
    short_number,
)
from ..core.estimators import k2, k3
from ..core.rollout import Rollout
from ..enumeration import Problem

PADDING_LOGP, PADDING_REF_LOGP = -1.25, (-2.5, -0.25)
"""The log-probs where the mask is 0: plausible and unequal, so that a loss that ignores the mask is detected. The two
of ref take turns between tokens and between completions, so that no clamp or filter of one sign hides it.

The logits there are those of the first prefix, in which π and ref differ too.
"""

UNLIKELY, LESS_UNLIKELY = -600.0, -100.0
"""Log-prob of an entry that is added to a vocabulary: below that of every other entry of a probe, at a temperature of 3
too. The second is for losses that divide by such a probability in float32."""

Advantages = Literal["zero", "random"]
"""The advantages that a loss receives: 0 for every completion, or random numbers."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch of completions: (B, T) tensors, `rewards` and `group` (B,), and logits (B, T, V).

    `logp` and `logits` are autograd leaves. They are independent of each other: the gradient of a loss is the sum of
    what reaches each of them. `tokens` are the sampled ids, 0 where masked.
    """

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    behavior_logp: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor
    group: Tensor
    logits: Tensor
    ref_logits: Tensor
    behavior_logits: Tensor
    tokens: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        """The tensors that a loss may be differentiated by."""
        return self.logp, self.logits

    @property
    def token_reverse_kl(self) -> Tensor:
        """(B, T) KL(π‖ref) of the next token."""
        return self.divergence(REVERSE_KL)

    @property
    def token_forward_kl(self) -> Tensor:
        """(B, T) KL(ref‖π) of the next token."""
        return self.divergence(FORWARD_KL)

    def with_logits_times(self, factor: float) -> "Batch":
        """The same batch with all logits multiplied by a factor."""
        names = ("logits", "ref_logits", "behavior_logits") if factor != 1 else ()
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def with_entries(self, number: int, log_prob: float = UNLIKELY) -> "Batch":
        """The same batch with a vocabulary of so many entries: those that are added have next to no probability."""
        unlikely = log_prob - 0.01 * torch.arange(max(number - self.logits.shape[-1], 0), dtype=self.logits.dtype)
        add = lambda x: torch.cat([x, x.detach().logsumexp(-1, keepdim=True) + unlikely.expand(*x.shape[:-1], -1)], -1)
        names = ("logits", "ref_logits", "behavior_logits") if number else ()
        return replace(self, **{name: add(getattr(self, name)) for name in names})

    def divergence(self, generator: Divergence) -> Tensor:
        """(B, T) a divergence over the vocabulary."""
        return generator.over(self.logits.log_softmax(-1), self.ref_logits.log_softmax(-1))

    @property
    def group_size(self) -> int:
        """Completions per group, the same for all groups of a batch."""
        return int((self.group == self.group[0]).sum())

    def fresh(self) -> "Batch":
        """The same values in new leaf tensors."""
        logp, logits = (x.detach().clone().requires_grad_() for x in self.leaves)
        return replace(self, logp=logp, logits=logits)

    def copy(self) -> "Batch":
        """Copies of the tensors, through which gradients flow back to the leaves of this batch."""
        return Batch(**{name: x.clone() for name, x in vars(self).items()})

    def at_reference(self) -> "Batch":
        """The same batch with the reference set to the policy, so that every KL is zero."""
        return replace(self, ref_logp=self.logp.detach(), ref_logits=self.logits.detach())

    def rollout(self, generator: Divergence | None = None) -> Rollout:
        """The batch as the input of a `KLTerm` or a `Cell`, with one more divergence over the vocabulary if asked."""
        return Rollout(
            self.logp,
            self.ref_logp,
            self.mask,
            behavior_logp=self.behavior_logp,
            group=self.group,
            token_reverse_kl=self.token_reverse_kl,
            token_forward_kl=self.token_forward_kl,
            token_divergence=None if generator is None else self.divergence(generator),
        )


def from_problem(problem: Problem, members: Tensor, advantage: Tensor) -> Batch:
    """(M, G) groups of completion indices, stacked to M·G rows; `advantage` is (N,), one per completion."""
    rows = members.flatten()
    mask = problem.space.mask
    padded = lambda x, fill: torch.where(mask, x, fill)[rows]
    turn = (torch.arange(len(mask))[:, None] + torch.arange(mask.shape[1])) % 2
    behavior = padded(problem.behavior_logp, PADDING_LOGP)
    return Batch(
        logp=padded(problem.logp, PADDING_LOGP),
        ref_logp=padded(problem.ref_logp, torch.tensor(PADDING_REF_LOGP, dtype=torch.float64)[turn]),
        old_logp=behavior,
        behavior_logp=behavior,
        mask=mask[rows],
        advantages=advantage[rows, None].expand(-1, mask.shape[1]).clone(),
        rewards=advantage[rows],
        group=torch.arange(len(members)).repeat_interleave(members.shape[1]),
        logits=problem.logits[problem.space.prefix][rows],
        ref_logits=problem.ref_logits[problem.space.prefix][rows],
        behavior_logits=problem.behavior_logits[problem.space.prefix][rows],
        tokens=problem.space.tokens[rows],
    ).fresh()


# Inputs of probes.

ROWS, TOKENS, GROUP = 8, 9, 4
"""Two groups of four completions of nine tokens: statistics of a group differ from those of the batch."""

WIDTH = TOKENS + 1
"""Of the probes' tables: a completion that fills its row may be taken for one that was cut off."""

ODDS, RARE_ODDS = 0.8, -70.0
"""Log-odds of the third against the fourth entry of the probes' logits. By the second the third has a probability
below the rounding of the fourth's, so that the log-ratio of the third may be anything while that of the fourth is 0."""

DEPTH = -32.0
"""log π of the probed tokens, so that log ref = log π - l stays below 0 for every log-ratio of the curve."""

REACH = 30.0
"""The largest |log π/ref| of the curve."""

EXACT, SINGLE = 1e-9, 2e-4
"""Relative difference of numbers that are equal up to rounding, for a loss that computes in float64 and in float32."""

FLAT, FLAT_SINGLE = 1e-12, 1e-6
"""A coefficient that rises by less than this share does not rise: in float64, and for a loss that casts to float32."""


@dataclass(frozen=True, eq=False)
class ProbeInputs:
    """What a loss is probed with: (B, T) tables, and (B,) groups.

    Attributes:
        log_ratio: log π/ref of the sampled tokens.
        log_weight: log π/μ of the sampled tokens.
        logp: log π of the sampled tokens.
        mask: the live tokens.
        group: the prompt of each row.
        odds: log-odds of the third against the fourth entry of the logits of π.
        tilt: by how much those of ref are lower.
        late: by how many tokens the log-probs of ref are moved to the right.
        anchor: `ref`, or `sampler` where the log-ratios are those to the sampler, and the other way round.
        source: the batch that they were taken from, if they were.
    """

    log_ratio: Tensor
    log_weight: Tensor
    logp: Tensor
    mask: Tensor
    group: Tensor
    odds: Tensor
    tilt: Tensor
    late: int = 0
    anchor: str = "ref"
    source: Batch | None = None

    @classmethod
    def of_batch(cls, batch: Batch, anchor: str = "ref") -> "ProbeInputs":
        """The inputs that a batch consists of."""
        logp, none = batch.logp.detach(), torch.zeros_like(batch.logp)
        to_ref, to_sampler = logp - batch.ref_logp, logp - batch.behavior_logp
        if anchor == "sampler":
            to_ref, to_sampler = to_sampler, to_ref
        return cls(to_ref, to_sampler, logp, batch.mask, batch.group, none, none, anchor=anchor, source=batch)

    @classmethod
    def at_reference(cls, lengths: list[int], width: int, group: int = GROUP) -> "ProbeInputs":
        """Completions of these lengths, with the policy at the reference and at the sampler."""
        none = torch.zeros(len(lengths), width, dtype=torch.float64)
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        return cls(none, none, none + DEPTH, mask, torch.arange(len(lengths)) // group, none + ODDS, none)

    @classmethod
    def at_random(
        cls,
        lengths: list[int],
        width: int,
        group: int = GROUP,
        *,
        spread: float = 1.5,
        stale: float = 0.0,
        highest: float = -1e-6,
        seed: int = 0,
    ) -> "ProbeInputs":
        """Random inputs.

        Args:
            lengths: of the completions.
            width: of the tables.
            group: completions of one prompt.
            spread: deviation of the log-ratios. They have few values, so that a curve without a name is read at few.
            stale: deviation of log π/μ.
            highest: bound of the log-probs of all policies.
            seed: of the random numbers.
        """
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape or (len(lengths), width), generator=generator, dtype=torch.float64)
        base = cls.at_reference(lengths, width, group)
        log_ratio = (spread * normal(24)).clamp(-REACH + 1, REACH - 1)[
            torch.randint(24, base.mask.shape, generator=generator)
        ]
        log_weight = stale * normal()
        below = torch.minimum(torch.minimum(log_ratio, log_weight), torch.zeros_like(log_ratio))
        return replace(
            base,
            log_ratio=log_ratio,
            log_weight=log_weight,
            logp=below + highest - normal().square() * torch.rand(base.mask.shape, generator=generator),
            odds=normal(),
            tilt=normal(),
        )

    def with_entries(self, name: str, entries: dict[tuple[int, int], float]) -> "ProbeInputs":
        """One table with some of its entries replaced."""
        table = getattr(self, name).clone()
        for place, value in entries.items():
            table[place] = value
        return replace(self, **{name: table})

    def batch(self) -> Batch:
        """As a loss receives it.

        The logits have four entries: the sampled token, a twin of it, which tells the coefficient of the sampled one
        from that of its entry, and two others.
        """
        if self.source is not None:
            return self.source
        padded = lambda x, fill: torch.where(self.mask, x, fill)
        logp = padded(self.logp, PADDING_LOGP)
        turn = (torch.arange(len(logp))[:, None] + torch.arange(logp.shape[1])) % 2
        other = torch.tensor(PADDING_REF_LOGP, dtype=logp.dtype)[turn]
        to_ref, to_sampler = self.log_ratio, self.log_weight
        if self.anchor == "sampler":
            to_ref, to_sampler = to_sampler, to_ref
        ref_logp = padded(self.logp - to_ref, other).roll(-self.late, 1)
        behavior = padded(self.logp - to_sampler, PADDING_LOGP)
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
            logits=_logits(logp, self.odds),
            ref_logits=_logits(ref_logp, self.odds - self.tilt),
            behavior_logits=_logits(behavior, self.odds),
            tokens=torch.zeros_like(self.mask, dtype=torch.long),
        ).fresh()


def _logits(logp: Tensor, odds: Tensor) -> Tensor:
    """(B, T, 4) log-probs: the first two are `logp`, and `odds` are the log-odds of the last two."""
    twins = logp.clamp(max=math.log(0.499))  # a loss of logits is probed below that
    rest = torch.log1p(-2 * twins.exp())
    return torch.stack(
        [twins, twins, rest + torch.nn.functional.logsigmoid(odds), rest + torch.nn.functional.logsigmoid(-odds)], -1
    )


HIGHEST_TWIN = math.log(0.45)
"""The largest log π of a sampled token whose twin is as likely."""


class Derivatives(NamedTuple):
    """(B, T) what a loss answers, for each token.

    Attributes:
        score: the coefficient of its score.
        full: the coefficient of the third entry of its logits minus that of the fourth.
    """

    score: Tensor
    full: Tensor


def is_single(answer: Sequence[Tensor], nudged: Callable[[float], Sequence[Tensor]]) -> bool:
    """Whether a loss computes in float32, by what it answers, and what it answers after a step of its inputs."""
    is_same = lambda step: all(torch.equal(a, b) for a, b in zip(answer, nudged(step), strict=True))
    rounds = all(torch.equal(x, x.float().double()) for x in answer) and any(bool(x.any()) for x in answer)
    return rounds or (is_same(1e-11) and not is_same(1e-2))


# Curves: which function of the log-ratio a response is.

NAMED: dict[str, Divergence] = {
    d.name: d for d in (REVERSE_KL, FORWARD_KL, CHI_SQUARE, HELLINGER, TOTAL_VARIATION, jensen_shannon())
}
ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k2": k2.value, "k3": k3.value}
EXCESS = "excess of "
ESTIMATES |= {EXCESS + name: d.excess for name, d in NAMED.items() if d is not REVERSE_KL}
"""Values of estimators, which stand in a reward. k1 is the slope of the reverse KL, and k3 its excess."""

SUMS = (("reverse-kl", "forward-kl"), ("reverse-kl", "k2"), ("reverse-kl", "chi-square"), ("forward-kl", "chi-square"))
"""Pairs whose weighted sums are tried if no single function fits; k3 is the reverse minus the forward KL."""

GRID = torch.cat([torch.linspace(-REACH, REACH, 61), torch.linspace(-1.95, 1.95, 40)]).sort().values.double()


def function_of(name: str) -> Callable[[Tensor], Tensor]:
    """The slope of a divergence, its excess, or the value of another estimator, by name."""
    if name in ESTIMATES:
        return ESTIMATES[name]
    return named(name.removeprefix(EXCESS)).excess if name.startswith(EXCESS) else named(name).slope


@dataclass(frozen=True, eq=False)
class Curve:
    """A function of the log-ratio.

    Attributes:
        shares: weight of each known function that it is the sum of; empty if it is none.
        points: log-ratios at which it was read, and its values.
        read: reads it at any log-ratios.
        low, high: the log-ratios beyond which it is constant, or None.
        below, above: its values there.
    """

    shares: dict[str, float]
    points: tuple[Tensor, Tensor] = field(repr=False)
    read: Callable[[Tensor], Tensor] = field(repr=False)
    low: float | None = None
    high: float | None = None
    below: float = 0.0
    above: float = 0.0

    @property
    def is_zero(self) -> bool:
        """Whether it responds to no log-ratio."""
        return bool((self.points[1] == 0).all())

    def __call__(self, log_ratio: Tensor) -> Tensor:
        """The value: from the known functions, or by asking the loss again."""
        if self.is_zero:
            return torch.zeros_like(log_ratio)
        if not self.shares:
            return self.read(log_ratio.flatten()).reshape(log_ratio.shape)
        value = sum((w * function_of(name)(log_ratio) for name, w in self.shares.items()), torch.zeros_like(log_ratio))
        if self.low is not None:
            value = torch.where(log_ratio < self.low, self.below, value)
        return value if self.high is None else torch.where(log_ratio > self.high, self.above, value)

    @property
    def has_edges(self) -> bool:
        """Whether it is constant beyond some log-ratio."""
        return self.low is not None or self.high is not None

    def without_edges(self) -> "Curve":
        """The known functions alone, also where the curve is constant; the curve itself if there are none."""
        return replace(self, low=None, high=None) if self.shares else self

    @property
    def excess(self) -> dict[str, float] | None:
        """Weight of each known function that f(u)/u is the sum of, where the curve is f'; None if it is none."""
        if set(self.shares) & set(ESTIMATES) or not self.shares:
            return None
        if not self.has_edges:
            return {"k3" if name == "reverse-kl" else EXCESS + name: w for name, w in self.shares.items()}
        weight = self.shares.get("reverse-kl", 0.0)
        is_huber = len(self.shares) == 1 and weight and self.low == -(self.high or 0.0) and self.below != 0
        return {f"{EXCESS}huber({short_number(self.high or 0.0)})": weight} if is_huber else None

    @property
    def scale(self) -> float:
        """The derivative at the reference, by which the loss multiplies β there; inf where it jumps."""
        if set(self.shares) & {"total-variation"}:
            return math.inf
        step = torch.tensor([-1e-4, 1e-4], dtype=torch.float64)
        down, up = self(step)
        return round_short(float(up - down) / 2e-4, 1e-6)

    def times(self, factor: float) -> "Curve":
        """The curve multiplied by a factor."""
        if factor == 1.0 or self.is_zero:
            return self
        read = self.read
        return replace(
            self,
            shares={name: round_short(w * factor) for name, w in self.shares.items()},
            points=(self.points[0], self.points[1] * factor),
            read=lambda x: read(x) * factor,
            below=self.below * factor,
            above=self.above * factor,
        )

    @property
    def convex(self) -> bool:
        """Whether the curve never falls, so that its divergence is convex."""
        values = self.points[1]
        return bool((values.diff() >= -1e-9 * values.abs().max()).all())


def read_curve(ask: Callable[[Tensor], Tensor], same: float = EXACT, likely: Sequence[str] = ()) -> Curve:
    """Name a function that can be read at any log-ratios and is 0 at 0.

    Args:
        ask: the function.
        same: relative difference of equal numbers.
        likely: the known functions whose sum is tried first.
    """
    known: dict[float, float] = {}

    def read(log_ratios: Tensor) -> Tensor:
        unknown = [x for x in dict.fromkeys(log_ratios.tolist()) if x not in known]
        if unknown:
            known.update(zip(unknown, ask(torch.tensor(unknown, dtype=torch.float64)).tolist(), strict=True))
        return torch.tensor([known[x] for x in log_ratios.tolist()], dtype=torch.float64)

    values = read(GRID)
    if not bool(torch.isfinite(values).all()) or bool((values == 0).all()):
        return Curve({}, (GRID, values), read)
    shares = fit(GRID, values, same, likely)
    if shares is not None:
        return Curve(shares, (GRID, values), read)
    flat = FLAT if same < SINGLE else FLAT_SINGLE
    low, below = _find_edge(read, GRID, values, flat)
    high, above = _find_edge(read, GRID.flip(0), values.flip(0), flat)
    inside = ((-math.inf if low is None else low) < GRID) & ((math.inf if high is None else high) > GRID)
    shares = fit(GRID[inside], values[inside], same) if int(inside.sum()) > 6 else None
    if shares:  # a function that only tends to its limit is not cut off
        ends = sum(w * function_of(name)(GRID[[0, -1]]) for name, w in shares.items())
        assert isinstance(ends, Tensor)
        low = None if abs(float(ends[0]) - below) <= same * (1 + abs(below)) else low
        high = None if abs(float(ends[1]) - above) <= same * (1 + abs(above)) else high
    return Curve(shares or {}, (GRID, values), read, low, high, below, above)


def _find_edge(read: Callable[[Tensor], Tensor], at: Tensor, values: Tensor, flat: float) -> tuple[float | None, float]:
    """Where the constant part at the first end of a curve ends, by bisection; None if it has none."""
    level = float(values[0])
    is_level = lambda v: abs(v - level) <= flat * (1 + abs(level))
    other = next((i for i, v in enumerate(values.tolist()) if not is_level(v)), None)
    if other is None or other < 2:
        return None, 0.0
    edge = bisect(lambda x: (read(x) - level).abs() <= flat * (1 + abs(level)), float(at[other - 1]), float(at[other]))
    towards = 1.0 if at[other] > at[other - 1] else -1.0
    inside = edge + towards * torch.tensor([0.25, 0.5], dtype=torch.float64)
    if all(is_level(level + (v - level) / 100) for v in read(inside).tolist()):
        return None, 0.0  # it only tends to its limit
    return (round_short(edge) if abs(edge) > EXACT else 0.0), level


def bisect(holds: Callable[[Tensor], Tensor], inside: float, outside: float, at_once: int = 32) -> float:
    """The last point, from `inside` to `outside`, at which a condition holds; some points are asked for at once."""
    for _ in range(math.ceil(46 / math.log2(at_once + 1))):
        points = torch.linspace(inside, outside, at_once + 2, dtype=torch.float64)
        failed = (~holds(points[1:-1])).nonzero()
        first = int(failed[0]) + 1 if len(failed) else len(points) - 1
        inside, outside = float(points[first - 1]), float(points[first])
    return inside


def fit(x: Tensor, y: Tensor, same: float, likely: Sequence[str] = ()) -> dict[str, float] | None:
    """The known function, or the sum of two, that these points lie on."""
    choices = [tuple(likely)] * bool(likely) + [(name,) for name in (*NAMED, *ESTIMATES)] + list(SUMS)
    for names in (*choices, *((name,) for name in _one_parameter(x, y))):
        shares = _weigh(x, y, {name: function_of(name)(x) for name in names}, same)
        if shares:
            return shares
    return None


def _one_parameter(x: Tensor, y: Tensor) -> list[str]:
    """The α- and the Jensen-Shannon divergence through two of the points, one on each side of 0."""
    names = []
    here, there = (int((x - at).abs().argmin()) for at in (1.0, -1.0))
    if bool(x[here] == -x[there]) and float(y[here] * y[there]) < 0:
        ratio = float(-y[there] / y[here])
        # Of the α-divergence, -c(-x)/c(x) is exp((1 - α) x).
        names.append(f"alpha({round_short(1 - math.log(ratio) / float(x[here])):.12g})")
        low, high = 1e-6, 1 - 1e-6
        for _ in range(60):  # of Jensen-Shannon the ratio falls as β rises
            middle = (low + high) / 2
            down, up = jensen_shannon(middle).slope(torch.stack([x[there], x[here]]))
            low, high = (middle, high) if float(-down / up) > ratio else (low, middle)
        names.append(f"jensen-shannon({round_short(low):.12g})")
    return names


def _weigh(x: Tensor, y: Tensor, functions: dict[str, Tensor], same: float) -> dict[str, float] | None:
    near = x.abs() <= 4
    if int(near.sum()) <= len(functions):
        near = torch.ones_like(near)
    table = torch.stack(list(functions.values()), -1)
    weights = torch.linalg.lstsq(table[near], y[near, None]).solution[:, 0]
    # exp cancels against exp in some losses: what is left has the rounding of the exponential.
    allowed = same * (1 + y.abs()) + 1e-5 * same * x.abs().exp() * y.abs().clamp(min=1e-3).max().clamp(max=1)
    # The factor MAX_EXPONENT of our exponentials saturates others' do not: compare up to 29.
    wrong = ((table @ weights - y).abs() > allowed) & (x.abs() < REACH - 0.5)
    if bool(wrong.any()) or bool((weights.abs() <= same).any()):
        return None
    return {name: round_short(float(w), same) for name, w in zip(functions, weights, strict=True)}


def round_short(x: float, same: float = EXACT) -> float:
    """The nearest number of few digits, if it is that up to rounding."""
    for digits in (6, 9):
        short = float(f"{x:.{digits}g}")
        if abs(short - x) <= same * max(abs(x), 1e-3):
            return short
    return x
