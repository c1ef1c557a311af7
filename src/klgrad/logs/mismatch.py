r"""Trainer against sampler: how far they are apart, and the likely cause where the data shows one.

With x = log π(y_t) of the trainer, y = log μ(y_t) of the sampler and d = y - x, over tokens that μ sampled:

- E_μ[exp(-d)] is the trainer's mass on what the sampler could draw: 1, unless a top-p or top-k filter cut it.
- μ ∝ π^a gives d = (a - 1)(x + H) with a Rényi entropy H >= 0 of the context alone, so that exp(-d) - 1, which has
  mean 0 in every context, is uncorrelated with H: a - 1 = E[(exp(-d) - 1) d] / E[(exp(-d) - 1) x], whatever the
  contexts are.
- After one prompt the same first token has one log-prob, unless the trainer is random.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..estimators import forward_k3, k1, k2, k3
from ..importance import token_ratio
from ..rollout import Rollout
from .accumulate import Kept, Ratio, Ratios, Totals

BAND = (0.5, 2.0)
"""Token ratios outside it are counted, as `monitor.mismatch_report` does by default."""

SAMPLE = 2**18
"""Tokens that the causes are judged on."""

FIRST_TOKENS = 2**18
"""Completions whose first tokens are compared with each other."""

AGREE = 1e-3
"""Root mean square of d below which trainer and sampler agree: of the size of float32 kernels' differences."""


@dataclass(frozen=True)
class Cause:
    """What explains a mismatch.

    Attributes:
        name: `none`, `shift`, `rounding`, `filter`, `temperature`, `random trainer`, `systematic` or `unexplained`.
        says: one sentence with the statistic that shows it.
        remedy: what to change; empty for `none`.
        statistics: the numbers of the sentence.
    """

    name: str
    says: str
    remedy: str = ""
    statistics: dict[str, float] = field(default_factory=dict)


class Lags:
    """Mean square difference of two columns, aligned and with the second moved by one token."""

    def __init__(self) -> None:
        self.sums = {lag: torch.zeros(2, dtype=torch.float64) for lag in (-1, 0, 1)}

    def add(self, a: Tensor, b: Tensor, mask: Tensor) -> None:
        """(B, T) each, live tokens first. At lag k, a_t is compared with b_{t+k}."""
        for lag, sums in self.sums.items():
            here, there = a[:, max(0, -lag) : a.shape[1] - max(0, lag)], b[:, max(0, lag) : b.shape[1] - max(0, -lag)]
            both = mask[:, abs(lag) :]
            off = torch.where(both, here - there, 0)
            sums += torch.stack([both.sum(dtype=torch.float64), off.square().sum(dtype=torch.float64)])

    def rms(self, lag: int) -> float:
        """Root of the mean square; infinite without pairs."""
        n, square = self.sums[lag].tolist()
        return (square / n) ** 0.5 if n else float("inf")

    def shift(self) -> int:
        """The lag at which the columns agree far better than where they stand, or 0."""
        best = min((-1, 1), key=self.rms)
        return best if self.rms(0) > 0.05 and self.rms(best) < 0.4 * self.rms(0) else 0


