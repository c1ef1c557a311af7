"""verl's configuration: composed by its own files where it is installed, and the part that klgrad reads elsewhere."""

from importlib.util import find_spec
from typing import Any

HAS_VERL = find_spec("verl") is not None and find_spec("verl").origin is not None
HAS_TRAINERS = HAS_VERL and find_spec("transfer_queue") is not None
"""verl's default trainers need TransferQueue, which `pip install verl` does not install."""


def small(**changed: Any) -> dict[str, Any]:
    """The settings that klgrad reads, at verl's defaults; `changed` by their names with two underscores for a dot."""
    config: dict[str, Any] = {
        "klgrad": {},
        "actor_rollout_ref": {
            "actor": {
                "use_kl_loss": False,
                "policy_loss": {"loss_mode": "vanilla"},
                "loss_agg_mode": "token-mean",
                "ppo_epochs": 1,
                "ppo_mini_batch_size": 8,
                "entropy_coeff": 0,
            },
            "rollout": {"n": 4, "calculate_log_probs": True, "temperature": 1.0, "top_p": 1, "top_k": -1},
        },
        "algorithm": {
            "use_kl_in_reward": False,
            "rollout_correction": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False},
            "filter_groups": {"enable": False},
        },
        "data": {"train_batch_size": 8},
        "distillation": {"enabled": False, "distillation_loss": {"loss_mode": "k3", "use_task_rewards": True}},
        "trainer": {"v1": {"trainer_mode": "klgrad_sync"}},
    }
    for name, value in changed.items():
        *path, last = name.split("__")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    return config


def composed(*overrides: str) -> Any:
    """verl's whole configuration, as `main_ppo` composes it from the command line."""
    import hydra  # pyright: ignore[reportMissingImports]

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=list(overrides))
