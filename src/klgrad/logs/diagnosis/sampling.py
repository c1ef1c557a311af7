"""Causes in the way the sampler draws: a filter of the vocabulary, or a temperature."""

from dataclasses import dataclass

import torch

from .case import Case, Cause
from .evidence import Line

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


def filtered(case: Case) -> Cause | None:
    """Top-p, top-k or min-p: the trainer's probability of the tokens that the sampler could draw is below 1."""
    mean, error = case.evidence.mass_kept()
    ratio = torch.exp(-case.d)
    rare = float(ratio.topk(max(1, len(ratio) // 1000)).values.sum() / ratio.sum())
    # A heavy tail of ratios also has a sample mean below 1, since the sample lacks its rarest tokens.
    if not (mean < 0.998 and mean + 5 * error < 1 and rare < 0.02):
        return None
    opposite = case.opposite_share
    one_sign = opposite < ONE_SIGN
    if _is_low(case):
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
        text + {True: "", False: f" {_rest(case, opposite)}", None: f" {case.missing_data(ALL)}"}[alone],
        "Turn top-p, top-k and min-p off while sampling, or apply the same mask in the trainer.",
        alone,
        {
            "mass_kept": mean,
            "mass_kept/standard_error": error,
            "least_mass_kept": least,
            "share_the_other_way": opposite,
        },
    )


def _is_low(case: Case) -> bool:
    """Whether a low temperature explains the data, so that no filter is needed to explain them."""
    found = case.temperatures
    return found.holds and found.one_sided and (found.low * found.high) ** 0.5 < TOO_LOW


def _of_contexts_alone(found: Line) -> bool:
    """Whether all tokens after one prompt have the same difference, as with a filter, except for a little noise."""
    return found.within < 0.05 and not (found.within > ROUNDED and found.along > IN_LINE)


def _rest(case: Case, opposite: float) -> str:
    """Describe why a filter is not the only cause."""
    if case.noise is not None and case.noise > 0.3:
        return "There is also noise: the same first token after the same prompt gets several log-probs."
    if case.line is not None and case.line.along > IN_LINE:
        return "There is also a temperature: after one prompt, the differences are linear in the log-probs."
    return f"But the opposite differences are {opposite:.1%} as large, which a filter does not cause."


@dataclass(frozen=True)
class _Value:
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


def tempered(case: Case) -> Cause | None:
    """Another temperature: all tokens are within its limits, or differences are linear after every prompt."""
    found, line = case.temperatures, case.line
    in_line = line is not None and line.along > IN_LINE and line.within > ROUNDED and abs(line.slope) >= LEAST
    mean = _by_mean(case)
    if in_line and line is not None and found.holds and found.contains(1 / (1 + line.slope)):
        value = _by_line(line)
    elif found.holds and found.one_sided and found.tested:
        value = _by_limits(case, mean)
    elif mean is not None and found.beyond <= MOSTLY:
        value = mean
    else:
        return None
    alone = None if line is None else in_line and found.holds
    return _named(case, value, alone)


def _named(case: Case, value: _Value, alone: bool | None) -> Cause:
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


def _by_line(line: Line) -> _Value:
    """The temperature from the slope after one prompt, with two standard errors."""
    return _value(line.slope, 2 * line.error)


def _value(slope: float, error: float) -> _Value:
    a = 1 + slope
    return _Value(1 / a, 1 / (a + error), 1 / max(a - error, 0.1))


def _by_limits(case: Case, mean: _Value | None) -> _Value:
    """The range within the limits. The value is that of the mean if it is inside, else the limit nearest to 1.

    That limit is the sharper one of the two.
    """
    found = case.temperatures
    inside = mean is not None and found.contains(mean.t)
    t = mean.t if mean is not None and inside else (found.high if found.high < 1 else found.low)
    return _Value(min(max(t, found.low), found.high), found.low, found.high)


def _by_mean(case: Case) -> _Value | None:
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
    return _value(slope, 2 * error)
