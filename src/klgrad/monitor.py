"""The honest KL report: every estimator at once, with standard errors, in stated units.

Divergences of three kinds are often all called "kl", and never mixed here: of π to ref (`kl_report`), of the
trainer's policy to what sampled the tokens, and of π to its old self (`mismatch_report` serves both).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import RolloutError
from .estimators import forward_k3, k1, k2, k3
from .importance import effective_sample_size, prefix_ratio, sequence_ratio, token_ratio
from .rollout import Rollout
from .statistics import Estimate, ratio_of_means

CLAMPS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "k3_value_10": (k3.value, 10.0),
    "k2_value_10": (k2.value, 10.0),
    "input_20": (torch.abs, 20.0),
}
"""What is clamped in common use, and where: beyond it the gradient stops."""

QUANTILES = (0.01, 0.5, 0.99)

MAX_QUANTILE_INPUT = 2**24
"""`torch.quantile` refuses more elements than this; beyond it every n-th is taken."""


@dataclass(frozen=True, eq=False)
class Report:
    """Named numbers about one batch: estimates with standard errors, and plain scalars."""

    estimates: dict[str, Estimate]
    scalars: dict[str, Tensor]

    def metrics(self) -> dict[str, float]:
        """One flat dictionary for a logger; an estimate's error is under `<name>/standard_error`."""
        flat = {name: e.mean.item() for name, e in self.estimates.items()}
        flat |= {f"{name}/standard_error": e.standard_error.item() for name, e in self.estimates.items()}
        return flat | {name: x.item() for name, x in self.scalars.items()}

    def __str__(self) -> str:
        rows = [(name, str(e)) for name, e in self.estimates.items()]
        rows += [(name, f"{x.item():.4g}") for name, x in self.scalars.items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def kl_report(rollout: Rollout) -> Report:
    r"""How far π is from ref on this batch.

    Estimates:
        KL(π‖ref) by k1 (of either sign), k2 (biased), k3 and, where `token_kl` is given, exactly, and
        KL(ref‖π): per completion under `.../per_sequence`, per token under `.../per_token`.
    Gradient:
        none: everything is detached.
    Requires:
        y ~ π for the estimates to mean that; `behavior_logp` adds the ratio statistics that tell, but the
        estimates are not weighted by it.
    """
    values = {f"kl/reverse/{k}": k.value(rollout.log_ratio) for k in (k1, k2, k3)}
    values["kl/forward/k3"] = forward_k3.value(rollout.log_ratio)
    if rollout.token_kl is not None:
        values["kl/reverse/exact"] = rollout.token_kl.detach()
    if rollout.token_forward_kl is not None:
        values["kl/forward/exact"] = rollout.token_forward_kl.detach()
    scalars = _lengths(rollout) | _beyond_clamps(rollout)
    if rollout.behavior_logp is not None:
        scalars |= _ratio_statistics(rollout)
    return Report(_both_units(values, rollout), scalars)


def mismatch_report(
    logp: Tensor,
    behavior_logp: Tensor,
    mask: Tensor,
    *,
    band: tuple[float, float] = (0.5, 2.0),
    group: Tensor | None = None,
) -> Report:
    r"""How far the trainer's policy π is from μ, which sampled these tokens.

    Estimates:
        KL(μ‖π), the direction that samples of μ estimate without weights, by k1, k2 and k3; and KL(π‖μ) of
        the next token, at the sampler's prefixes.
    Gradient:
        none: everything is detached.
    Requires:
        y ~ μ. On the first mini-batch after sampling every ratio should be 1.

    Args:
        logp: (B, T) trainer's log-probs.
        behavior_logp: (B, T) sampler's log-probs.
        mask: (B, T) live tokens.
        band: token ratios outside it are counted.
        group: (B,) prompt index, for clustered errors.
    """
    low, high = band
    if not 0 <= low <= 1 <= high:
        raise RolloutError("a band with 0 <= low <= 1 <= high", f"{band}", "write band=(0.5, 2.0), say")
    seen = Rollout(logp.detach(), behavior_logp, mask, behavior_logp=behavior_logp, group=group)
    # For samples of μ the log-ratio that estimates a KL without weights is log μ - log π.
    away = -seen.log_ratio
    values = {f"kl/mismatch/{k}": k.value(away) for k in (k1, k2, k3)}
    values["kl/mismatch_of_trainer/k3"] = forward_k3.value(away)
    scalars = _lengths(seen) | _ratio_statistics(seen)
    ratio = token_ratio(seen)[seen.mask]
    outside = (ratio < low) | (ratio > high)
    scalars["ratio/token/share_outside_band"] = outside.to(ratio.dtype).sum() / max(len(ratio), 1)
    scalars["log_ratio/abs_max"] = away.abs().amax()
    return Report(_both_units(values, seen), scalars)


def _both_units(values: dict[str, Tensor], rollout: Rollout) -> dict[str, Estimate]:
    units = {"per_sequence": torch.ones_like(rollout.lengths), "per_token": rollout.lengths}
    return {
        f"{name}/{unit}": ratio_of_means(torch.where(rollout.mask, x, 0).sum(-1), count, rollout.group)
        for name, x in values.items()
        for unit, count in units.items()
    }


def _lengths(rollout: Rollout) -> dict[str, Tensor]:
    lengths = rollout.lengths
    return {"length/mean": lengths.mean(), "length/min": lengths.amin(), "length/max": lengths.amax()}


def _beyond_clamps(rollout: Rollout) -> dict[str, Tensor]:
    log_ratio = rollout.log_ratio[rollout.mask]
    shares = {
        f"clamp/share_beyond_{name}": (value(log_ratio) > limit).sum() / max(len(log_ratio), 1)
        for name, (value, limit) in CLAMPS.items()
    }
    return shares | {"log_ratio/abs_max": rollout.log_ratio.abs().amax()}


def _ratio_statistics(rollout: Rollout) -> dict[str, Tensor]:
    live = rollout.mask
    found = {}
    ratios = {
        "token": token_ratio(rollout)[live],
        "prefix": prefix_ratio(rollout)[live],
        "sequence": sequence_ratio(rollout)[live.any(-1), 0],
    }
    for name, ratio in ratios.items():
        if not len(ratio):
            continue
        found[f"ratio/{name}/mean"] = ratio.mean()
        found[f"ratio/{name}/max"] = ratio.amax()
        thin = ratio[:: -(-len(ratio) // MAX_QUANTILE_INPUT)]
        for q, x in zip(QUANTILES, thin.quantile(torch.tensor(QUANTILES).to(thin)), strict=True):
            found[f"ratio/{name}/quantile_{q:g}"] = x
        found[f"ratio/{name}/effective_sample_size"] = effective_sample_size(ratio)
    return found
