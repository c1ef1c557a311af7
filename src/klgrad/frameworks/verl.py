"""verl: its `ppo_loss` with the KL in the loss, the KL in the reward end to end, and its distillation losses.

Every loss is that of verl, called on a micro-batch in the layout of its workers: log-probs of prompt and response
without padding, with one prompt token each. In the loss (`use_kl_loss`) the advantages are those of the audit, zero by
default. In the reward (`use_kl_in_reward`) `apply_kl_penalty` takes the old log-probs and those of the reference and
computes token-level rewards, `compute_advantage` turns them into advantages, and `ppo_loss` applies them to logp and
sums over the tokens (`seq-mean-token-sum`); scores are the advantages of the audit on the last token. Distillation
takes ref_logp as the log-probs of the teacher, and no task reward; it has no clamp, as in verl's YAML file, unless the
name says so. Its `forward_kl_topk` needs whole distributions,
which a batch of the audit does not have: a separate test checks what it descends, and
`klgrad advise verl --divergence forward` reports it.
"""

from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from ..verl.declaration import VerlObjective, term_of
from ..verl.loss import KLLoss, lowered_advantages, rollout_of_step
from .harness import Critic, instead, load, scores, untrained

# pyright: reportMissingImports=false
# (it is audited in an environment of its own)


TYPES = ("low_var_kl", "low_var_kl+", "kl", "kl+", "mse", "abs")
ADVANTAGES = ("grpo", "grpo without std", "rloo", "reinforce_plus_plus", "gae critic=0")
WHITENED = ("reinforce_plus_plus", "gae critic=0")
"""Advantages normalised over the whole batch; the others use one group at a time."""

REFUSED = ("k1", False)
"""Distillation by differentiating k1, which has no effect: the configuration of verl rejects it."""

DATACLASS_CLAMP = 10.0
"""`loss_max_clamp` of verl's `DistillationLossConfig`; its YAML file, which `main_ppo` reads, sets none."""

TOKEN_MEAN, SUM = "token-mean", "seq-mean-token-sum"
MEANS_OVER_ROWS = (SUM, "seq-mean-token-sum-norm", "seq-mean-token-mean")
"""Reductions of which a batch is the mean of its rows; `token-sum` is a sum, and `token-mean` divides by all tokens."""


def subjects() -> list[Subject]:
    """In the loss: every type, and the default reduction. Otherwise: every setting that changes the verdict.

    The last ones are verl with klgrad; the others are verl alone.
    """
    default = [in_loss(kind, TOKEN_MEAN) for kind in ("low_var_kl", "low_var_kl+")]
    by_type = [in_loss(kind, SUM) for kind in TYPES]
    in_rewards = [in_reward(*setting) for setting in product(("kl", "low_var_kl"), ADVANTAGES)]
    distilled = [_distilled(*setting) for setting in product(("k1", "k2", "k3"), (True, False)) if setting != REFUSED]
    distilled += [_distilled("k1", True, clamp=DATACLASS_CLAMP), _distilled("k2", False, clamp=DATACLASS_CLAMP)]
    return [*default, *by_type, *in_rewards, *distilled, *declared_subjects()]


def in_loss(kind: str, reduction: str) -> Subject:
    """The KL in the loss, by verl's `ppo_loss`.

    Args:
        kind: `kl_loss_type`.
        reduction: `loss_agg_mode`.
    """
    from verl.workers.utils.losses import ppo_loss

    def loss(batch: Batch) -> Tensor:
        config = actor(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, loss_agg_mode=reduction)
        return ppo_loss(config, *micro_batch(batch, batch.advantages))[0]

    name = f"verl use_kl_loss kl_loss_type={kind} loss_agg_mode={reduction}"
    return Subject(name, "framework", loss, framework="verl", stacks=reduction in MEANS_OVER_ROWS)


def in_reward(kind: str, advantage: str, *, lam: float = 1.0, critic: Critic = untrained) -> Subject:
    """The KL in the reward, by the functions of the trainer.

    Args:
        kind: `kl_penalty`.
        advantage: one of `ADVANTAGES`.
        lam: λ of GAE.
        critic: the value function of GAE.
    """
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.workers.utils.losses import ppo_loss

    trainer, algorithm = _ray_trainer(), AlgoConfig()

    def loss(batch: Batch) -> Tensor:
        data = _proto(batch, critic(batch))
        data, _ = trainer.apply_kl_penalty(data, FixedKLController(1.0), kl_penalty=kind)
        data = trainer.compute_advantage(
            data,
            advantage.split()[0],
            lam=lam,
            norm_adv_by_std_in_grpo="without std" not in advantage,
            config=algorithm,
        )
        return ppo_loss(actor(loss_agg_mode=SUM), *micro_batch(batch, data.batch["advantages"]))[0]

    name = f"verl use_kl_in_reward kl_penalty={kind} adv_estimator={advantage}"
    whitened = advantage in WHITENED
    better = instead(k1="" if kind == "kl" else "kl_penalty=kl", unwhitened="adv_estimator=rloo" if whitened else "")
    return Subject(name, "framework", loss, framework="verl", stacks=not whitened, instead=better)


