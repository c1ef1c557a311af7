"""AReaL: the KL in the reward (`actor.kl_ctl`, on by default), and its two losses of distillation.

In the reward, `PPOActor` turns log-probs at sampling and those of the reference into advantages by
`_compute_advantages`, and `grpo_loss_fn` applies them to logp and averages over the tokens of the batch. The sequences
have one prompt token, scores are the advantages of the audit, and there is no critic. Log-probs at sampling are those
of the inference engine, as by default. Distillation takes ref_logp as the log-probs of the teacher: by default
(`teacher.rl_loss_weight=1.0`) their difference is added to the loss, at 0 it is the loss. Only the files of the actor
are loaded, with the package's own configuration.
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .formulae import OVER_TOKENS, AsLoss, InReward, part_of, ratio_of
from .framework import Framework
from .harness import load, subject
from .run_settings import EARLIER, SEVERAL, KLPart, Reader, Run, Why, under

if TYPE_CHECKING:
    from ..targets import Verdict
    from .harness import Batch, Subject, Tensor

STAND_INS = ("uvloop", "einops", "numba")
FILES = (
    *("areal.engine.fsdp_utils.attn_impl", "areal.utils.constants", "areal.utils.seqpack", "areal.api.cli_args"),
    *("areal.utils.data", "areal.utils.functional:areal/utils/functional/functional", "areal.trainer.ppo.actor"),
)


def subjects() -> list[Subject]:
    """In the reward: every estimator, and whitening. Then both kinds of distillation."""
    return [
        *(in_reward(kind) for kind in ("k1", "k2", "k3")),
        in_reward("k1", whitened=True),
        *(distilled(weight) for weight in (1.0, 0.0)),
    ]


def in_reward(kind: str, *, whitened: bool = False, has_reference: bool = True) -> Subject:
    """The KL in the reward; `whitened` by `actor.adv_norm`. Without `ref` the actor takes zeros for its log-probs."""
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
    return subject(name, loss, k1=k1, unwhitened=unwhitened)


def distilled(rl_loss_weight: float) -> Subject:
    """Distillation with `teacher.distill_loss_weight` = 1; without advantages the loss of RL is 0."""
    config = _config()

    def loss(batch: Batch) -> Tensor:
        weights = {"rl_loss_weight": rl_loss_weight, "distill_loss_weight": 1.0}
        data = {"logprobs": batch.old_logp, "advantages": batch.advantages, "loss_mask": batch.mask}
        data |= {"prox_logp": batch.old_logp, "teacher_logp": batch.ref_logp, **weights}
        return _grpo_loss(config, batch.logp, data)

    return subject(f"areal teacher.rl_loss_weight={rl_loss_weight:g}", loss)


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


def _loss(config: object, batch: Batch, data: dict[str, Tensor]) -> Tensor:
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


def _config(**settings: object) -> object:
    return modules()["cli_args"].PPOActorConfig(backend="fsdp:d1", **settings)


@cache
def modules() -> dict[str, ModuleType]:
    """The loaded files by name."""
    return load("areal", *FILES, stand_ins=STAND_INS, replaced=("areal",))


# `actor`, `ref` and `teacher` of its configurations of GRPO, PPO and distillation.
#
# Without a reference, `kl_ctl` multiplies the log-prob of the policy itself: `compute_advantages` takes zeros for the
# missing log-probs.

ACTOR, TEACHER = "actor.", "teacher."
KNOWN: dict[str, object] = {
    **under(ACTOR, kl_ctl=0.1, kl_estimator="k1", discount=1.0, gae_lambda=1.0, gae_timestep_unit="token"),
    **under(f"{ACTOR}adv_norm.", std_level=""),
    **under(ACTOR, ppo_n_minibatches=4),
    **under(TEACHER, rl_loss_weight=1.0, distill_loss_weight=0.005),
    "rollout.max_head_offpolicyness": 0,
}
"""The defaults of `PPOActorConfig` and `TeacherConfig`; that of a level of normalisation stands for none."""

HARMLESS = (
    *(f"{ACTOR}optimizer.", f"{TEACHER}train.", f"{TEACHER}rollout."),
    *("critic.", "ref.", "valid_dataset.", "sglang."),
)
LEVELS = ("", "batch", "group")
NO_REFERENCE = (
    "There is no ref: with kl_ctl > 0 AReaL takes 0 for its log-probs, and rewards -kl_ctl log π of every token, "
    "which is an entropy bonus."
)
JOINT = "k1 as a loss: the teacher is scored, and its log-probs are in no gradient"


def _to_teacher(batch: Batch) -> Tensor:
    """The loss of pure distillation: π/π_old times the log-ratio to the teacher, without its gradient."""
    return (batch.logp - batch.ref_logp).detach() * ratio_of(batch)


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the configuration, with AReaL's defaults for what is missing."""
    has_norm = any(name.startswith(f"{ACTOR}adv_norm.") for name in given)
    level = given.get(f"{ACTOR}adv_norm.std_level", "batch" if has_norm else "")
    plain = {**given, f"{ACTOR}adv_norm.std_level": "" if level in (None, "null") else level}
    run = Run("areal", plain, KNOWN, ACTOR, TEACHER)
    run.given = [name for name in run.given if name in given]
    has_ref, has_teacher = (any(name.startswith(section) for name in given) for section in ("ref.", TEACHER))
    target: Verdict | None = "reverse-kl-token" if has_teacher else "reverse-kl-sequence"
    if run["kl_ctl"] and has_ref:
        run.parts, target = [_read_reward(run)], "reverse-kl-sequence"
    elif run["kl_ctl"]:
        target = target if has_teacher else None
        run.notes.append(NO_REFERENCE)
        run.change("kl_ctl", 0.0, "without a ref it is an entropy bonus; or add a ref section")
    elif not has_teacher:
        run.change("kl_ctl", 0.1, "at 0 no reference is loaded, and there is no KL")
    if has_teacher and run["distill_loss_weight"]:
        run.parts.append(_read_teacher(run))
        if not run["rl_loss_weight"] and run["kl_ctl"] and f"{ACTOR}kl_ctl" in given:
            run.unread[f"{ACTOR}kl_ctl"] = "rl_loss_weight=0 replaces the loss that has its advantages"
    run.notes += [Why.TWO_REFERENCES] * (len(run.parts) > 1)
    run.is_stale_by("ppo_n_minibatches", SEVERAL, least=2)
    run.is_stale_by("rollout.max_head_offpolicyness", EARLIER)
    run.is_sampled_by("an inference engine")
    return run.of("PPOActor", target)


