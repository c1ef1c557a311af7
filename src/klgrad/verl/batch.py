"""verl's tensors as a `Rollout`: the driver's after `_compute_advantage`, and a worker's micro-batch.

The keys `response_mask`, `old_log_probs`, `rollout_log_probs`, `ref_log_prob`, `teacher_logprobs` and `uid` are verl's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.rollout import Rollout
from ..errors import RolloutError
from .declaration import Declaration

SAMPLERS = {"rollout": "rollout_log_probs", "old": "old_log_probs"}
"""The key of the log-probs of each `sampler`."""


def rollout_of_step(batch: Mapping[str, Tensor], uid: Sequence[Any], *, scored: bool = True) -> Rollout:
    """A batch of the driver: the policy before the update is π, the rollout engine is the sampler if it is known.

    Args:
        batch: padded (B, T) tensors.
        uid: of each row's prompt.
        scored: False if `old_log_probs` are those of the rollout engine: a ratio to it would be 1, not measured.
    """
    behavior = batch.get("rollout_log_probs") if scored else None
    return Rollout(
        batch["old_log_probs"],
        _needed(batch, "ref_log_prob"),
        batch["response_mask"],
        behavior_logp=behavior,
        group=list(map(str, uid)),  # pyright: ignore[reportArgumentType]
    )


def rollout_of_micro_batch(declaration: Declaration, logp: Tensor, ref_logp: Tensor, batch: Any) -> Rollout:
    """A micro-batch of a worker: the policy that is trained is π, and `sampler` says what sampled.

    Args:
        declaration: for the sampler.
        logp: (B, T) with its gradient.
        ref_logp: (B, T) of the reference.
        batch: padded (B, T) tensors.
    """
    behavior = None
    if declaration.term.weighting is not None:
        behavior = _needed(batch, SAMPLERS[declaration.settings.sampler])
    return Rollout(logp, ref_logp, batch["response_mask"].to(torch.bool), behavior_logp=behavior)


def _needed(batch: Any, key: str) -> Tensor:
    if key not in batch.keys():  # noqa: SIM118 (a TensorDict does not support `in`)
        remedy = {
            "rollout_log_probs": "set actor_rollout_ref.rollout.calculate_log_probs=True",
            "ref_log_prob": "train with trainer_mode=klgrad_sync or another of klgrad's, which makes verl score it",
        }
        raise RolloutError(f"`{key}` in verl's batch", "none", remedy.get(key, "let verl compute it"))
    return batch[key]
