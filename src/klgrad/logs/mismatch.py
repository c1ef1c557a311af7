"""Why trainer and sampler may disagree: evidence from a log, and the causes that fit it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..core.importance import token_ratio
from ..core.result import RatioSums
from ..core.rollout import Rollout
from ..reports import StreamSample

# The statistics from which the cause of a mismatch of trainer and sampler is found, summed over batches.
#
# With x = log π(y_t) of the trainer, y = log μ(y_t) of the sampler and d = y - x, over tokens that μ sampled:
#
# - E_μ[exp(-d)] is the trainer's probability of all tokens that the sampler could draw. It is 1, and less with a top-p
#   or top-k filter.
# - μ ∝ π^a, a temperature of 1/a, is described in `temperature`.
# - After one prompt the same first token has always the same log-prob, unless the trainer is random. Between different
#   first tokens, d is equal if a filter is the cause, and linear in x with slope a - 1 if a temperature is the cause.

SAMPLE = 2**18
"""Number of tokens that are kept for the checks of causes."""

FIRST_TOKENS = 2**18
"""Number of completions whose first tokens are compared with each other."""

LEAST_REPEATS = 20
"""Smallest number of pairs of the same first token from which a conclusion is drawn."""

LEAST_DISTINCT = 6
"""Smallest number of different first tokens after the same prompt from which a conclusion is drawn: six random
differences are this linear (0.97 of their squares) once in 20,000 times."""


class Lags:
    """Mean square difference of two columns, as they are and with the second moved by one token."""

    def __init__(self) -> None:
        self.sums = {lag: torch.zeros(2, dtype=torch.float64) for lag in (-1, 0, 1)}

    def add(self, a: Tensor, b: Tensor, mask: Tensor) -> None:
        """Add (B, T) columns whose live tokens come first. At lag k, a_t is compared with b_{t+k}."""
        for lag, sums in self.sums.items():
            here, there = a[:, max(0, -lag) : a.shape[1] - max(0, lag)], b[:, max(0, lag) : b.shape[1] - max(0, -lag)]
            both = mask[:, abs(lag) :]
            off = torch.where(both, here - there, 0)
            sums += torch.stack([both.sum(dtype=torch.float64), off.square().sum(dtype=torch.float64)])

    def rms(self, lag: int) -> float:
        n, square = self.sums[lag].tolist()
        return (square / n) ** 0.5 if n else float("inf")

    def shift(self) -> int:
        """The lag at which the columns agree far better than unmoved, or 0."""
        best = min((-1, 1), key=self.rms)
        return best if self.rms(0) > 0.05 and self.rms(best) < 0.4 * self.rms(0) else 0


@dataclass(frozen=True)
class FirstTokenRepeats:
    """Repeats of the same first token after the same prompt: pairs with bit-equal log-probs of the sampler.

    Root mean squares over these: `noise`, by which the trainer's log-prob varies, and `off`, its distance to the
    sampler.
    """

    pairs: int
    noise: float
    off: float


@dataclass(frozen=True)
class FirstTokenLine:
    """The regression of d on x over different first tokens after the same prompt: one context, several tokens.

    `within` is the share of the mean square of d within contexts, 0 for a filter; `along` the share of it that is
    linear in the log-prob, 1 for a temperature; `slope` is that of the line, with its standard `error`.
    """

    within: float
    along: float
    slope: float
    error: float


class Evidence:
    """Sums over batches of the log-probs of trainer and sampler."""

    def __init__(self) -> None:
        self.lags = Lags()
        self._mass: RatioSums | None = None
        self.sample, self.first_tokens = StreamSample(SAMPLE), StreamSample(FIRST_TOKENS)
        """Log-probs of trainer and sampler at a sample of the tokens; and group and both of first tokens."""

    def add(self, rollout: Rollout, group: Tensor | None) -> None:
        """Add a batch, with the trainer as π and the sampler as μ."""
        live = rollout.mask
        total = torch.where(live, token_ratio(rollout), 0).sum(-1, dtype=torch.float64)
        mass = RatioSums.of(total[None], rollout.lengths)
        self._mass = mass if self._mass is None else self._mass + mass
        self.lags.add(rollout.sampler_logp, rollout.logp, live)
        self.sample.add(torch.stack([rollout.logp[live], rollout.sampler_logp[live]]))
        if group is not None:
            columns = (group, rollout.logp[:, 0], rollout.sampler_logp[:, 0])
            self.first_tokens.add(torch.stack([x[live[:, 0]].double() for x in columns]))

    def mass_kept(self) -> tuple[float, float]:
        """E_μ[π/μ] per token, and its standard error."""
        assert self._mass is not None  # there was a batch
        (ratio,) = self._mass.estimates()
        return float(ratio.mean), float(ratio.standard_error)


def compare_first_tokens(tokens: StreamSample) -> tuple[FirstTokenRepeats | None, FirstTokenLine | None]:
    """The repeats of first tokens and the regression within prompts; None of what there is too little of."""
    if not tokens.seen:
        return None, None
    group, x, y = tokens.values()
    order = torch.argsort(y, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    group, x, y = group[order], x[order], y[order]
    d, same_prompt = y - x, group[1:] == group[:-1]
    again = same_prompt & (y[1:] == y[:-1])
    pairs, distinct = int(again.sum()), int((same_prompt & ~again).sum())
    noise = float((x[1:] - x[:-1])[again].square().mean().sqrt()) / 2**0.5
    off = float(d[1:][again].square().mean().sqrt())
    return (
        FirstTokenRepeats(pairs, noise, off) if pairs >= LEAST_REPEATS else None,
        _line(group, x, d, distinct) if distinct >= LEAST_DISTINCT else None,
    )


def _line(group: Tensor, x: Tensor, d: Tensor, distinct: int) -> FirstTokenLine:
    """The regression of d on x within groups; its degrees of freedom count distinct tokens only."""
    _, index, size = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
    inner_x, inner_d = (
        v - (torch.zeros_like(size, dtype=v.dtype).index_add_(0, index, v) / size)[index] for v in (x, d)
    )
    whole, xx, dd, xd = (float(v) for v in (d @ d, inner_x @ inner_x, inner_d @ inner_d, inner_x @ inner_d))
    if not whole or not xx or not dd:
        return FirstTokenLine(dd / whole if whole else 0.0, 0.0, 0.0, 0.0)
    left = max(dd - xd * xd / xx, 0.0)
    return FirstTokenLine(dd / whole, xd * xd / (xx * dd), xd / xx, (left / (distinct - 1) / xx) ** 0.5)


# The limits that a temperature sets for each token, in any context.
#
# If the sampler's distribution is the trainer's to the power a = 1/T, normalised, then with p and q the probabilities
# that trainer and sampler give the sampled token
#
#     logit q = a logit p + (a - 1) H,
#
# where H >= 0 is the Rényi entropy of order a of the other tokens. So at a temperature below 1 every token has logit q
# >= a logit p, and above 1 every token has logit q <= a logit p, in any context. A likely token limits a from one side,
# an unlikely token from the other. The limit is reached where two tokens have nearly all of the probability. These
# limits hold for every sample. In contrast, a mean of importance ratios depends, at a low temperature, on tokens that
# are never drawn.

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
class TemperatureRange:
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
        return self.low / STEP <= t <= self.high * STEP


def possible_temperatures(x: Tensor, y: Tensor) -> TemperatureRange:
    """The temperatures that are possible for log-probs x of the trainer and y of the sampler, in float64."""
    if len(x) > TOKENS:
        sample = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:TOKENS]
        x, y = x[sample], y[sample]
    x = x.clamp(max=0)  # a trainer's float32 may be above 0 by its rounding
    square = (y - x).square()
    whole = float(square.sum())
    logit = x - torch.log(-torch.expm1(x))  # infinite at probability 1, where it is used as such
    share = lambda t: _beyond(logit, y, 1 / t) / whole
    first, last = (round(math.log(t) / math.log(STEP)) for t in (LOWEST, HIGHEST))
    shares = {t: share(t) for t in (STEP**n for n in range(first, last + 1) if n)}  # without 1
    least = min(shares.values())
    most = max(2 * least, least + ROOM)
    possible = [t for t in shares if shares[t] <= most]
    low, high = (
        _end(lambda t: share(t) <= most, t, by) for t, by in ((min(possible), 1 / STEP), (max(possible), STEP))
    )
    one_sided = max(possible) < 1 / STEP or min(possible) > STEP
    tested = float(square[logit > 0].sum()) >= TESTED * whole
    return TemperatureRange(low, high, least, one_sided, tested)


def _end(is_possible: Callable[[float], bool], t: float, step: float) -> float:
    """The end of the range that is less than one step beyond a possible temperature, and not within the range."""
    beyond = t * step
    for _ in range(HALVINGS):
        middle = math.sqrt(t * beyond)
        t, beyond = (middle, beyond) if is_possible(middle) else (t, middle)
    return beyond


def _beyond(logit: Tensor, y: Tensor, a: float) -> float:
    """Sum of squares of how far the sampler's log-probs are beyond the limit."""
    limit = logsigmoid(a * logit)
    return float((limit - y if a > 1 else y - limit).clamp(min=0).square().sum())


