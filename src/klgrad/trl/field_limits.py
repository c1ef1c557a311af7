"""Ranges and choices of settings, of this package's and of TRL's, in one table.

TRL and transformers check most of theirs late, when a model is loaded or trained, and some not at all.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .field_types import Complaint, Setting

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
LARGEST_SEED = 2**32 - 1
"""The largest that NumPy accepts."""


@dataclass(frozen=True)
class Limit:
    """What a value has to be, and what to do otherwise; `required` settings may not be None."""

    expected: str
    holds: Callable[[Any], bool]
    remedy: str
    required: bool = False
    choices: tuple[Any, ...] | None = None

    def complaint(self, name: str, value: Any) -> Complaint:
        """The message for a value outside the limit."""
        return f"`{name}` {self.expected}", repr(value), self.remedy


def _compared(sign: str, compare: Callable[[Any, Any], bool], bound: float, remedy: str, required: bool) -> Limit:
    return Limit(f"{sign} {bound:g}", lambda value: compare(value, bound), remedy, required)


def at_least(bound: float, remedy: str, *, required: bool = False) -> Limit:
    """>= `bound`."""
    return _compared(">=", operator.ge, bound, remedy, required)


def above(bound: float, remedy: str) -> Limit:
    """> `bound`."""
    return _compared(">", operator.gt, bound, remedy, False)


def between(low: float, high: float, remedy: str, *, above_low: bool = False, below_high: bool = False) -> Limit:
    """From `low` to `high`; either end may be excluded."""
    first, last = "above" if above_low else "from", "below" if below_high else "to"
    return Limit(
        f"{first} {low:g} {last} {high:g}",
        lambda value: (low < value if above_low else low <= value) and (value < high if below_high else value <= high),
        remedy,
    )


def among(choices: tuple[Any, ...], remedy: str) -> Limit:
    """One of these."""
    return Limit(" or ".join(map(str, choices)), lambda value: value in choices, remedy, choices=choices)


COUNT = "write a whole number that is larger than 0"
SHARE = "write a share of 1"
SEED = between(0, LARGEST_SEED, "random generators take no other seed")

LIMITS: dict[str, Limit] = {
    # Updates and batches: with 0 of any of them, nothing would be trained.
    "per_device_train_batch_size": at_least(1, COUNT),
    "per_device_eval_batch_size": at_least(1, COUNT),
    "gradient_accumulation_steps": at_least(1, "1 makes an update of every batch"),
    "steps_per_generation": at_least(1, "leave it out for `gradient_accumulation_steps`"),
    "generation_batch_size": at_least(1, "leave it out; it follows from the batch size"),
    "num_iterations": at_least(1, "1 uses every completion once; with 0 nothing would be trained"),
    "num_generations": at_least(2, "a group of one has no peers to compare with; use 8, for example", required=True),
    "num_generations_eval": at_least(1, COUNT),
    "max_completion_length": at_least(1, "write the largest number of tokens of a completion", required=True),
    "max_steps": Limit("-1 or >= 1", lambda n: n == -1 or n >= 1, "-1 trains for `num_train_epochs`"),
    "num_train_epochs": above(0, "with 0 epochs nothing would be trained"),
    "train_size": at_least(1, "write how many questions to train on"),
    "eval_size": at_least(0, "0 evaluates nothing"),
    "eval_every": at_least(0, "0 evaluates only before and after"),
    "student_layers": at_least(1, "write how many layers to keep"),
    "num_processes": at_least(1, "1 trains in this process"),
    # The optimizer: a negative rate would raise the loss, and with a beta of 1 nothing would be learnt.
    "learning_rate": at_least(0, "a negative rate would raise the loss; use 1e-6, for example"),
    "weight_decay": at_least(0, "0 switches it off"),
    "adam_beta1": between(0, 1, "use 0.9, for example", below_high=True),
    "adam_beta2": between(0, 1, "use 0.999, for example", below_high=True),
    "adam_epsilon": at_least(0, "use 1e-8, for example"),
    "max_grad_norm": at_least(0, "0 clips nothing"),
    "warmup_steps": at_least(0, "0 switches it off"),
    "logging_steps": at_least(0, COUNT),
    "save_steps": above(0, "save_strategy: no switches saving off"),
    "save_total_limit": at_least(0, "leave it out to keep all checkpoints"),
    "eval_steps": at_least(0, COUNT),
    "ddp_timeout": at_least(1, "seconds to wait for other processes; 1800 is the default"),
    "dataloader_num_workers": at_least(0, "0 loads in this process"),
    "seed": SEED,
    "data_seed": SEED,
    # Sampling.
    "temperature": above(0, "greedy sampling has no distribution to take a KL of; 1.0 samples the policy itself"),
    "top_p": between(0, 1, "1.0 samples from all tokens", above_low=True),
    "top_k": at_least(0, "0 samples from all tokens"),
    "min_p": between(0, 1, "leave it out to sample from all tokens"),
    "repetition_penalty": above(0, "1.0 switches it off"),
    "vllm_mode": among(("colocate", "server"), "colocate runs vLLM in the training processes"),
    "vllm_model_impl": among(("vllm", "transformers"), "vllm is the default"),
    "vllm_server_port": between(1, 65535, "write a port"),
    "vllm_group_port": between(1, 65535, "write a port"),
    "vllm_server_timeout": at_least(0, "seconds to wait for the server"),
    "vllm_gpu_memory_utilization": between(0, 1, SHARE, above_low=True),
    "vllm_tensor_parallel_size": at_least(1, COUNT),
    "vllm_max_model_length": at_least(1, COUNT),
    # The policy loss.
    "loss_type": among(LOSS_TYPES, "dapo is TRL's default"),
    "importance_sampling_level": among(("token", "sequence"), "token is TRL's default"),
    "scale_rewards": among(("group", "batch", "none", True, False), "none leaves rewards as they are"),
    "multi_objective_aggregation": among(("sum_then_normalize", "normalize_then_sum"), "the first is TRL's default"),
    "vllm_importance_sampling_mode": among(
        ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"), "sequence_mask is TRL's default"
    ),
    "epsilon": at_least(0, "0.2 is TRL's default"),
    "epsilon_high": at_least(0, "leave it out for `epsilon`"),
    "delta": above(1, "a ratio of 1 must pass, or nothing on-policy would be trained; use 4.0, for example"),
    "sapo_temperature_neg": above(0, "1.05 is TRL's default"),
    "sapo_temperature_pos": above(0, "1.0 is TRL's default"),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), at_least(0, "leave it out for TRL's")
    ),
    "vllm_importance_sampling_clip_max": above(0, "3.0 is TRL's default"),
    "vllm_importance_sampling_clip_min": at_least(0, "leave it out for no lower bound"),
    "top_entropy_quantile": between(0, 1, "1.0 trains on all tokens", above_low=True),
    "off_policy_mask_threshold": at_least(0, "leave it out to mask nothing"),
    "ref_model_mixup_alpha": between(0, 1, SHARE),
    "ref_model_sync_steps": at_least(1, COUNT),
    # Adapters.
    "lora_r": at_least(1, COUNT),
    "lora_alpha": above(0, "32 is TRL's default"),
    "lora_dropout": between(0, 1, SHARE, below_high=True),
    # The KL.
    "kl_coef": at_least(0, "a negative β would reward distance from the reference"),
    "kl_target": above(0, "name the KL to hold, or None for a constant β"),
    "kl_memory": at_least(1, "MiB for tiles of logits; 256 is the default"),
    "kl_horizon": at_least(1, "use 50, for example"),
    "kl_top_k": at_least(1, "use 64, for example, or leave it out for the full vocabulary"),
    "rollout_lag": at_least(0, "0 trains on fresh completions"),
}
"""Limits by setting. A setting without one is checked for its type, and for the choices that its field declares."""


def has_choices(name: str) -> bool:
    """Whether the table lists all values of a setting, of any type."""
    return name in LIMITS and LIMITS[name].choices is not None


def complaint(setting: Setting, value: Any) -> Complaint | None:
    """Why a value cannot be used, by its type, its choices or its range; None if it can."""
    limit = LIMITS.get(setting.name)
    if limit is not None and limit.choices is not None:  # they are stricter than the type
        return None if limit.holds(value) else limit.complaint(setting.name, value)
    found = setting.misfit(value)
    if found is not None or limit is None:
        return found or (_unreported(value) if setting.name == "report_to" else None)
    if value is None:
        return limit.complaint(setting.name, value) if limit.required else None
    return None if limit.holds(value) else limit.complaint(setting.name, value)


def _unreported(value: Any) -> Complaint | None:
    """Why `report_to` cannot be used: transformers checks it only when the model is loaded."""
    from transformers.integrations import integration_utils

    known = integration_utils.INTEGRATION_TO_CALLBACK
    wanted = [name for name in ([value] if isinstance(value, str) else value or []) if name not in ("all", "none")]
    for name in wanted:
        if name not in known:
            return f"`report_to` none, all, {', '.join(sorted(known))}", repr(name), "choose one of them"
        is_available = getattr(integration_utils, f"is_{name}_available", None)  # two integrations have other names
        if is_available is not None and not is_available():
            return f"the package of `report_to` {name}", "no such package", "install it, or choose none"
    return None