def _distilled(mode: str, policy_gradient: bool, clamp: float | None = None) -> Subject:
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    def loss(batch: Batch) -> Tensor:
        chosen = DistillationLossConfig(
            loss_mode=mode, use_policy_gradient=policy_gradient, use_task_rewards=False, loss_max_clamp=clamp
        )
        config = DistillationConfig(distillation_loss=chosen)
        output, data = micro_batch(batch, batch.advantages)
        data["teacher_logprobs"] = teacher_log_probs(batch)
        return distillation_ppo_loss(actor(loss_agg_mode=SUM), config, output, data)[0]

    clamped = "" if clamp is None else f" loss_max_clamp={clamp:g}"
    name = f"verl distillation loss_mode={mode} use_policy_gradient={policy_gradient}{clamped}"
    return Subject(name, "framework", loss, framework="verl", stacks=True)


def teacher_log_probs(batch: Batch) -> Tensor:
    """ref_logp as verl's teacher returns its log-probs: nested, one per token of prompt and response."""
    lengths = torch.nn.functional.pad((batch.mask.sum(-1) + 1).cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(_unpadded(batch.ref_logp, batch.mask)[:, None], lengths)


def actor(**settings: Any) -> Any:
    """The configuration of an actor."""
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, **settings)


def micro_batch(
    batch: Batch, advantages: Tensor, *, tokens: int | None = None, **more: Tensor
) -> tuple[dict[str, Tensor], Any]:
    """Model output and data as a worker passes them to a loss.

    Args:
        batch: the completions.
        advantages: one per token.
        tokens: the tokens of the whole batch, by which a mean over tokens divides; None for those of this one.
        more: tensors that replace those of the batch.
    """
    from verl.utils import tensordict_utils

    mask = batch.mask.to(batch.logp.dtype)
    ones = torch.ones_like(batch.mask, dtype=torch.long)
    tensors = {
        "prompts": ones[:, :1],
        "responses": ones,
        "attention_mask": torch.cat([ones[:, :1], batch.mask.long()], 1),
        "response_mask": mask,
        "old_log_probs": batch.old_logp,
        "ref_log_prob": batch.ref_logp,
        "advantages": advantages,
        **more,
    }
    data = tensordict_utils.get_tensordict(
        tensors, non_tensor_dict={"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": None}
    )
    return {"log_probs": _unpadded(batch.logp, batch.mask)}, data


def _unpadded(per_token: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to one row of prompt and response tokens; verl reads each log-prob one position to the left."""
    kept = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return torch.cat([per_token, torch.zeros_like(per_token[:, :1])], 1)[kept]


@cache
def _ray_trainer() -> Any:
    """The file of the trainer; its rollout server, which needs packages that verl does not install, is replaced."""
    return load("verl", "verl/trainer/ppo/ray_trainer.py", stand_ins=("verl.workers.rollout.llm_server",))


def _proto(batch: Batch, values: Tensor) -> Any:
    from verl.protocol import DataProto

    return DataProto.from_dict(
        {
            "response_mask": batch.mask.to(batch.logp.dtype),
            "token_level_scores": scores(batch),
            "old_log_probs": batch.old_logp,
            "ref_log_prob": batch.ref_logp,
            "values": values,
        },
        non_tensors={"uid": batch.group.numpy()},
    )


# verl: its policy losses by its own `ppo_loss`, and its corrections for a sampler that is another program.
#
# The advantages are those of the audit, on every token, as an advantage estimator would deliver them; the reduction is
# verl's default, a mean over the tokens of the batch. Without a correction the sampler is the policy before the update
# (`old_log_probs`). With `rollout_correction` it is the inference engine, and `old_log_probs` are those of the policy,
# as on the first update after a rollout; the mean is over the tokens before a rejection, as in the default trainer
# (`trainer.use_v1`). That trainer has no `policy_loss.loss_mode=bypass_mode` of its own accord: with
# `algorithm.rollout_correction.bypass_mode` alone it keeps the mode that is set, `vanilla` by default, with the log-
# probs of the engine as `old_log_probs`. `clip_cov` and `kl_cov` choose their tokens at random, and are left out, as
# are all `rollout_rs` but one.

# pyright: reportMissingImports=false
# (it is audited in an environment of its own)


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


# verl with klgrad: the KL that is declared under `klgrad`, by the functions that its trainers and workers call.
#
# In the loss, `KLLoss` wraps verl's own `ppo_loss`, on a micro-batch in the layout of the workers; the rollout engine
# is the sampler. In the advantage, the coefficient is subtracted from the advantages, which verl's own `ppo_loss`
# applies on the first update on a batch: the log-probs before the update are those of the policy, and the sampler is
# the engine.

# pyright: reportMissingImports=false
# (it is audited in an environment of its own)


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


def _in_loss(declaration: VerlObjective, reduction: str, batch: Batch) -> Tensor:
    from verl.workers.utils.losses import ppo_loss

    wrapped = KLLoss(partial(ppo_loss, config=actor(loss_agg_mode=reduction)), declaration)
    output, data = micro_batch(batch, batch.advantages, rollout_log_probs=batch.behavior_logp)
    if declaration.from_teacher:
        del data["ref_log_prob"]  # which verl has not computed then
        data["teacher_logprobs"] = teacher_log_probs(batch)
    return wrapped(output, data)[0]


def _in_advantage(declaration: VerlObjective, reduction: str, batch: Batch) -> Tensor:
    from verl.workers.utils.losses import ppo_loss

    old = batch.logp.detach()
    step = {
        "old_log_probs": old,
        "rollout_log_probs": batch.behavior_logp,
        "ref_log_prob": batch.ref_logp,
        "response_mask": batch.mask,
    }
    rollout = rollout_of_step(step, batch.group.tolist())
    lower = lowered_advantages(declaration.term, declaration.coef, rollout, batch.advantages)
    return ppo_loss(actor(loss_agg_mode=reduction), *micro_batch(batch, lower, old_log_probs=old))[0]