def _read_reward(run: Run) -> KLPart:
    kind = run.one_of("kl_estimator", ("k1", "k2", "k3"))
    level = run.one_of("adv_norm.std_level", LEVELS)
    run.one_of("gae_timestep_unit", ("token",))
    run.change("kl_estimator", "k1", Why.ONLY_K1)
    if level:
        run.change("adv_norm.std_level", None, Why.BATCH_STD if level == "batch" else Why.GROUP_STD)
    discount = run["discount"] * run["gae_lambda"]
    for name in ("discount", "gae_lambda") if discount != 1 else ():
        run.change(name, 1.0, "the KL of later tokens is discounted")
    form = InReward(kind, discount=discount, clamp=10.0, whitened=level == "batch")
    caveat = "Audited with a critic that is 0."
    caveat += " Its division by the group's standard deviation is left out." * (level == "group")
    name = f"actor.kl_estimator={kind} discount={discount:g} adv_norm.std_level={level or 'null'}"
    return part_of("areal", name, form, OVER_TOKENS, run["kl_ctl"], caveat)


def _read_teacher(run: Run) -> KLPart:
    beta, caveat = run["distill_loss_weight"], "ref is the teacher here."
    if run["rl_loss_weight"] == 0:
        return part_of("areal", "teacher.rl_loss_weight=0", _to_teacher, OVER_TOKENS, beta, caveat)
    why = f"{JOINT}. At 0 the loss is distillation alone, with the right gradient; a mix of both has no setting"
    run.change("rl_loss_weight", 0.0, why)
    return part_of("areal", "teacher.rl_loss_weight>0", AsLoss("k1"), OVER_TOKENS, beta, caveat)


FRAMEWORK = Framework.of(
    "areal",
    subjects,
    reader=Reader(
        "AReaL",
        KNOWN,
        read_config,
        re.compile(r"areal\..*"),
        beginnings=(
            "gconfig.",
            "actor.kl_ctl",
            "actor.eps_clip",
            "actor.ppo_n_minibatches",
            "teacher.distill_loss_weight",
        ),
        harmless=HARMLESS,
    ),
)