# A mismatch of trainer and sampler, and the cause that explains it.

AGREE = 1e-3
"""Root mean square of d below which trainer and sampler agree: the size of differences between float32 kernels."""

HALF = 0.05
"""Largest root mean square of d that kernels and logits in half precision can cause."""

ONE_SIGN = 0.01
"""A filter alone makes every token more likely, and has no differences of the other sign."""

IN_LINE, NOT_IN_LINE = 0.97, 0.9
"""Share of the differences between tokens after one prompt that is linear in the log-prob: a temperature has at least
the first, and is excluded below the second."""

ROUNDED = 1e-4
"""Share of the mean square difference between tokens after one prompt that may be rounding."""

TOO_LOW = 0.7
"""Temperature below which a mean of ratios depends on tokens that are too rare to be drawn."""

LEAST = 0.02
"""Smallest change of the power 1/T that is reported."""

WELL = 1.25
"""Ratio of the highest to the lowest possible temperature, up to which a single value is reported."""

STEPS = {"bf16": (torch.bfloat16, 2**-8), "fp16": (torch.float16, 2**-11)}
"""Half-precision formats, with half their relative spacing: the largest relative change by rounding."""


@dataclass(frozen=True)
class Cause:
    """The likely cause of a mismatch. Others may be behind it: log again without it.

    Attributes:
        name: `none`, `shift`, `rounding`, `filter`, `temperature`, `random trainer`, `systematic` or `unexplained`.
        description: one or two sentences with the statistics that show the cause.
        remedy: what to change; empty for `none`.
        statistics: the numbers in the description.
    """

    name: str
    description: str
    remedy: str = ""
    statistics: dict[str, float] = field(default_factory=dict)


