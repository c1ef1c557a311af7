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
        self.lags, self.grouped = Lags(), False
        self._mass: RatioSums | None = None
        self._sample, self._first = StreamSample(SAMPLE), StreamSample(FIRST_TOKENS)

    def add(self, rollout: Rollout, group: Tensor | None) -> None:
        """Add a batch, with the trainer as π and the sampler as μ."""
        live = rollout.mask
        total = torch.where(live, token_ratio(rollout), 0).sum(-1, dtype=torch.float64)
        mass = RatioSums.of(total[None], rollout.lengths)
        self._mass = mass if self._mass is None else self._mass + mass
        self.lags.add(rollout.sampler_logp, rollout.logp, live)
        self._sample.add(torch.stack([rollout.logp[live], rollout.sampler_logp[live]]))
        if group is not None:
            self.grouped = True
            columns = (group, rollout.logp[:, 0], rollout.sampler_logp[:, 0])
            self._first.add(torch.stack([x[live[:, 0]].double() for x in columns]))

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Log-probs of trainer and sampler at a sample of the tokens, float64."""
        x, y = self._sample.values().double()
        return x, y

    def mass_kept(self) -> tuple[float, float]:
        """E_μ[π/μ] per token, and its standard error."""
        assert self._mass is not None  # there was a batch
        (ratio,) = self._mass.estimates()
        return float(ratio.mean), float(ratio.standard_error)

    def repeats(self) -> FirstTokenRepeats | None:
        """Repeats of first tokens; None without groups, or with too few repeats."""
        if not self.grouped:
            return None
        _, x, d, again = self._first_tokens()
        if int(again.sum()) < LEAST_REPEATS:
            return None
        noise = float((x[1:] - x[:-1])[again].square().mean().sqrt()) / 2**0.5
        off = float(d[1:][again].square().mean().sqrt())
        return FirstTokenRepeats(int(again.sum()), noise, off)

    def line(self) -> FirstTokenLine | None:
        """The regression within prompts; None without groups, or if too few prompts have two first tokens."""
        if not self.grouped:
            return None
        group, x, d, again = self._first_tokens()
        distinct = int(((group[1:] == group[:-1]) & ~again).sum())
        return _line(group, x, d, distinct) if distinct >= LEAST_DISTINCT else None

    def _first_tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Group, x and d, sorted by group and sampler's log-prob, and which token equals the one before it."""
        group, x, y = self._first.values()
        order = torch.argsort(y, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        group, x, y = group[order], x[order], y[order]
        return group, x, y - x, (group[1:] == group[:-1]) & (y[1:] == y[:-1])


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


@dataclass(frozen=True)
class Cause:
    """The likely cause of a mismatch.

    Attributes:
        name: `none`, `shift`, `rounding`, `filter`, `temperature`, `random trainer`, `systematic` or `unexplained`.
        description: one or two sentences with the statistics that show the cause.
        remedy: what to change; empty for `none`.
        alone: whether the cause explains the whole difference; None if the data are not sufficient to decide.
        statistics: the numbers in the description.
    """

    name: str
    description: str
    remedy: str = ""
    alone: bool | None = True
    statistics: dict[str, float] = field(default_factory=dict)


class MismatchCase:
    """The evidence, with the quantities that several checks use: x and y of some tokens, and d = y - x."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.x, self.y = evidence.tokens()
        self.d = self.y - self.x
        self.rms = float(self.d.square().mean().sqrt())
        self.repeats: FirstTokenRepeats | None = evidence.repeats()
        self.line: FirstTokenLine | None = evidence.line()

    @cached_property
    def temperatures(self) -> TemperatureRange:
        """The temperatures that are possible for all of the tokens."""
        return possible_temperatures(self.x, self.y)

    @property
    def opposite_share(self) -> float:
        """Differences that make a token less likely under the sampler, relative to the others: 0 for a filter."""
        return float((-self.d).clamp(min=0).mean() / self.d.clamp(min=0).mean().clamp(min=1e-12))

    @property
    def noise(self) -> float | None:
        """Share of the difference, as a root mean square, that varies between repeats; None if not known."""
        return None if self.repeats is None else self.repeats.noise / max(self.repeats.off, 1e-12)

    def missing_data(self, what: str) -> str:
        """Describe the data that would be needed to decide `what`."""
        if not self.evidence.grouped:
            return f"A `group` column would show {what}."
        return f"The prompts in the `group` column have too few first tokens in common to show {what}."


# Causes in the way the sampler draws: a filter of the vocabulary, or a temperature.

ONE_SIGN = 0.01
"""A filter alone makes every token more likely. If the share of opposite differences is larger than this, there is
another cause."""

IN_LINE = 0.97
"""A temperature alone makes at least this share of the differences between tokens after one prompt linear in the
log-prob."""

ROUNDED = 1e-4
"""Share of the mean square difference between tokens after one prompt that may be rounding."""

TOO_LOW = 0.7
"""Temperature below which a mean of ratios depends on tokens that are too rare to be drawn."""

LEAST = 0.02
"""Smallest change of the power 1/T that is reported."""

WELL = 1.25
"""Ratio of the highest to the lowest possible temperature, up to which a single value is reported."""

MOSTLY = 0.02
"""Share of the sum of squared differences that may be beyond a temperature's limits if there are other causes too."""

ALL = "whether this is the only cause"


def find_filter(case: MismatchCase) -> Cause | None:
    """Top-p, top-k or min-p: the trainer's probability of the tokens that the sampler could draw is below 1."""
    mean, error = case.evidence.mass_kept()
    ratio = torch.exp(-case.d)
    rare = float(ratio.topk(max(1, len(ratio) // 1000)).values.sum() / ratio.sum())
    # A heavy tail of ratios also has a sample mean below 1, since the sample lacks its rarest tokens.
    if not (mean < 0.998 and mean + 5 * error < 1 and rare < 0.02):
        return None
    opposite = case.opposite_share
    one_sign = opposite < ONE_SIGN
    at = case.temperatures
    if at.holds and at.one_sided and (at.low * at.high) ** 0.5 < TOO_LOW:  # a low temperature explains the data too
        return None
    alone = (None if case.line is None else _of_contexts_alone(case.line)) if one_sign else False
    text = (
        f"The sampler drew from a part of the vocabulary that has {mean:.1%} ± {error:.1%} of the trainer's "
        "probability (the mean ratio, which would be 1). The reason is top-p, top-k or min-p."
    )
    least = float(case.d.quantile(0.999).neg().exp())
    if one_sign:
        text += (
            " Almost no token is less likely under the sampler than under the trainer, or more likely by more than "
            f"1/{least:.2f}."
        )
    return Cause(
        "filter",
        text + {True: "", False: f" {_name_other_cause(case, opposite)}", None: f" {case.missing_data(ALL)}"}[alone],
        "Turn top-p, top-k and min-p off while sampling, or apply the same mask in the trainer.",
        alone,
        {
            "mass_kept": mean,
            "mass_kept/standard_error": error,
            "least_mass_kept": least,
            "share_the_other_way": opposite,
        },
    )


def _of_contexts_alone(line: FirstTokenLine) -> bool:
    """Whether all tokens after one prompt have the same difference, as with a filter, except for a little noise."""
    return line.within < 0.05 and not (line.within > ROUNDED and line.along > IN_LINE)


def _name_other_cause(case: MismatchCase, opposite: float) -> str:
    """Describe why a filter is not the only cause."""
    if case.noise is not None and case.noise > 0.3:
        return "There is also noise: the same first token after the same prompt gets several log-probs."
    if case.line is not None and case.line.along > IN_LINE:
        return "There is also a temperature: after one prompt, the differences are linear in the log-probs."
    return f"But the opposite differences are {opposite:.1%} as large, which a filter does not cause."


@dataclass(frozen=True)
class _Temperature:
    """A temperature, and the range of its possible values."""

    t: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether the range is narrow enough for a single value."""
        return self.high <= WELL * self.low

    def __str__(self) -> str:
        low, value, high = (f"{t:.2f}" for t in (self.low, self.t, self.high))
        if not self.known:
            return f"{low} to {high}"
        return f"about {value}" + (f" ({low} to {high})" if low != high else "")


def find_temperature(case: MismatchCase) -> Cause | None:
    """Another temperature: all tokens are within its limits, or differences are linear after every prompt."""
    temperatures, line = case.temperatures, case.line
    in_line = line is not None and line.along > IN_LINE and line.within > ROUNDED and abs(line.slope) >= LEAST
    mean = _by_mean(case)
    if in_line and line is not None and temperatures.holds and temperatures.contains(1 / (1 + line.slope)):
        value = _by_slope(line.slope, line.error)
    elif temperatures.holds and temperatures.one_sided and temperatures.tested:
        value = _by_limits(case, mean)
    elif mean is not None and temperatures.beyond <= MOSTLY:
        value = mean
    else:
        return None
    alone = None if line is None else in_line and temperatures.holds
    return _name_temperature(case, value, alone)


def _name_temperature(case: MismatchCase, value: _Temperature, alone: bool | None) -> Cause:
    explained, correlation = 1 - case.temperatures.beyond, float(torch.corrcoef(torch.stack([case.x, case.d]))[0, 1])
    lines = {
        True: "After one prompt, the differences are linear in the log-probs.",
        False: "But after one prompt, the differences are not linear in the log-probs: there is another cause, and the "
        "value is not reliable.",
        None: case.missing_data(ALL),
    }
    rare = " At so low a temperature, an additional filter would not be visible." if alone and value.t < TOO_LOW else ""
    return Cause(
        "temperature",
        f"The sampler's temperature is {value} times the trainer's: {explained:.1%} of the squared differences "
        f"are within the limits that a temperature sets for every token. {lines[alone]}{rare}",
        f"Divide the logits of trainer and ref by {value.t:.2f} too, or sample at the trainer's temperature."
        if alone is not False and value.known
        else "Compare the temperatures of sampler and trainer; ref needs the same temperature.",
        alone,
        {
            "temperature_ratio": value.t,
            "temperature_ratio/low": value.low,
            "temperature_ratio/high": value.high,
            "share_explained": explained,
            "correlation": correlation,
        },
    )


def _by_slope(slope: float, error: float) -> _Temperature:
    """The temperature from the slope of d against x, with two standard errors."""
    a = 1 + slope
    return _Temperature(1 / a, 1 / (a + 2 * error), 1 / max(a - 2 * error, 0.1))


def _by_limits(case: MismatchCase, mean: _Temperature | None) -> _Temperature:
    """The range within the limits. The value is that of the mean if it is inside, else the limit nearest to 1.

    That limit is the sharper one of the two.
    """
    temperatures = case.temperatures
    inside = mean is not None and temperatures.contains(mean.t)
    t = mean.t if mean is not None and inside else (temperatures.high if temperatures.high < 1 else temperatures.low)
    return _Temperature(min(max(t, temperatures.low), temperatures.high), temperatures.low, temperatures.high)


def _by_mean(case: MismatchCase) -> _Temperature | None:
    """The power from E[(exp(-d) - 1) d] = (a - 1) E[(exp(-d) - 1) x], if d is correlated with x.

    exp(-d) - 1 has mean 0 in every context, so it is uncorrelated with every function of the context alone. Noise in
    the trainer's log-probs gives a = 0, noise in the sampler's gives powers far from 1: both are excluded.
    """
    centred = torch.expm1(-case.d)
    weight = centred * case.x
    total = float(weight.sum())
    if not total:
        return None
    slope = float((centred * case.d).sum()) / total
    correlation = float(torch.corrcoef(torch.stack([case.x, case.d]))[0, 1]) * (1 if slope > 0 else -1)
    error = float((centred * case.d - slope * weight).square().sum()) ** 0.5 / abs(total)
    if not (-0.7 <= slope <= 0.8 and abs(slope) >= max(LEAST, 4 * error) and correlation >= 0.5):
        return None
    return _by_slope(slope, error)


# Find the likely cause of a mismatch of trainer and sampler, and whether it is the only one.

HALF = 0.05
"""Largest root mean square of d that kernels and logits in half precision can cause."""

NOT_IN_LINE = 0.9
"""If a smaller share of the differences between tokens after one prompt is linear in the log-prob, a temperature is
excluded."""


def cause_of(evidence: Evidence) -> Cause:
    """The first cause, in a fixed order of checks, that the data show: `none` or `unexplained` if no check does."""
    case = MismatchCase(evidence)
    checks = (
        *(lambda case: _find_agreement(case, AGREE / 100, "agree"), _find_shift, _find_rounding, _find_agreement),
        *(find_filter, find_temperature),
        lambda case: _find_rounding(case, everything=False) if case.rms < HALF else None,
        _find_randomness,
    )
    return next((cause for check in checks if (cause := check(case)) is not None), None) or _describe_rest(case)


def _find_agreement(case: MismatchCase, most: float = AGREE, how: str = "agree to rounding") -> Cause | None:
    if case.rms > most:
        return None
    text = f"Trainer and sampler {how} (root mean square difference {case.rms:.2g})."
    return Cause("none", text, statistics={"rms": case.rms})


def _find_shift(case: MismatchCase) -> Cause | None:
    lags = case.evidence.lags
    shift = lags.shift()
    if not shift:
        return None
    where, left = "next" if shift > 0 else "previous", lags.rms(shift)
    alone = left <= AGREE
    return Cause(
        "shift",
        f"The sampler's log-prob of a token equals the trainer's log-prob of the {where} one: the root mean square "
        f"difference is {left:.3g} if one column is moved by one token, and {lags.rms(0):.3g} as logged."
        + ("" if alone else " The remaining difference has another cause, which is not examined here."),
        "Align the columns: the logits at position t - 1 score token t.",
        alone,
        {"shift": shift, "rms": lags.rms(0), "rms_shifted": left},
    )


STEPS = {"bf16": (torch.bfloat16, 2**-8), "fp16": (torch.float16, 2**-11)}
"""Half-precision formats, with half their relative spacing: the largest relative change by rounding."""


def _find_rounding(case: MismatchCase, *, everything: bool = True) -> Cause | None:
    """Whether one side's log-probs are numbers of a half-precision format.

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
            more = "" if everything else " Logits in half precision, which change a log-prob more, may be the rest."
            return Cause(
                "rounding",
                f"The {side}'s log-probs are rounded to {name}: {exact:.1%} of them are {name} numbers, and "
                f"{within:.1%} of the differences are within its rounding (root mean square {case.rms:.2g}).{more}",
                f"Compute the head and log-softmax in float32, and store the {side}'s log-probs in float32.",
                True if everything else None,
                {"share_representable": exact, "share_within_rounding": within, "rms": case.rms},
            )
    return None


def _find_randomness(case: MismatchCase) -> Cause | None:
    """Compare repeats of the same first token after the same prompt."""
    repeats = case.repeats
    if repeats is None or case.noise is None or repeats.off <= AGREE:
        return None
    statistics = {
        "repeats": float(repeats.pairs),
        "rms_of_repeats": repeats.noise,
        "rms_at_repeats": repeats.off,
        "rms": case.rms,
    }
    again = f"{repeats.pairs} times, the same first token after the same prompt got"
    if case.noise > 0.5:
        alone = case.noise > 0.85
        return Cause(
            "random trainer",
            f"The trainer is random: {again} another log-prob (spread {repeats.noise:.2g}, of a difference of "
            f"{repeats.off:.2g}). The reason is dropout, or kernels that depend on the batch."
            + ("" if alone else " This is not the only cause: a part of the difference is the same every time."),
            "Score in evaluation mode (`model.eval()`), with dropout 0 in the configuration.",
            alone,
            statistics,
        )
    in_doubt = case.temperatures.holds and (case.line is None or case.line.along > NOT_IN_LINE)
    if in_doubt or case.opposite_share < ONE_SIGN:  # a temperature or a filter; stale weights would then be a guess
        return None
    alone = case.noise < 0.1
    return Cause(
        "systematic",
        f"The difference is {'not' if alone else 'not only'} noise: {again} {'' if alone else 'nearly '}the same "
        f"log-prob from the trainer (spread {repeats.noise:.2g}), which differs from the sampler's by "
        f"{repeats.off:.2g}.",
        "Look for stale weights in the sampler, another prompt template, or a penalty in the sampler.",
        alone,
        statistics,
    )


def _describe_rest(case: MismatchCase) -> Cause:
    noise = case.rms < HALF
    size = "as half-precision kernels can cause" if noise else "more than half-precision kernels cause"
    hint = "" if case.repeats is not None else " " + case.missing_data("whether it is noise (dropout) or systematic")
    temperatures = case.temperatures
    if not noise and temperatures.holds and temperatures.one_sided:
        hint = (
            f" A temperature of {temperatures.low:.2g} to {temperatures.high:.2g} times the trainer's could cause it, "
            f"and so could other weights: these data cannot distinguish the two.{hint}"
        )
    return Cause(
        "unexplained",
        f"The root mean square difference is {case.rms:.2g}, {size}; the data show no shift, filter, temperature or "
        f"rounding that alone would cause it.{hint}",
        "Compute the head and log-softmax in float32 on both sides."
        if noise
        else "Check dropout (`model.eval()`), that the sampler has the trainer's weights, and its temperature.",
        None,
        {"rms": case.rms, "mean_over_rms": float(case.d.mean()) / case.rms},
    )
