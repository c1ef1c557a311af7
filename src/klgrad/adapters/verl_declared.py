"""verl with klgrad: the KL that is declared under `klgrad`, by the functions that its trainers and workers call.

In the loss, `KLLoss` wraps verl's own `ppo_loss`, on a micro-batch in the layout of the workers; the rollout engine is
the sampler. In the advantage, the coefficient is subtracted from the advantages, which verl's own `ppo_loss` applies on
the first update on a batch: the log-probs before the update are those of the policy, and the sampler is the engine.
"""
# pyright: reportMissingImports=false
# (it is audited in an environment of its own)

from functools import partial
from typing import Any

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from ..verl.advantage import lowered_advantages
from ..verl.batch import rollout_of_step
from ..verl.declaration import Declaration, term_of
from ..verl.loss import KLLoss
from .verl import MEANS_OVER_ROWS, SUM, TOKEN_MEAN, actor, micro_batch, teacher_log_probs

UNBOUNDED = {"ratio": "prefix", "ratio_bound": "none"}
DECLARED: tuple[dict[str, Any], ...] = (
    {"level": "sequence"},
    {"level": "sequence", **UNBOUNDED},
    {"level": "token"},
    {"level": "token", **UNBOUNDED},
    {"level": "token", "ratio": "token", "ratio_bound": "none"},
    {"divergence": "forward", "level": "token", "estimator": "k3", **UNBOUNDED},
    {"placement": "advantage", "level": "sequence", "baseline": "leave_one_out"},
    {"placement": "advantage", "level": "sequence", "baseline": "leave_one_out", **UNBOUNDED},
    {"placement": "advantage", "level": "token", **UNBOUNDED},
    {"reference": "teacher", "level": "token", **UNBOUNDED},
)
"""Settings under `klgrad`; those without a bound, because a bound adds bias."""


def declared_subjects() -> list[Subject]:
    """Every declaration summed over the completion, and one with verl's default reduction."""
    return [*(declared(node) for node in DECLARED), declared(DECLARED[1], TOKEN_MEAN)]


def declared(node: dict[str, Any], reduction: str = SUM) -> Subject:
    """A declaration in verl, with β = 1.

    Args:
        node: the settings under `klgrad`.
        reduction: `loss_agg_mode`.
    """
    declaration = term_of({"coef": 1.0, **node})
    loss = _in_advantage if declaration.in_advantage else _in_loss
    written = " ".join(f"{name}={value}" for name, value in {"placement": "loss", **node}.items())
    name = f"verl klgrad {written} loss_agg_mode={reduction}"
    return Subject(
        name, "framework", partial(loss, declaration, reduction), framework="verl", stacks=reduction in MEANS_OVER_ROWS
    )


def _in_loss(declaration: Declaration, reduction: str, batch: Batch) -> Tensor:
    from verl.workers.utils.losses import ppo_loss

    wrapped = KLLoss(partial(ppo_loss, config=actor(loss_agg_mode=reduction)), declaration)
    output, data = micro_batch(batch, batch.advantages, rollout_log_probs=batch.behavior_logp)
    if declaration.from_teacher:
        del data["ref_log_prob"]  # which verl has not computed then
        data["teacher_logprobs"] = teacher_log_probs(batch)
    return wrapped(output, data)[0]


def _in_advantage(declaration: Declaration, reduction: str, batch: Batch) -> Tensor:
    from verl.workers.utils.losses import ppo_loss

    old = batch.logp.detach()
    step = {
        "old_log_probs": old,
        "rollout_log_probs": batch.behavior_logp,
        "ref_log_prob": batch.ref_logp,
        "response_mask": batch.mask,
    }
    rollout = rollout_of_step(step, batch.group.tolist())
    lower = lowered_advantages(declaration.term, declaration.settings.coef, rollout, batch.advantages)
    return ppo_loss(actor(loss_agg_mode=reduction), *micro_batch(batch, lower, old_log_probs=old))[0]
