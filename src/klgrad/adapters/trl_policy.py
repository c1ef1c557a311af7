"""TRL: the whole policy losses of its own `GRPOTrainer` and `RLOOTrainer`, without a KL, as is TRL's default.

The trainers are built as in `trl`. A call has the whole batch, so that the statistics of TRL's batch are those of the
limit of large batches.
"""

from typing import Any

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .trl import stage_of

TYPES = ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "vespo")
MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")


def policy_losses() -> list[Subject]:
    """Every type of loss, and every correction for a sampler that is another program (vLLM)."""
    sampled = {"loss_type": "dr_grpo", "scale_rewards": "none", "use_vllm": True}
    return [
        *(policy_loss("grpo", loss_type=kind) for kind in TYPES),
        policy_loss("grpo", loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
        policy_loss("grpo", loss_type="dr_grpo", scale_rewards="none"),
        *(policy_loss("grpo", **sampled, vllm_importance_sampling_mode=mode) for mode in MODES),
        policy_loss("grpo", **sampled, vllm_importance_sampling_correction=False),
        policy_loss("rloo", normalize_advantages=False),
    ]


def policy_loss(kind: str, **settings: Any) -> Subject:
    """The loss of a trainer with these settings, without a KL, and TRL's defaults otherwise."""

    def loss(batch: Batch) -> Tensor:
        return stage_of(kind, batch.group_size, (("beta", 0.0), *settings.items())).loss(batch)

    name = " ".join([f"trl {kind}", *(f"{key}={value}" for key, value in settings.items())])
    return Subject(name, "framework", loss, framework="trl")
