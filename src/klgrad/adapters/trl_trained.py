"""The loss that a `KLConfig` trains with, for an audit: this package's `KLTrainer`, on TRL's own code."""

from typing import TYPE_CHECKING, Any

from ..audit import Subject
from .trl import declared

if TYPE_CHECKING:
    from ..trl import KLConfig

KL_FIELDS_LEFT_OUT = ("kl_coef", "kl_target", "kl_target_unit", "kl_horizon", "kl_memory")
"""β, which is 1 in an audit, what adapts it, and a setting of memory."""

TRL_FIELDS = (
    "loss_type", "scale_rewards", "multi_objective_aggregation", "importance_sampling_level", "epsilon", "epsilon_high",
    "delta", "use_vllm", "sapo_", "vespo_", "vllm_importance_sampling_",
)  # fmt: skip
"""Settings of TRL, or beginnings of their names, that may act on the KL or on the reward or advantage that carries it.

What makes samples stale (`rollout_lag`, `num_iterations`, `steps_per_generation`) is left out: an audit has its own
samplers, of which the loss knows the log-probs as it does for old completions.
"""


def trained(config: "KLConfig") -> Subject:
    """The loss of the trainer that a configuration describes, with β = 1 and without rewards.

    Args:
        config: of a run; `kl_coef` is positive.

    Returns:
        The loss, for `audit` or `audit_in_large_batches`. It calls a real trainer with tiny models.

    Example:
        >>> from klgrad.adapters.trl_trained import trained
        >>> from klgrad.trl import KLConfig
        >>> trained(KLConfig("runs/mine", loss_type="dr_grpo", kl_coef=0.02, bf16=False)).name
        'trl klgrad kl_coef=1.0 loss_type=dr_grpo'
    """
    return declared(**settings_of(config))


def settings_of(config: "KLConfig") -> dict[str, Any]:
    """The settings that may act on the KL, where they differ from their defaults."""
    from ..trl.field_types import changed

    kl = lambda name: name.startswith("kl_") and name not in KL_FIELDS_LEFT_OUT
    return {name: value for name, value in changed(config).items() if kl(name) or name.startswith(TRL_FIELDS)}