class MismatchSums:
    """What `monitor.mismatch_report` tells, of a stream of batches, and what the causes are judged by."""

    VALUES: ClassVar = {
        **{f"kl/mismatch/{k}": k.value for k in (k1, k2, k3)},
        "kl/mismatch_of_trainer/k3": forward_k3.value,
    }

    def __init__(self, ratios: Ratios | None = None) -> None:
        """Ratios that somebody else accumulates, because the trainer is π itself, are not accumulated twice."""
        self.totals, self.ratio, self.lags = Totals(list(self.VALUES)), Ratio(), Lags()
        self.ratios, self.own_ratios = ratios or Ratios(), ratios is None
        self.sample, self.first = Kept(SAMPLE), Kept(FIRST_TOKENS)
        self.grouped = False
        self.outside = self.tokens = 0
        self.furthest = 0.0

    def add(self, seen: Rollout, group: Tensor | None) -> None:
        """One batch, with the trainer as π and the sampler both as reference and as μ."""
        live = seen.mask
        away = -seen.log_ratio
        self.totals.add([value(away) for value in self.VALUES.values()], seen, group)
        if self.own_ratios:
            self.ratios.add(seen)
        ratio = token_ratio(seen)
        self.ratio.add(torch.where(live, ratio, 0).sum(-1, dtype=torch.float64)[None], seen.lengths.double())
        self.lags.add(seen.sampler_logp, seen.logp, live)
        self.outside += int((live & ((ratio < BAND[0]) | (ratio > BAND[1]))).sum())
        self.tokens += int(live.sum())
        self.furthest = max(self.furthest, float(away.abs().amax()))
        self.sample.add(torch.stack([seen.logp[live], seen.sampler_logp[live]]))
        if group is not None:
            self.grouped = True
            some = live[:, 0]
            self.first.add(torch.stack([x[some].double() for x in (group, seen.logp[:, 0], seen.sampler_logp[:, 0])]))

    def scalars(self) -> dict[str, float]:
        """Under the names of `klgrad.monitor`."""
        found = self.ratios.scalars()
        found["ratio/token/share_outside_band"] = self.outside / max(self.tokens, 1)
        found["log_ratio/abs_max"] = self.furthest
        return found

    def cause(self) -> Cause:
        """The first of the causes that the data shows."""
        if not self.tokens:
            return Cause("none", "There is no live token.")
        x, y = self.sample.values().double()
        evidence = Evidence(x, y, self)
        judges: tuple[Callable[[Evidence], Cause | None], ...] = (
            _nothing,
            _shift,
            _rounding,
            _agreement,
            _filter,
            _temperature,
            _random,
            _unexplained,
        )
        return next(cause for judge in judges if (cause := judge(evidence)) is not None)


class Evidence:
    """A sample of tokens and the sums, as the judges take them."""

    def __init__(self, trainer: Tensor, sampler: Tensor, sums: MismatchSums) -> None:
        self.x, self.y, self.sums = trainer, sampler, sums
        self.d = sampler - trainer
        self.rms = float(self.d.square().mean().sqrt())


def _nothing(e: Evidence) -> Cause | None:
    if e.rms > AGREE / 100:
        return None
    return Cause("none", f"Trainer and sampler agree (root mean square difference {e.rms:.2g}).", "", {"rms": e.rms})


def _shift(e: Evidence) -> Cause | None:
    lags = e.sums.lags
    shift = lags.shift()
    if not shift:
        return None
    where = "next" if shift > 0 else "previous"
    return Cause(
        "shift",
        f"The sampler's log-prob of a token is the trainer's of the {where} one: root mean square difference "
        f"{lags.rms(shift):.3g} moved by one token, {lags.rms(0):.3g} as they stand.",
        "Align the columns: the logits at position t - 1 score token t.",
        {"shift": shift, "rms": lags.rms(0), "rms_shifted": lags.rms(shift)},
    )


STEPS = {"bf16": (torch.bfloat16, 2**-8), "fp16": (torch.float16, 2**-11)}
"""Half formats with half their relative spacing: the most by which rounding moves a number."""


def _rounding(e: Evidence) -> Cause | None:
    for name, (dtype, step) in STEPS.items():
        for side, values in (("sampler", e.y), ("trainer", e.x)):
            some = values != 0
            exact = float((values.to(dtype).double() == values)[some].double().mean()) if bool(some.any()) else 0.0
            small = e.d.abs() <= 1.01 * step * torch.maximum(e.x.abs(), e.y.abs()) + 1e-6
            within = float(small.double().mean())
            if exact >= 0.99 and within >= 0.99:
                return Cause(
                    "rounding",
                    f"The {side}'s log-probs are rounded to {name}: {exact:.1%} of them are {name} numbers, and "
                    f"{within:.1%} of the differences are within its rounding (root mean square {e.rms:.2g}).",
                    f"Compute log-softmax in float32, and store the {side}'s log-probs so.",
                    {"share_representable": exact, "share_within_rounding": within, "rms": e.rms},
                )
    return None


def _agreement(e: Evidence) -> Cause | None:
    return None if e.rms > AGREE else _nothing_to_do(e)


def _nothing_to_do(e: Evidence) -> Cause:
    return Cause(
        "none", f"Trainer and sampler agree to rounding (root mean square difference {e.rms:.2g}).", "", {"rms": e.rms}
    )


