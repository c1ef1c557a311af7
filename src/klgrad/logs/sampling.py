"""Causes that are in how the sampler draws: a filter of the vocabulary, a temperature."""

import torch

from .case import Case, Cause
from .evidence import Prompts

ONE_SIGN = 0.01
"""A filter alone makes every token likelier: differences the other way, as a share, beyond which it is not alone."""

IN_LINE = 0.97
"""Share of the differences between tokens after one prompt that a temperature alone puts in line with the log-prob."""

ASK = "A `group` column would tell whether that is all."


def filtered(e: Case) -> Cause | None:
    """Top-p, top-k, min-p: the trainer's mass on what the sampler could draw is below 1."""
    mean, error = e.evidence.mass_kept()
    ratio = torch.exp(-e.d)
    rare = float(ratio.topk(max(1, len(ratio) // 1000)).values.sum() / ratio.sum())
    # A heavy tail of ratios has a sample mean below 1, too, for its rarest are not in the sample.
    if not (mean < 0.998 and mean + 5 * error < 1 and rare < 0.02):
        return None
    back = float((-e.d).clamp(min=0).mean() / e.d.clamp(min=0).mean())
    one_sign = back < ONE_SIGN
    alone = (None if e.prompts is None else _of_contexts_alone(e.prompts)) if one_sign else False
    says = (
        f"The sampler drew from a part of the vocabulary that holds {mean:.1%} ± {error:.1%} of the trainer's mass "
        "(the mean ratio, which would be 1). That is top-p, top-k or min-p."
    )
    least = float(e.d.quantile(0.999).neg().exp())
    if one_sign:
        says += f" Hardly a token is less likely to it than to the trainer, or likelier by more than 1/{least:.2f}."
    return Cause(
        "filter",
        says + {True: "", False: f" {_rest(e, back)}", None: f" {ASK}"}[alone],
        "Switch top-p, top-k and min-p off while sampling, or replay the same mask in the trainer.",
        alone,
        {"mass_kept": mean, "mass_kept/standard_error": error, "least_mass_kept": least, "share_the_other_way": back},
    )


def _of_contexts_alone(found: Prompts) -> bool:
    """Whether all tokens after one prompt differ alike, as a filter makes them, but for a little noise."""
    return found.within < 0.05 and not (found.within > 1e-4 and found.along > IN_LINE)


def _rest(e: Case, back: float) -> str:
    """Why a filter is not all."""
    if e.noise is not None and e.noise > 0.3:
        return "There is noise beside it: the same first token after the same prompt gets several log-probs."
    if e.prompts is not None and e.prompts.along > IN_LINE:
        return "But tokens after one prompt differ, in line with their log-probs: there is a temperature beside it."
    return f"But differences the other way are {back:.1%} as large, which a filter does not make."


def tempered(e: Case) -> Cause | None:
    """Another temperature: the differences follow the log-prob in every context."""
    centred = torch.expm1(-e.d)
    weight = float((centred * e.x).mean())
    sharper = float((centred * e.d).mean()) / weight if weight else 0.0
    if not 0.02 <= abs(sharper) <= 0.8:
        return None
    # d = (a - 1)(x + H) with H >= 0: beyond that line there is no context in which a temperature does it.
    beyond = (sharper * e.x - e.d if sharper > 0 else e.d - sharper * e.x).clamp(min=0)
    explained = 1 - float(beyond.square().sum() / e.d.square().sum())
    follows = float(torch.corrcoef(torch.stack([e.x, e.d]))[0, 1]) * (1 if sharper > 0 else -1)
    if explained < 0.95 or follows < 0.5:
        return None
    t = 1 / (1 + sharper)
    alone = None if e.prompts is None else e.prompts.along > IN_LINE
    lines = {
        True: " Of tokens after one prompt the differences are in line with the log-probs.",
        False: " But of tokens after one prompt the differences are not in line with the log-probs: there is more, and "
        "the number is not to be trusted.",
        None: f" {ASK}",
    }
    return Cause(
        "temperature",
        f"The sampler's temperature is about {t:.2f} times the trainer's: {explained:.0%} of the differences are such "
        f"as a temperature makes, and they follow the log-prob (correlation {follows:.2f}).{lines[alone]}",
        f"Divide the trainer's logits by {t:.2f} too, those of ref alike, or sample at the trainer's temperature."
        if alone is not False
        else "Compare the temperatures of sampler and trainer; ref takes the same.",
        alone,
        {"temperature_ratio": t, "share_explained": explained, "correlation": follows},
    )
