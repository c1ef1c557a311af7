"""Settings that change the meaning of the declared KL without being an error: each gives a warning."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from .config_checks import SAMPLERS, is_weighted, needs_no_weights, stale

if TYPE_CHECKING:
    from .config import KLConfig


PER_COMPLETION_MEANS = ("grpo", "sapo")
"""Values of `loss_type` that average over the tokens of each completion."""


class MeaningWarning(UserWarning):
    """A setting that changes which completions the declared KL is averaged over, or how it is weighted."""


def notes(config: "KLConfig") -> list[str]:
    """One sentence for each such setting.

    Example:
        >>> from klgrad.trl import KLConfig
        >>> notes(KLConfig("runs/mine", bf16=False))
        []
    """
    found = (note(config) for note in NOTES)
    return [sentence for sentence in found if sentence is not None]


def warn_of(config: "KLConfig", stacklevel: int) -> None:
    """Give each of the `notes` as a `MeaningWarning`."""
    for sentence in notes(config):
        warnings.warn(sentence, MeaningWarning, stacklevel=stacklevel + 1)


def _old_completions(config: "KLConfig") -> str | None:
    why = stale(config)
    if why is None or is_weighted(config) or config.rollout_lag or config.kl_placement == "reward":
        return None
    return (
        f"{why} trains on completions that another policy sampled, and kl_ratio='none' leaves the KL uncorrected "
        "for it; kl_ratio='prefix' corrects it at sequence level, 'token' on the sampler's prefixes"
    )


def _other_samples(config: "KLConfig") -> str | None:
    """Filters and penalties: the completions are no samples of the policy, and their true log-probs are not known."""
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    changed = [f"{name}={getattr(config, name)}" for name, value in neutral.items() if getattr(config, name) != value]
    given = config.generation_kwargs if isinstance(config.generation_kwargs, dict) else {}
    changed += [f"generation_kwargs {name}={given[name]}" for name in SAMPLERS if name in given]
    if config.vllm_structured_outputs_regex:
        changed.append("vllm_structured_outputs_regex")
    term = config.objective.term
    if not changed or (term is not None and needs_no_weights(term)):
        return None
    return (
        f"{', '.join(changed)}: completions are not sampled from the policy that is trained, so that the KL is an "
        "average over other completions than its own, and kl_ratio does not correct for it"
    )


def _entropy(config: "KLConfig") -> str | None:
    if not config.entropy_coef and not config.use_adaptive_entropy:
        return None
    return (
        f"entropy_coef={config.entropy_coef:g}: TRL adds an entropy bonus to the loss, so that the optimum is not that "
        "of the reward and the KL alone"
    )


def _moving_reference(config: "KLConfig") -> str | None:
    if not config.sync_ref_model:
        return None
    return (
        f"sync_ref_model moves the reference towards the policy every {config.ref_model_sync_steps} updates: the KL is "
        "to a reference that moves, and no longer to the model as it started"
    )


def _scaled_advantages(config: "KLConfig") -> str | None:
    bound = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.loss_type != "cispo" or bound >= 1:
        return None
    share = "and a KL in the loss is not" if config.kl_placement == "loss" else "and the KL with them"
    return (
        f"loss_type='cispo' limits the ratio to epsilon_high={bound:g}, below 1: on-policy all advantages are "
        f"multiplied by it, {share}; set epsilon_high to 5, for example"
    )


def _weighed_by_trl(config: "KLConfig") -> str | None:
    if not config.use_vllm or not config.vllm_importance_sampling_correction or config.kl_placement == "loss":
        return None
    return (
        f"vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r} weights the KL in the "
        f"{config.kl_placement} like the policy loss, and drops or truncates it with the policy loss"
    )


def _per_completion(config: "KLConfig") -> str | None:
    """A mean over each completion: the tokens of short completions count more, in batches of any size."""
    if config.loss_type not in PER_COMPLETION_MEANS or config.objective.reduction != "policy" or not config.kl_coef:
        return None
    return (
        f"loss_type={config.loss_type!r} averages the KL over the tokens of each completion, so that a token of a "
        f"short completion counts more, and the gradient is that of no divergence, however large the batch; "
        f"{_other_reductions(config)}"
    )


def _per_forward_pass(config: "KLConfig") -> str | None:
    """A mean over the tokens of each forward pass: the size of the update does not help."""
    each = config.per_device_train_batch_size
    together = each * config.gradient_accumulation_steps * config.world_size
    reduced = config.objective.reduction == "policy" and config.kl_coef
    if config.loss_type != "bnpo" or not reduced or each == together:
        return None
    effect = "a token counts more beside short completions, and the gradient is that of the declared KL only as the "
    effect += "completions of a pass become many"
    if each == 1:
        effect = "that is a mean over the tokens of each completion, the gradient of no divergence"
    return (
        f"loss_type='bnpo' divides the KL by the tokens of one forward pass, of {each} completion{'s' * (each != 1)} "
        f"on each process, and not by those of the update, of {together}: {effect}; {_other_reductions(config)}"
    )


def _other_reductions(config: "KLConfig") -> str:
    """What keeps the declared KL; in the advantage and the reward, the KL is always reduced like the policy loss."""
    first = "kl_reduction='sequence', " if config.kl_placement == "loss" else ""
    return f"{first}loss_type='dapo' or loss_type='dr_grpo' keeps the declared KL"


def _scaled_rewards(config: "KLConfig") -> str | None:
    if config.kl_placement != "reward" or not config.kl_coef:
        return None
    cause = None if config.scale_rewards in (False, "none") else f"scale_rewards={config.scale_rewards!r}"
    other = "scale_rewards='none'"
    if config.multi_objective_aggregation != "sum_then_normalize":  # where TRL does not read scale_rewards
        cause = f"multi_objective_aggregation={config.multi_objective_aggregation!r}"
        other = f"multi_objective_aggregation='sum_then_normalize' with {other}"
    if cause is None:
        return None
    each = "batch" if cause == "scale_rewards='batch'" else "prompt"
    return (
        f"kl_placement='reward' with {cause}: a standard deviation divides the KL too, so that β differs from {each} "
        f"to {each}; kl_placement='advantage', or {other}, keeps the declared KL"
    )


def _noise(config: "KLConfig") -> str | None:
    if not config.neftune_noise_alpha:
        return None
    return (
        f"neftune_noise_alpha={config.neftune_noise_alpha:g} adds noise to the policy's embeddings and not to the "
        "reference's, and the KL includes the difference"
    )


NOTES: tuple[Callable[["KLConfig"], str | None], ...] = (
    _old_completions,
    _other_samples,
    _entropy,
    _moving_reference,
    _scaled_advantages,
    _weighed_by_trl,
    _per_completion,
    _per_forward_pass,
    _scaled_rewards,
    _noise,
)