def _filter(e: Evidence) -> Cause | None:
    (mass,) = e.sums.ratio.estimates()
    mean, error = float(mass.mean), float(mass.standard_error)
    below, above = float((-e.d).clamp(min=0).mean()), float(e.d.clamp(min=0).mean())
    # A heavy tail of ratios also has a sample mean below 1, but not one sign.
    if not (mean < 0.998 and mean + 5 * error < 1 and below < 0.1 * above):
        return None
    most = float(e.d.quantile(0.999).neg().exp())
    likelier = float((e.d >= -AGREE).double().mean())
    return Cause(
        "filter",
        f"The sampler drew from a part of the vocabulary that holds {mean:.1%} ± {error:.1%} of the trainer's mass "
        f"(the mean ratio, which would be 1), and renormalised: {likelier:.1%} of the tokens are as likely to it as to "
        f"the trainer or likelier, by up to 1/{most:.2f}. That is top-p, top-k or min-p.",
        "Switch top-p, top-k and min-p off while sampling, or replay the same mask in the trainer.",
        {"mass_kept": mean, "mass_kept/standard_error": error, "least_mass_kept": most},
    )


def _temperature(e: Evidence) -> Cause | None:
    centred = torch.expm1(-e.d)
    weight = float((centred * e.x).mean())
    sharper = float((centred * e.d).mean()) / weight if weight else 0.0
    if not 0.02 <= abs(sharper) <= 0.8:
        return None
    # d = (a - 1)(x + H) with H >= 0: beyond that line there is no context in which a temperature does it.
    beyond = (sharper * e.x - e.d if sharper > 0 else e.d - sharper * e.x).clamp(min=0)
    explained = 1 - float(beyond.square().sum() / e.d.square().sum())
    follows = float(torch.corrcoef(torch.stack([e.x, e.d]))[0, 1]) ** 2
    if explained < 0.95 or follows < 0.25:
        return None
    t = 1 / (1 + sharper)
    return Cause(
        "temperature",
        f"The sampler's temperature is about {t:.2f} times the trainer's: {explained:.0%} of the differences are such "
        f"as a temperature makes, and they follow the log-prob (correlation {follows**0.5:.2f}).",
        f"Divide the trainer's logits by {t:.2f} too, those of ref alike, or sample at the trainer's temperature.",
        {"temperature_ratio": t, "share_explained": explained, "correlation": follows**0.5},
    )


def _random(e: Evidence) -> Cause | None:
    """The same first token after the same prompt, to the sampler's last bit, scored more than once."""
    if not e.sums.grouped:
        return None
    group, x, y = e.sums.first.values()
    order = torch.argsort(y, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    group, x, y = group[order], x[order], y[order]
    again = (group[1:] == group[:-1]) & (y[1:] == y[:-1])
    n = int(again.sum())
    if n < 20:
        return None
    noise = float((x[1:] - x[:-1])[again].square().mean().sqrt()) / 2**0.5
    off = float((y - x)[1:][again].square().mean().sqrt())
    statistics = {"repeats": float(n), "rms_of_repeats": noise, "rms_at_repeats": off, "rms": e.rms}
    if noise > max(0.5 * off, AGREE):
        return Cause(
            "random trainer",
            f"The trainer is random: {n} times the same first token after the same prompt got another log-prob (spread "
            f"{noise:.2g}, of a difference of {off:.2g}). That is dropout, or kernels that depend on the batch.",
            "Score in evaluation mode (`model.eval()`), with dropout 0 in the configuration.",
            statistics,
        )
    if noise < 0.1 * off:
        return Cause(
            "systematic",
            f"The difference is no noise: {n} times the same first token after the same prompt got the same trainer's "
            f"log-prob again (spread {noise:.2g}), and differs from the sampler's by {off:.2g}.",
            "Look for stale weights in the sampler, another prompt template, or a sampler's penalty.",
            statistics,
        )
    return None


def _unexplained(e: Evidence) -> Cause:
    noise = e.rms < 0.05
    size = "of the size that half-precision kernels give" if noise else "more than half-precision kernels give"
    lean = float(e.d.mean()) / e.rms
    hint = "" if e.sums.grouped else " A `group` column would tell noise (dropout) from what is systematic."
    return Cause(
        "unexplained",
        f"Root mean square difference {e.rms:.2g}, {size}; not a shift, a filter, a temperature or rounding.{hint}",
        "Compute the head and log-softmax in float32 on both sides."
        if noise
        else "Check dropout (`model.eval()`), and that the sampler has the trainer's weights.",
        {"rms": e.rms, "mean_over_rms": lean},
    )
