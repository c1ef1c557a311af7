"""Numbers about how a term was computed on one batch: lengths, extremes, and what the bounds did."""

import torch
from torch import Tensor

from .estimators import MAX_EXPONENT
from .families import Family
from .families.choices import Declaration
from .importance import ImportanceWeighting, effective_sample_size
from .rollout import Rollout


def diagnostics(family: Family, term: Declaration, rollout: Rollout, ratios: Tensor | None) -> dict[str, Tensor]:
    """Describe one evaluation of a term.

    Args:
        family: the term's family.
        term: the term.
        rollout: the batch.
        ratios: the importance ratios before their bound; None for on-policy terms.

    Returns:
        Detached scalars by name. On-policy terms need no device synchronisation.
    """
    # A masked token has log-ratio 0, and so changes no maximum and no count.
    log_ratio = rollout.log_ratio
    found = {
        "length/mean": rollout.lengths.mean(),
        "log_ratio/abs_max": log_ratio.abs().amax(),
        "log_ratio/share_saturated": _share(log_ratio.abs() > MAX_EXPONENT, rollout),
    }
    if term.influence_bound is not None:
        clipped = [x for x in family.contributions(term, rollout) if x is not None]
        largest = torch.stack(clipped).abs().amax(0)
        found["influence/share_bounded"] = _share(largest > term.influence_bound, rollout)
    if ratios is not None and term.weighting is not None:
        found |= _ratio_diagnostics(term.weighting, rollout.mask, ratios)
    return found


def _share(flags: Tensor, rollout: Rollout) -> Tensor:
    """The share of live tokens with the flag."""
    live = rollout.mask
    return (flags & live).sum() / live.sum().clamp(min=1).to(rollout.log_ratio.dtype)


def _ratio_diagnostics(weighting: ImportanceWeighting, live: Tensor, ratios: Tensor) -> dict[str, Tensor]:
    # One weight per sample of what is weighted: a live token, or a completion (for a (B, 1) ratio).
    raw = ratios[live] if ratios.shape == live.shape else ratios[live.any(-1), 0]
    if not len(raw):
        return {}
    used = raw if weighting.bound is None else weighting.bound(raw)
    return {
        "ratio/share_bounded": (used != raw).to(raw.dtype).mean(),
        "ratio/effective_sample_size": effective_sample_size(used),
        "ratio/max": raw.amax(),
    }
