"""Causes that are in how the sampler draws: a filter of the vocabulary, a temperature."""

from dataclasses import dataclass

import torch

from .case import Case, Cause
from .evidence import Line

ONE_SIGN = 0.01
"""A filter alone makes every token likelier: differences the other way, as a share, beyond which it is not alone."""

IN_LINE = 0.97
"""Share of the differences between tokens after one prompt that a temperature alone puts in line with the log-prob."""

ROUNDED = 1e-4
"""Share of the mean square difference between tokens after one prompt that may be rounding."""

TOO_LOW = 0.7
"""Temperature below which a mean of ratios depends on tokens that are too rare to be drawn."""

LEAST = 0.02
"""A change of the power 1/T that is worth naming."""

WELL = 1.25
"""Ratio of the highest to the lowest possible temperature, up to which one value is named."""

MOSTLY = 0.02
"""Share of the sum of squared differences that may be beyond a temperature's limits where there is more than that."""

ALL = "whether that is all"


def filtered(e: Case) -> Cause | None:
    """Top-p, top-k, min-p: the trainer's mass on what the sampler could draw is below 1."""
    mean, error = e.evidence.mass_kept()
    ratio = torch.exp(-e.d)
    rare = float(ratio.topk(max(1, len(ratio) // 1000)).values.sum() / ratio.sum())
    # A heavy tail of ratios has a sample mean below 1, too, for its rarest are not in the sample.
    if not (mean < 0.998 and mean + 5 * error < 1 and rare < 0.02):
        return None
    back = e.back
    one_sign = back < ONE_SIGN
    if _is_low(e):
        return None
    alone = (None if e.line is None else _of_contexts_alone(e.line)) if one_sign else False
    says = (
        f"The sampler drew from a part of the vocabulary that holds {mean:.1%} ± {error:.1%} of the trainer's mass "
        "(the mean ratio, which would be 1). That is top-p, top-k or min-p."
    )
    least = float(e.d.quantile(0.999).neg().exp())
    if one_sign:
        says += f" Hardly a token is less likely to it than to the trainer, or likelier by more than 1/{least:.2f}."
    return Cause(
        "filter",
        says + {True: "", False: f" {_rest(e, back)}", None: f" {e.ask(ALL)}"}[alone],
        "Switch top-p, top-k and min-p off while sampling, or replay the same mask in the trainer.",
        alone,
        {"mass_kept": mean, "mass_kept/standard_error": error, "least_mass_kept": least, "share_the_other_way": back},
    )


def _is_low(e: Case) -> bool:
    """A low temperature alone explains the data, and a filter alone does not."""
    found = e.temperatures
    return found.holds and found.one_sided and (found.low * found.high) ** 0.5 < TOO_LOW


def _of_contexts_alone(found: Line) -> bool:
    """Whether all tokens after one prompt differ alike, as a filter makes them, but for a little noise."""
    return found.within < 0.05 and not (found.within > ROUNDED and found.along > IN_LINE)


def _rest(e: Case, back: float) -> str:
    """Why a filter is not all."""
    if e.noise is not None and e.noise > 0.3:
        return "There is noise beside it: the same first token after the same prompt gets several log-probs."
    if e.line is not None and e.line.along > IN_LINE:
        return "But tokens after one prompt differ, in line with their log-probs: there is a temperature beside it."
    return f"But differences the other way are {back:.1%} as large, which a filter does not make."


@dataclass(frozen=True)
class _Value:
    """A temperature and the range it is known to."""

    t: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether it is known well enough to be acted upon."""
        return self.high <= WELL * self.low

    def __str__(self) -> str:
        low, value, high = (f"{t:.2f}" for t in (self.low, self.t, self.high))
        if not self.known:
            return f"{low} to {high}"
        return f"about {value}" + (f" ({low} to {high})" if low != high else "")


def tempered(e: Case) -> Cause | None:
    """Another temperature: within the limits that it sets to every token, or in line after every prompt."""
    found, line = e.temperatures, e.line
    in_line = line is not None and line.along > IN_LINE and line.within > ROUNDED and abs(line.slope) >= LEAST
    mean = _by_mean(e)
    if in_line and line is not None and found.holds and found.contains(1 / (1 + line.slope)):
        value = _by_line(line)
    elif found.holds and found.one_sided and found.tested:
        value = _by_limits(e, mean)
    elif mean is not None and found.beyond <= MOSTLY:
        value = mean
    else:
        return None
    alone = None if line is None else in_line and found.holds
    return _named(e, value, alone)


def _named(e: Case, value: _Value, alone: bool | None) -> Cause:
    explained, follows = 1 - e.temperatures.beyond, float(torch.corrcoef(torch.stack([e.x, e.d]))[0, 1])
    lines = {
        True: "Of tokens after one prompt the differences are in line with the log-probs.",
        False: "But of tokens after one prompt the differences are not in line with the log-probs: there is more, and "
        "the number is not to be trusted.",
        None: e.ask(ALL),
    }
    rare = " A filter beside so low a temperature would not show." if alone and value.t < TOO_LOW else ""
    return Cause(
        "temperature",
        f"The sampler's temperature is {value} times the trainer's: {explained:.1%} of the squared differences "
        f"are within the limits that a temperature sets to every token. {lines[alone]}{rare}",
        f"Divide the trainer's logits by {value.t:.2f} too, those of ref alike, or sample at the trainer's temperature."
        if alone is not False and value.known
        else "Compare the temperatures of sampler and trainer; ref takes the same.",
        alone,
        {
            "temperature_ratio": value.t,
            "temperature_ratio/low": value.low,
            "temperature_ratio/high": value.high,
            "share_explained": explained,
            "correlation": follows,
        },
    )


def _by_line(line: Line) -> _Value:
    """The slope after one prompt, with two standard errors."""
    return _value(line.slope, 2 * line.error)


def _value(slope: float, error: float) -> _Value:
    a = 1 + slope
    return _Value(1 / a, 1 / (a + error), 1 / max(a - error, 0.1))


def _by_limits(e: Case, mean: _Value | None) -> _Value:
    """The range that the limits leave; in it the mean's value, else the limit next to 1, which is the sharper one."""
    found = e.temperatures
    inside = mean is not None and found.contains(mean.t)
    t = mean.t if mean is not None and inside else (found.high if found.high < 1 else found.low)
    return _Value(min(max(t, found.low), found.high), found.low, found.high)


def _by_mean(e: Case) -> _Value | None:
    """The power from E[(exp(-d) - 1) d] = (a - 1) E[(exp(-d) - 1) x], if the differences follow the log-prob.

    exp(-d) - 1 has mean 0 in every context, so that it is uncorrelated with anything of the context alone. Noise in the
    trainer's log-probs gives a = 0, noise in the sampler's any power far from 1: both are left out.
    """
    centred = torch.expm1(-e.d)
    weight = centred * e.x
    total = float(weight.sum())
    if not total:
        return None
    slope = float((centred * e.d).sum()) / total
    follows = float(torch.corrcoef(torch.stack([e.x, e.d]))[0, 1]) * (1 if slope > 0 else -1)
    error = float((centred * e.d - slope * weight).square().sum()) ** 0.5 / abs(total)
    if not (-0.7 <= slope <= 0.8 and abs(slope) >= max(LEAST, 4 * error) and follows >= 0.5):
        return None
    return _value(slope, 2 * error)
