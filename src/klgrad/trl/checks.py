"""Settings of a `KLConfig` that could not mean what they say, refused before anything is loaded."""

import math
import warnings
from typing import Any

from ..errors import MeaningError
from ..term import KLTerm

PLACEMENTS = ("loss", "advantage", "reward")
REDUCTIONS = ("policy", "sequence")
TAILS = ("sampled", "lump")
UNITS = ("sequence", "token")
OF_A_TERM = {
    "kl_divergence": "reverse",
    "kl_level": "sequence",
    "kl_estimator": "k1",
    "kl_discount": 1.0,
    "kl_baseline": "none",
    "kl_ratio": "none",
    "kl_influence_bound": None,
    "kl_top_k": None,
    "kl_reduction": "policy",
}
"""What a cell, being a whole loss, leaves no room for, with the defaults."""


def numbers(config: Any) -> None:
    """Of the right sign, and finite."""
    if not (config.kl_coef >= 0 and math.isfinite(config.kl_coef)):
        raise MeaningError(
            "`kl_coef` >= 0 and finite", f"{config.kl_coef}", "a negative β would reward distance from the reference"
        )
    if config.kl_target is not None and not config.kl_target > 0:
        raise MeaningError("`kl_target` > 0", f"{config.kl_target}", "name the KL to hold, or None for a constant β")
    if config.kl_target is not None and not config.kl_coef > 0:
        raise MeaningError("`kl_coef` > 0 with `kl_target`", "0", "β is adapted by factors, and 0 has none")
    if config.kl_memory < 1:
        raise MeaningError("`kl_memory` >= 1, in MiB", f"{config.kl_memory}", "256 is the default")
    if config.kl_horizon < 1:
        raise MeaningError("`kl_horizon` >= 1", f"{config.kl_horizon}", "50, say")
    if config.rollout_lag < 0:
        raise MeaningError("`rollout_lag` >= 0", f"{config.rollout_lag}", "0 trains on fresh completions")
    if config.kl_baseline == "leave_one_out" and config.num_generations < 2:
        raise MeaningError(
            "`num_generations` >= 2 for leave-one-out", f"{config.num_generations}", "or kl_baseline='none'"
        )


def words(config: Any) -> None:
    """One of those that there are; the term itself checks the rest."""
    allowed = {
        "kl_placement": PLACEMENTS,
        "kl_reduction": REDUCTIONS,
        "kl_tail": TAILS,
        "kl_target_unit": UNITS,
        "kl_ratio": ("none", "token", "prefix", "sequence"),
    }
    for name, known in allowed.items():
        value = getattr(config, name)
        if value not in known:
            raise MeaningError(f"`{name}` {' or '.join(known)}", repr(value), f"{known[0]} is the default")


def reference(config: Any) -> None:
    """A teacher stays what it is."""
    if config.teacher is not None and config.sync_ref_model:
        raise MeaningError(
            "a frozen teacher", "sync_ref_model=True", "it would be overwritten by the student: drop one of the two"
        )


def cell(config: Any) -> None:
    """A cell is a whole loss."""
    if config.kl_placement != "loss":
        raise MeaningError("`kl_placement`='loss' for a cell", repr(config.kl_placement), "a cell is a whole loss")
    for name, default in OF_A_TERM.items():
        if getattr(config, name) != default:
            raise MeaningError(
                f"no `{name}` beside `kl_cell`", f"{name}={getattr(config, name)!r}", "a cell is a whole loss: drop one"
            )


def placement(config: Any, term: KLTerm) -> None:
    """TRL's way with advantages and rewards must leave the term its meaning."""
    if config.kl_placement == "loss":
        return
    if term.sampler is not None:
        raise MeaningError(
            f"no `kl_ratio` with kl_placement={config.kl_placement!r}",
            f"kl_ratio={config.kl_ratio!r}",
            "TRL multiplies advantages by a ratio of its own; kl_placement='loss' weighs the KL once",
        )
    if config.kl_reduction != "policy":
        raise MeaningError(
            f"`kl_reduction`='policy' with kl_placement={config.kl_placement!r}",
            repr(config.kl_reduction),
            "advantages are reduced as the policy loss is; kl_placement='loss' can be summed",
        )
    if config.kl_placement == "advantage":
        _advantage(config)
    else:
        _reward(term)


def _advantage(config: Any) -> None:
    if config.importance_sampling_level != "token":
        raise MeaningError(
            "`importance_sampling_level`='token' with kl_placement='advantage'",
            repr(config.importance_sampling_level),
            "one ratio per completion spreads every token's coefficient over all of them; use kl_placement='loss'",
        )
    if config.off_policy_mask_threshold is not None:
        raise MeaningError(
            "no `off_policy_mask_threshold` with kl_placement='advantage'",
            f"{config.off_policy_mask_threshold}",
            "the KL would decide which tokens are masked, and be masked with them; use kl_placement='loss'",
        )
    if config.top_entropy_quantile < 1.0:
        raise MeaningError(
            "`top_entropy_quantile`=1 with kl_placement='advantage'",
            f"{config.top_entropy_quantile}",
            "the KL of all other tokens would be dropped; use kl_placement='loss'",
        )


def _reward(term: KLTerm) -> None:
    if (term.divergence, term.level, term.estimator) != ("reverse", "sequence", "k1"):
        raise MeaningError(
            "reverse KL, sequence level, k1 for kl_placement='reward'",
            f"{term.name}",
            "a reward carries one number per completion; any other term belongs in the loss or the advantage",
        )
    if term.discount != 1 or term.baseline != "none" or term.influence_bound:
        raise MeaningError(
            "no discount, baseline or influence bound with kl_placement='reward'",
            f"{term.name}",
            "the group's mean is the baseline there; use kl_placement='advantage' for the rest",
        )


def stale(config: Any) -> str | None:
    """What lets completions be older than the policy that is trained on them, as far as the settings tell."""
    if config.rollout_lag:
        return f"rollout_lag={config.rollout_lag}"
    if config.num_iterations > 1:
        return f"num_iterations={config.num_iterations}"
    if config.gradient_accumulation_steps % config.steps_per_generation:
        return f"steps_per_generation={config.steps_per_generation}"
    return "use_vllm=True" if config.use_vllm else None


def staleness(config: Any, *, corrected: bool) -> None:
    """Completions that another policy sampled need weights: an error where that was asked for, else a warning."""
    if corrected:
        return
    if config.rollout_lag and not config.rollout_lag_uncorrected:
        raise MeaningError(
            "`kl_ratio` with `rollout_lag`",
            "none",
            "the completions' sampler is no longer the policy: kl_placement='loss' with kl_ratio='prefix' corrects for "
            "it; rollout_lag_uncorrected=True studies what happens if nothing does",
        )
    why = stale(config)
    if why is not None and not config.rollout_lag and config.kl_placement != "reward":
        warnings.warn(
            f"{why} trains on completions that another policy sampled, and kl_ratio='none' leaves the KL uncorrected "
            "for it; kl_ratio='prefix' corrects it at sequence level, 'token' on the sampler's prefixes",
            stacklevel=4,
        )


def top_k(config: Any) -> None:
    """It is about a sum over the vocabulary."""
    if config.kl_top_k is None:
        return
    if config.kl_top_k < 1:
        raise MeaningError("`kl_top_k` >= 1", f"{config.kl_top_k}", "64, say, or none for the full vocabulary")
    if config.kl_estimator != "exact":
        raise MeaningError(
            "`kl_estimator`='exact' with `kl_top_k`",
            f"kl_estimator={config.kl_estimator!r}",
            "a sampled estimator looks at the sampled token alone; drop one of the two",
        )
