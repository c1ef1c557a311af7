"""AReaL: the KL in the reward (`actor.kl_ctl`, on by default), and its two losses of distillation.

In the reward, `PPOActor` turns log-probs at sampling and those of the reference into advantages by
`_compute_advantages`, and `grpo_loss_fn` applies them to logp and averages over the tokens of the batch. The sequences
have one prompt token, scores are the advantages of the audit, and there is no critic. Log-probs at sampling are those
of the inference engine, as by default. Distillation takes ref_logp as the log-probs of the teacher: by default
(`teacher.rl_loss_weight=1.0`) their difference is added to the loss, at 0 it is the loss. Only the files of the actor
are loaded, with the package's own configuration.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .framework import Default, Framework
from .harness import instead, load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

STAND_INS = ("uvloop", "einops", "numba")
FILES = (
    *("engine.fsdp_utils.attn_impl", "utils.constants", "utils.seqpack", "api.cli_args"),
    *("utils.data", "utils.functional.functional", "trainer.ppo.actor"),
)

DEFAULT = "areal kl_ctl kl_estimator=k1"


def subjects() -> list[Subject]:
    """In the reward: every estimator, and whitening. Then both kinds of distillation."""
    return [
        *(in_reward(kind) for kind in ("k1", "k2", "k3")),
        in_reward("k1", whitened=True),
        *(distilled(weight) for weight in (1.0, 0.0)),
    ]


def in_reward(kind: str, *, whitened: bool = False, has_reference: bool = True) -> Subject:
    """The KL in the reward.

    Args:
        kind: `actor.kl_estimator`.
        whitened: whether `actor.adv_norm` divides by the standard deviation of the batch.
        has_reference: whether the configuration has `ref`; without it the actor takes zeros for its log-probs.
    """
    norm = modules()["cli_args"].NormConfig(mean_level="batch", std_level="batch") if whitened else None
    config = _config(kl_ctl=1.0, kl_estimator=kind, adv_norm=norm)
    actor = modules()["actor"].PPOActor(config, None)

    def loss(batch: Batch) -> Tensor:
        data = _trajectories(batch)
        if not has_reference:
            del data["ref_logp"]
        return _loss(config, batch, actor._compute_advantages(data))

    name = f"areal kl_ctl kl_estimator={kind}{' adv_norm.std_level=batch' if whitened else ''}"
    k1, unwhitened = "" if kind == "k1" else "actor.kl_estimator=k1", "actor.adv_norm=null" if whitened else ""
    return subject("areal", name, loss, instead=instead(k1=k1, unwhitened=unwhitened))


def distilled(rl_loss_weight: float) -> Subject:
    """Distillation with `teacher.distill_loss_weight` = 1; without advantages the loss of RL is 0."""
    config = _config()

    def loss(batch: Batch) -> Tensor:
        weights = {"rl_loss_weight": rl_loss_weight, "distill_loss_weight": 1.0}
        data = {"logprobs": batch.old_logp, "advantages": batch.advantages, "loss_mask": batch.mask}
        data |= {"prox_logp": batch.old_logp, "teacher_logp": batch.ref_logp, **weights}
        return _grpo_loss(config, batch.logp, data)

    return subject("areal", f"areal teacher.rl_loss_weight={rl_loss_weight:g}", loss)


def _trajectories(batch: Batch) -> dict[str, Tensor]:
    """Sequences with one prompt token; the log-probs of the reference are one to the left already, as in AReaL."""
    from torch.nn.functional import pad

    mask = batch.mask.to(batch.logp.dtype)
    return {
        "input_ids": pad(batch.tokens, (1, 0)),
        "attention_mask": pad(mask, (1, 0), value=1.0),
        "loss_mask": pad(mask, (1, 0)),
        "logprobs": pad(batch.old_logp, (1, 0)),
        "ref_logp": pad(batch.ref_logp, (0, 1)),
        "rewards": batch.advantages[:, 0],
    }


def _loss(config: Any, batch: Batch, data: dict[str, Tensor]) -> Tensor:
    from torch.nn.functional import pad

    return _grpo_loss(config, pad(batch.logp, (0, 1)), data)


def _grpo_loss(config: Any, logp: Tensor, data: dict[str, Any]) -> Tensor:
    return modules()["actor"].grpo_loss_fn(
        logp,
        logp.new_zeros(logp.shape),
        data,
        eps_clip=config.eps_clip,
        eps_clip_higher=config.eps_clip_higher,
        c_clip=config.c_clip,
    )


def _config(**settings: Any) -> Any:
    return modules()["cli_args"].PPOActorConfig(backend="fsdp:d1", **settings)


@cache
def modules() -> dict[str, ModuleType]:
    """The loaded files by name; each can import those before it."""
    loaded: dict[str, ModuleType] = {}
    for name in FILES:
        path = f"areal.{name}".replace(".", "/") + ".py"
        public = name.removesuffix(".functional") if name.count(".") == 2 else name
        loaded[f"areal.{public}"] = load("areal", path, stand_ins=STAND_INS, replaced=("areal",), loaded=loaded)
    return {name.rpartition(".")[2]: module for name, module in loaded.items()}


FRAMEWORK = Framework(
    "areal",
    "areal",
    "1.0.4",
    subjects,
    Default("k1 in the reward, kl_ctl=0.1", DEFAULT),
    caveats=(
        "`kl_ctl` is 0.1 by default. In a configuration without `ref` it multiplies the log-probs of the policy "
        "itself, which is an entropy bonus.",
        "With its default, `teacher.rl_loss_weight=1.0`, distillation adds the log-ratio to the teacher to the loss: "
        "the teacher is scored, and has no effect on the gradient.",
    ),
)
