"""The likely cause of a mismatch of trainer and sampler, where the data shows one, and whether it is the only one."""

import torch

from .case import AGREE, Case, Cause
from .evidence import Evidence
from .sampling import ONE_SIGN, filtered, tempered

HALF = 0.05
"""Root mean square of d that kernels and logits in half precision can make."""

NOT_IN_LINE = 0.9
"""Share of the differences between tokens after one prompt in line with the log-prob, below which no temperature made
them."""


def cause_of(evidence: Evidence) -> Cause:
    """The first of the causes that the data shows."""
    case = Case(evidence)
    judges = (_nothing, _shift, _rounding, _agreement, filtered, tempered, _half, _random)
    return next((cause for judge in judges if (cause := judge(case)) is not None), None) or _unexplained(case)


def _nothing(e: Case) -> Cause | None:
    return None if e.rms > AGREE / 100 else _none(e, "agree")


def _agreement(e: Case) -> Cause | None:
    return None if e.rms > AGREE else _none(e, "agree to rounding")


def _none(e: Case, how: str) -> Cause:
    return Cause(
        "none", f"Trainer and sampler {how} (root mean square difference {e.rms:.2g}).", "", True, {"rms": e.rms}
    )


def _shift(e: Case) -> Cause | None:
    lags = e.evidence.lags
    shift = lags.shift()
    if not shift:
        return None
    where, left = "next" if shift > 0 else "previous", lags.rms(shift)
    alone = left <= AGREE
    return Cause(
        "shift",
        f"The sampler's log-prob of a token is the trainer's of the {where} one: root mean square difference "
        f"{left:.3g} moved by one token, {lags.rms(0):.3g} as they stand."
        + ("" if alone else " What is left is a mismatch of its own, not judged here."),
        "Align the columns: the logits at position t - 1 score token t.",
        alone,
        {"shift": shift, "rms": lags.rms(0), "rms_shifted": left},
    )


STEPS = {"bf16": (torch.bfloat16, 2**-8), "fp16": (torch.float16, 2**-11)}
"""Half formats with half their relative spacing: the most by which rounding moves a number."""


def _rounding(e: Case) -> Cause | None:
    return _half_format(e, everything=True)


def _half(e: Case) -> Cause | None:
    return _half_format(e, everything=False) if e.rms < HALF else None


def _half_format(e: Case, *, everything: bool) -> Cause | None:
    """One side's log-probs are numbers of a half format; is everything within the rounding of these numbers?"""
    for name, (dtype, step) in STEPS.items():
        small = e.d.abs() <= 1.01 * step * torch.maximum(e.x.abs(), e.y.abs()) + 1e-6
        within = float(small.double().mean())
        for side, values in (("sampler", e.y), ("trainer", e.x)):
            some = values != 0
            exact = float((values.to(dtype).double() == values)[some].double().mean()) if bool(some.any()) else 0.0
            if exact < 0.99 or (everything and within < 0.99):
                continue
            more = "" if everything else " The rest may be logits in half precision, which move a log-prob more."
            return Cause(
                "rounding",
                f"The {side}'s log-probs are rounded to {name}: {exact:.1%} of them are {name} numbers, and "
                f"{within:.1%} of the differences are within its rounding (root mean square {e.rms:.2g}).{more}",
                f"Compute the head and log-softmax in float32, and store the {side}'s log-probs so.",
                True if everything else None,
                {"share_representable": exact, "share_within_rounding": within, "rms": e.rms},
            )
    return None


def _random(e: Case) -> Cause | None:
    """What the same first token after the same prompt tells."""
    found = e.prompts
    if found is None or e.noise is None or found.off <= AGREE:
        return None
    statistics = {
        "repeats": float(found.repeats),
        "rms_of_repeats": found.noise,
        "rms_at_repeats": found.off,
        "rms": e.rms,
    }
    again = f"{found.repeats} times the same first token after the same prompt got"
    if e.noise > 0.5:
        alone = e.noise > 0.85
        return Cause(
            "random trainer",
            f"The trainer is random: {again} another log-prob (spread {found.noise:.2g}, of a difference of "
            f"{found.off:.2g}). That is dropout, or kernels that depend on the batch."
            + ("" if alone else " It is not all: a part of the difference is the same every time."),
            "Score in evaluation mode (`model.eval()`), with dropout 0 in the configuration.",
            alone,
            statistics,
        )
    if _could_be_sampling(e):
        return None
    alone = e.noise < 0.1
    return Cause(
        "systematic",
        f"The difference is {'no' if alone else 'not only'} noise: {again} {'' if alone else 'nearly '}the same "
        f"trainer's log-prob again (spread {found.noise:.2g}), and differs from the sampler's by {found.off:.2g}.",
        "Look for stale weights in the sampler, another prompt template, or a sampler's penalty.",
        alone,
        statistics,
    )


def _could_be_sampling(e: Case) -> bool:
    """A temperature or a filter is not shown, and not excluded: stale weights would be a guess."""
    in_doubt = e.temperatures.holds and (e.line is None or e.line.along > NOT_IN_LINE)
    return in_doubt or e.back < ONE_SIGN


def _unexplained(e: Case) -> Cause:
    noise = e.rms < HALF
    size = "of the size that half-precision kernels give" if noise else "more than half-precision kernels give"
    hint = "" if e.prompts is not None else " " + e.ask("noise (dropout) from what is systematic")
    found = e.temperatures
    if not noise and found.holds and found.one_sided:
        hint = (
            f" A temperature of {found.low:.2g} to {found.high:.2g} times the trainer's could make it, and so could "
            f"other weights: this data cannot tell.{hint}"
        )
    return Cause(
        "unexplained",
        f"Root mean square difference {e.rms:.2g}, {size}; no shift, filter, temperature or rounding by itself is "
        f"shown to make it.{hint}",
        "Compute the head and log-softmax in float32 on both sides."
        if noise
        else "Check dropout (`model.eval()`), that the sampler has the trainer's weights, and its temperature.",
        None,
        {"rms": e.rms, "mean_over_rms": float(e.d.mean()) / e.rms},
    )
