"""Which settings of a run an audit of its trainer needs."""

from typing import TYPE_CHECKING, Any

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


def audited_settings(config: "KLConfig") -> dict[str, Any]:
    """The settings of a run that may act on its KL, where they differ from their defaults.

    Args:
        config: the settings of the run.

    Returns:
        Settings for `klgrad.adapters.trl.declared`, which runs the trainer for an audit, with β = 1 and no rewards.

    Example:
        >>> from klgrad.adapters.trl_settings import audited_settings
        >>> from klgrad.trl import KLConfig
        >>> audited_settings(KLConfig("runs/mine", loss_type="dr_grpo", kl_coef=0.02, learning_rate=1e-5, bf16=False))
        {'loss_type': 'dr_grpo'}
    """
    from ..trl.field_types import changed

    kl = lambda name: name.startswith("kl_") and name not in KL_FIELDS_LEFT_OUT
    return {name: value for name, value in changed(config).items() if kl(name) or name.startswith(TRL_FIELDS)}
