"""verl: its policy losses by its own `ppo_loss`, and its corrections for a sampler that is another program.

The advantages are those of the audit, on every token, as an advantage estimator would deliver them; the reduction is
verl's default, a mean over the tokens of the batch. Without a correction the sampler is the policy before the update
(`old_log_probs`). With `rollout_correction` it is the inference engine, and `old_log_probs` are those of the policy, as
on the first update after a rollout; the mean is over the tokens before a rejection, as in the default trainer
(`trainer.use_v1`). That trainer has no `policy_loss.loss_mode=bypass_mode` of its own accord: with
`algorithm.rollout_correction.bypass_mode` alone it keeps the mode that is set, `vanilla` by default, with the log-probs
of the engine as `old_log_probs`. `clip_cov` and `kl_cov` choose their tokens at random, and are left out, as are all
`rollout_rs` but one.
"""
# pyright: reportMissingImports=false
# (it is audited in an environment of its own)

from typing import Any

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .verl import actor, micro_batch

MODES = ("vanilla", "gspo", "cispo", "sapo", "gpg", "dppo_tv", "dppo_kl", "geo_mean")
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"rollout_is": "token"},
    {"rollout_is": "sequence"},
    {"rollout_is": "sequence", "rollout_is_threshold": 1e9},
    {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.01"},
)
"""Truncated at the default of 2, not truncated, masked as by IcePop, rejected by the geometric mean of the ratios."""

BYPASSED = ({"loss_type": "ppo_clip"}, {"loss_type": "reinforce", "rollout_is": "sequence"})


def policy_losses() -> list[Subject]:
    """The modes of the policy loss, and the kinds of correction with the default mode."""
    return [
        *(policy_loss(mode) for mode in MODES),
        policy_loss("dro", dro_beta=1.0),
        *(_corrected(**settings) for settings in CORRECTIONS),
        *(_bypassed(**settings) for settings in BYPASSED),
    ]


def policy_loss(mode: str, **settings: Any) -> Subject:
    """The policy loss of a mode (`policy_loss.loss_mode`), with its settings."""
    from verl.workers.config import PolicyLossConfig

    config = PolicyLossConfig(loss_mode=mode, **settings)
    return _subject(_named({"loss_mode": mode, **settings}), lambda batch: _loss(batch, config))


def _corrected(**settings: Any) -> Subject:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct
    from verl.workers.config import PolicyLossConfig

    def loss(batch: Batch) -> Tensor:
        old = batch.logp.detach()
        weights, mask, _ = correct(old, batch.behavior_logp, batch.mask.to(old.dtype), **settings)
        more = {} if weights is None else {"rollout_is_weights": weights.batch["rollout_is_weights"]}
        return _loss(batch, PolicyLossConfig(), old_log_probs=old, response_mask=mask, **more)

    return _subject(f"rollout_correction {_named(settings)}", loss)


def _bypassed(**settings: Any) -> Subject:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config import PolicyLossConfig

    correction = RolloutCorrectionConfig(bypass_mode=True, **({"rollout_is": None} | settings))
    config = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction)
    return _subject(f"loss_mode=bypass_mode {_named(settings)}", lambda batch: _loss(batch, config))


def _loss(batch: Batch, policy_loss: Any, **tensors: Tensor) -> Tensor:
    from verl.workers.utils.losses import ppo_loss

    data = micro_batch(batch, batch.advantages, tokens=int(batch.mask.sum()), **tensors)
    return ppo_loss(actor(policy_loss=policy_loss), *data)[0]


def _named(settings: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _subject(name: str, loss: Any) -> Subject:
    return Subject(f"verl {name}", "framework", loss, framework="verl")
