"""OpenRLHF: its own `PolicyLoss`, and its corrections for a sampler that is another program (`is_correction_*`).

The advantages are those of the audit, on every token. Without a correction the sampler is the policy before the update
(`old_log_probs`). With one it is the inference engine (`rollout_log_probs`), and `old_log_probs` are those of the
policy, as on the first update after a rollout.
"""

from typing import Any

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .openrlhf import modules

LOSSES: tuple[dict[str, Any], ...] = ({}, {"dual_clip": 3.0}, {"policy_loss_type": "gspo"})
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"is_correction_level": "token", "is_correction_mode": "clip"},
    {"is_correction_level": "token", "is_correction_mode": "mask"},
    {"is_correction_level": "seq", "is_correction_mode": "mask"},
    {"is_correction_level": "seq", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
)


def policy_losses() -> list[Subject]:
    """The types of loss, and the kinds of correction with the default type."""
    return [policy_loss(**settings) for settings in (*LOSSES, *CORRECTIONS)]


def policy_loss(**settings: Any) -> Subject:
    """The loss with these arguments of `PolicyLoss`, and its defaults otherwise."""
    own = modules()["loss"].PolicyLoss(**settings)

    def loss(batch: Batch) -> Tensor:
        return own(
            batch.logp,
            batch.logp.detach() if "is_correction_level" in settings else batch.old_logp,
            batch.advantages,
            action_mask=batch.mask.to(batch.logp.dtype),
            rollout_log_probs=batch.behavior_logp,
        )[0]

    name = " ".join(["openrlhf", *(f"{name}={value}" for name, value in settings.items())])
    return Subject(name if settings else "openrlhf policy_loss_type=ppo", "framework", loss, framework="openrlhf")