class MismatchCase:
    """The evidence, with the quantities that several checks use: x and y of some tokens, and d = y - x."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.x, self.y = evidence.sample.values().double()
        self.d = self.y - self.x
        self.rms = float(self.d.square().mean().sqrt())
        self.repeats, self.line = compare_first_tokens(evidence.first_tokens)

    @cached_property
    def temperatures(self) -> TemperatureRange:
        """The temperatures that are possible for all of the tokens."""
        return possible_temperatures(self.x, self.y)

    @property
    def opposite_share(self) -> float:
        """Differences that make a token less likely under the sampler, relative to the others: 0 for a filter."""
        return float((-self.d).clamp(min=0).mean() / self.d.clamp(min=0).mean().clamp(min=1e-12))


def cause_of(evidence: Evidence) -> Cause:
    """The first cause, in this order of checks, that the data show: `none` or `unexplained` if no check does."""
    case = MismatchCase(evidence)
    text = f"Trainer and sampler agree (root mean square difference {case.rms:.2g})."
    agree = Cause("none", text, statistics={"rms": case.rms})
    if case.rms <= AGREE / 100:
        return agree
    if (simple := find_shift(case) or find_rounding(case, everything=True)) or case.rms <= AGREE:
        return simple or agree
    return (
        find_filter(case)
        or find_temperature(case)
        or (find_rounding(case, everything=False) if case.rms < HALF else None)
        or find_randomness(case)
        or _describe_rest(case)
    )


def find_shift(case: MismatchCase) -> Cause | None:
    """A column that is moved by one token."""
    lags = case.evidence.lags
    shift = lags.shift()
    if not shift:
        return None
    where, left = "next" if shift > 0 else "previous", lags.rms(shift)
    return Cause(
        "shift",
        f"The sampler's log-prob of a token equals the trainer's log-prob of the {where} one: the root mean square "
        f"difference is {left:.3g} if one column is moved by one token, and {lags.rms(0):.3g} as logged.",
        "Align the columns: the logits at position t - 1 score token t.",
        {"shift": shift, "rms": lags.rms(0), "rms_shifted": left},
    )


def find_rounding(case: MismatchCase, *, everything: bool) -> Cause | None:
    """One side's log-probs are numbers of a half-precision format.

    With `everything`, almost all differences must also be within the rounding of that format.
    """
    for name, (dtype, step) in STEPS.items():
        small = case.d.abs() <= 1.01 * step * torch.maximum(case.x.abs(), case.y.abs()) + 1e-6
        within = float(small.double().mean())
        for side, values in (("sampler", case.y), ("trainer", case.x)):
            nonzero = values[values != 0]
            exact = float((nonzero.to(dtype).double() == nonzero).double().mean()) if len(nonzero) else 0.0
            if exact < 0.99 or (everything and within < 0.99):
                continue
            return Cause(
                "rounding",
                f"The {side}'s log-probs are rounded to {name}: {exact:.1%} of them are {name} numbers, and "
                f"{within:.1%} of the differences are within its rounding (root mean square {case.rms:.2g}). Logits in "
                "half precision change a log-prob more than that.",
                f"Compute the head and log-softmax in float32, and store the {side}'s log-probs in float32.",
                {"share_representable": exact, "share_within_rounding": within, "rms": case.rms},
            )
    return None


def find_filter(case: MismatchCase) -> Cause | None:
    """Top-p, top-k or min-p: the trainer's probability of the tokens that the sampler could draw is below 1."""
    mean, error = case.evidence.mass_kept()
    ratio = torch.exp(-case.d)
    rare = float(ratio.topk(max(1, len(ratio) // 1000)).values.sum() / ratio.sum())
    # A heavy tail of ratios also has a sample mean below 1, since the sample lacks its rarest tokens.
    if not (mean < 0.998 and mean + 5 * error < 1 and rare < 0.02):
        return None
    at = case.temperatures
    if at.holds and at.one_sided and (at.low * at.high) ** 0.5 < TOO_LOW:  # a low temperature explains the data too
        return None
    least = float(case.d.quantile(0.999).neg().exp())
    return Cause(
        "filter",
        f"The sampler drew from a part of the vocabulary that has {mean:.1%} ± {error:.1%} of the trainer's "
        "probability (the mean ratio, which would be 1). The reason is top-p, top-k or min-p. Almost no token is more "
        f"likely under the sampler by more than 1/{least:.2f}; differences of the other sign, which a filter does not "
        f"cause, are {case.opposite_share:.1%} as large.",
        "Turn top-p, top-k and min-p off while sampling, or apply the same mask in the trainer.",
        {
            "mass_kept": mean,
            "mass_kept/standard_error": error,
            "least_mass_kept": least,
            "share_the_other_way": case.opposite_share,
        },
    )


def find_temperature(case: MismatchCase) -> Cause | None:
    """Another temperature: all tokens are within its limits. After one prompt the differences show its value too."""
    at, line = case.temperatures, case.line
    if not at.holds:
        return None
    low, high = at.low, at.high
    in_line = line is not None and line.along > IN_LINE and line.within > ROUNDED and abs(line.slope) >= LEAST
    if in_line and line is not None and at.contains(1 / (1 + line.slope)):
        a = 1 + line.slope
        t, low, high = 1 / a, 1 / (a + 2 * line.error), 1 / max(a - 2 * line.error, 0.1)
    elif at.one_sided and at.tested:
        t = high if high < 1 else low  # the limit nearest to 1 is the sharper one
    else:
        return None
    known = high <= WELL * low
    span = f"{low:.2f} to {high:.2f}"
    value = f"about {t:.2f}" + (f" ({span})" if f"{low:.2f}" != f"{high:.2f}" else "") if known else span
    return Cause(
        "temperature",
        f"The sampler's temperature is {value} times the trainer's: {1 - at.beyond:.1%} of the squared differences "
        "are within the limits that a temperature sets for every token.",
        f"Divide the logits of trainer and ref by {t:.2f} too, or sample at the trainer's temperature."
        if known
        else "Compare the temperatures of sampler and trainer; ref needs the same temperature.",
        {
            "temperature_ratio": t,
            "temperature_ratio/low": low,
            "temperature_ratio/high": high,
            "share_explained": 1 - at.beyond,
        },
    )


def find_randomness(case: MismatchCase) -> Cause | None:
    """Repeats of the same first token after the same prompt: a random trainer, or a difference that is always there."""
    repeats = case.repeats
    if repeats is None or repeats.off <= AGREE:
        return None
    random = repeats.noise > 0.5 * repeats.off
    in_doubt = case.temperatures.holds and (case.line is None or case.line.along > NOT_IN_LINE)
    if not random and (in_doubt or case.opposite_share < ONE_SIGN):  # a temperature or a filter; this would be a guess
        return None
    again = (
        f"{repeats.pairs} times, the same first token after the same prompt got log-probs from the trainer with a "
        f"spread of {repeats.noise:.2g}, {repeats.off:.2g} away from the sampler's."
    )
    statistics = {
        "repeats": float(repeats.pairs),
        "rms_of_repeats": repeats.noise,
        "rms_at_repeats": repeats.off,
        "rms": case.rms,
    }
    if random:
        return Cause(
            "random trainer",
            f"The trainer is random: {again} The reason is dropout, or kernels that depend on the batch.",
            "Score in evaluation mode (`model.eval()`), with dropout 0 in the configuration.",
            statistics,
        )
    return Cause(
        "systematic",
        f"The difference is not only noise: {again}",
        "Look for stale weights in the sampler, another prompt template, or a penalty in the sampler.",
        statistics,
    )


def _describe_rest(case: MismatchCase) -> Cause:
    size = "as half-precision kernels can cause" if case.rms < HALF else "more than half-precision kernels cause"
    hint, at = "", case.temperatures
    if case.rms >= HALF and at.holds and at.one_sided:
        hint = (
            f" A temperature of {at.low:.2g} to {at.high:.2g} times the trainer's could cause it, and so could other "
            "weights: these data cannot distinguish the two."
        )
    if case.repeats is None:
        hint += " Several completions of one prompt (`group`) would show whether it is noise (dropout) or systematic."
    return Cause(
        "unexplained",
        f"The root mean square difference is {case.rms:.2g}, {size}; the data show no shift, filter, temperature or "
        f"rounding that alone would cause it.{hint}",
        "Compute the head and log-softmax in float32 on both sides. Check dropout (`model.eval()`), that the sampler "
        "has the trainer's weights, and its temperature.",
        {"rms": case.rms, "mean_over_rms": float(case.d.mean()) / case.rms},
    )
