"""Find the likely cause of a mismatch of trainer and sampler, and whether it is the only one."""

import torch

from .case import AGREE, Case, Cause
from .evidence import Evidence
from .sampling import ONE_SIGN, filtered, tempered

HALF = 0.05
"""Largest root mean square of d that kernels and logits in half precision can cause."""

NOT_IN_LINE = 0.9
"""If a smaller share of the differences between tokens after one prompt is linear in the log-prob, a temperature is
excluded."""


def cause_of(evidence: Evidence) -> Cause:
    """Find the first cause, in a fixed order of checks, that the data show.

    Args:
        evidence: sums over the whole log, with at least one batch.

    Returns:
        The cause; `none` if trainer and sampler agree, `unexplained` if no check finds one.
    """
    case = Case(evidence)
    checks = (_nothing, _shift, _rounding, _agreement, filtered, tempered, _half, _random)
    return next((cause for check in checks if (cause := check(case)) is not None), None) or _unexplained(case)


def _nothing(case: Case) -> Cause | None:
    return None if case.rms > AGREE / 100 else _none(case, "agree")


def _agreement(case: Case) -> Cause | None:
    return None if case.rms > AGREE else _none(case, "agree to rounding")


def _none(case: Case, how: str) -> Cause:
    return Cause(
        "none", f"Trainer and sampler {how} (root mean square difference {case.rms:.2g}).", "", True, {"rms": case.rms}
    )


def _shift(case: Case) -> Cause | None:
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


def _rounding(case: Case) -> Cause | None:
    return _half_format(case, everything=True)


def _half(case: Case) -> Cause | None:
    return _half_format(case, everything=False) if case.rms < HALF else None


def _half_format(case: Case, *, everything: bool) -> Cause | None:
    """Whether one side's log-probs are numbers of a half-precision format.

    With `everything`, almost all differences must also be within the rounding of that format.
    """
    for name, (dtype, step) in STEPS.items():
        small = case.d.abs() <= 1.01 * step * torch.maximum(case.x.abs(), case.y.abs()) + 1e-6
        within = float(small.double().mean())
        for side, values in (("sampler", case.y), ("trainer", case.x)):
            some = values != 0
            exact = float((values.to(dtype).double() == values)[some].double().mean()) if bool(some.any()) else 0.0
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


def _random(case: Case) -> Cause | None:
    """Compare repeats of the same first token after the same prompt."""
    found = case.prompts
    if found is None or case.noise is None or found.off <= AGREE:
        return None
    statistics = {
        "repeats": float(found.repeats),
        "rms_of_repeats": found.noise,
        "rms_at_repeats": found.off,
        "rms": case.rms,
    }
    again = f"{found.repeats} times, the same first token after the same prompt got"
    if case.noise > 0.5:
        alone = case.noise > 0.85
        return Cause(
            "random trainer",
            f"The trainer is random: {again} another log-prob (spread {found.noise:.2g}, of a difference of "
            f"{found.off:.2g}). The reason is dropout, or kernels that depend on the batch."
            + ("" if alone else " This is not the only cause: a part of the difference is the same every time."),
            "Score in evaluation mode (`model.eval()`), with dropout 0 in the configuration.",
            alone,
            statistics,
        )
    if _could_be_sampling(case):
        return None
    alone = case.noise < 0.1
    return Cause(
        "systematic",
        f"The difference is {'not' if alone else 'not only'} noise: {again} {'' if alone else 'nearly '}the same "
        f"log-prob from the trainer (spread {found.noise:.2g}), which differs from the sampler's by {found.off:.2g}.",
        "Look for stale weights in the sampler, another prompt template, or a penalty in the sampler.",
        alone,
        statistics,
    )


def _could_be_sampling(case: Case) -> bool:
    """Whether a temperature or a filter is possible, though not shown: stale weights would then be a guess."""
    in_doubt = case.temperatures.holds and (case.line is None or case.line.along > NOT_IN_LINE)
    return in_doubt or case.opposite_share < ONE_SIGN


def _unexplained(case: Case) -> Cause:
    noise = case.rms < HALF
    size = "as half-precision kernels can cause" if noise else "more than half-precision kernels cause"
    hint = "" if case.prompts is not None else " " + case.missing_data("whether it is noise (dropout) or systematic")
    found = case.temperatures
    if not noise and found.holds and found.one_sided:
        hint = (
            f" A temperature of {found.low:.2g} to {found.high:.2g} times the trainer's could cause it, and so could "
            f"other weights: these data cannot distinguish the two.{hint}"
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
