"""verl: its `ppo_loss` with the KL in the loss, the KL in the reward end to end, and its distillation losses.

Every loss is that of verl, called on a micro-batch in the layout of its workers: log-probs of prompt and response
without padding, with one prompt token each. In the loss (`use_kl_loss`) the advantages are those of the audit, zero by
default. In the reward (`use_kl_in_reward`) `apply_kl_penalty` takes the old log-probs and those of the reference and
computes token-level rewards, `compute_advantage` turns them into advantages, and `ppo_loss` applies them to logp and
sums over the tokens (`seq-mean-token-sum`); scores are the advantages of the audit on the last token. Distillation
takes ref_logp as the log-probs of the teacher, and no task reward; it has no clamp, as in verl's YAML file, unless the
name says so. A test of its own checks what its `forward_kl_topk` descends; `klgrad advise verl` says it.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

from ..errors import RunFileError
from .formulae import number_or_none
from .framework import Framework
from .harness import load, named, scores, subject, untrained
from .run_settings import ADAPTS, OTHER_PROGRAMS, SEVERAL, Change, KLPart, Reader, Run, Why, as_type, one_of, under

if TYPE_CHECKING:
    from ..targets import Verdict
    from ..verl.declaration import VerlObjective
    from .harness import Batch, Critic, Subject, Tensor

# pyright: reportMissingImports=false
# (it is audited in an environment of its own)


TYPES = ("low_var_kl", "low_var_kl+", "kl", "kl+", "mse", "abs")
ADVANTAGES = ("grpo", "grpo without std", "rloo", "reinforce_plus_plus", "gae critic=0")
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages that are whitened over the batch with the KL in them, read in the source of version 0.9.1.

`gdpo` is whitened too, but its rewards are those of `gdpo_reward_keys`, without the KL.
"""

REFUSED = ("k1", False)
"""Distillation by differentiating k1, which has no effect: the configuration of verl rejects it."""

DATACLASS_CLAMP = 10.0
"""`loss_max_clamp` of verl's `DistillationLossConfig`; its YAML file, which `main_ppo` reads, sets none."""

CLAMPED = (("k1", True), ("k2", False), ("k3", True))
"""Distillation that is audited with that clamp, too; the last are the defaults of that class."""

TOKEN_MEAN, SUM = "token-mean", "seq-mean-token-sum"
"""Reductions: over all tokens of the batch, and over the sums of its rows."""


def subjects() -> list[Subject]:
    """In the loss: every type, and the default reduction. Otherwise: every setting that changes the verdict.

    The last ones are verl with klgrad; the others are verl alone.
    """
    default = [in_loss(kind, TOKEN_MEAN) for kind in ("low_var_kl", "low_var_kl+")]
    by_type = [in_loss(kind, SUM) for kind in TYPES]
    in_rewards = [in_reward(*setting) for setting in product(("kl", "low_var_kl"), ADVANTAGES)]
    distilled = [_distilled(*setting) for setting in product(("k1", "k2", "k3"), (True, False)) if setting != REFUSED]
    distilled += [_distilled(*setting, clamp=DATACLASS_CLAMP) for setting in CLAMPED]
    return [*default, *by_type, *in_rewards, *distilled, *declared_subjects()]


def in_loss(kind: str, reduction: str) -> Subject:
    """The KL in the loss, by verl's `ppo_loss`: `kind` is its `kl_loss_type`, `reduction` its `loss_agg_mode`."""
    from verl.workers.utils.losses import ppo_loss

    def loss(batch: Batch) -> Tensor:
        config = actor(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, loss_agg_mode=reduction)
        return ppo_loss(config, *micro_batch(batch, batch.advantages))[0]

    return subject(f"verl use_kl_loss kl_loss_type={kind} loss_agg_mode={reduction}", loss)


def in_reward(kind: str, advantage: str, *, lam: float = 1.0, critic: Critic = untrained) -> Subject:
    """The KL in the reward, by the functions of the trainer: `kind` is its `kl_penalty`; one of `ADVANTAGES`."""
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
    unwhitened = "adv_estimator=rloo" if advantage.split()[0] in WHITENED else ""
    return subject(name, loss, k1="" if kind == "kl" else "kl_penalty=kl", unwhitened=unwhitened)


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
    return subject(f"verl distillation loss_mode={mode} use_policy_gradient={policy_gradient}{clamped}", loss)


def teacher_log_probs(batch: Batch) -> Tensor:
    """ref_logp as verl's teacher returns its log-probs: nested, one per token of prompt and response."""
    import torch

    lengths = torch.nn.functional.pad((batch.mask.sum(-1) + 1).cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(_unpadded(batch.ref_logp, batch.mask)[:, None], lengths)


def actor(**settings: object) -> Any:
    """The configuration of an actor."""
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, **settings)


def micro_batch(
    batch: Batch, advantages: Tensor, *, tokens: int | None = None, **more: Tensor
) -> tuple[dict[str, Tensor], Any]:
    """Model output and data as a worker passes them to a loss.

    `tokens` are those of the whole batch, by which a mean over tokens divides; None for those of this one. `more` are
    tensors that replace those of the batch.
    """
    import torch
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
    import torch

    kept = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return torch.cat([per_token, torch.zeros_like(per_token[:, :1])], 1)[kept]


@cache
def _ray_trainer() -> Any:
    """The file of the trainer; its rollout server, which needs packages that verl does not install, is replaced."""
    name, server = "verl.trainer.ppo.ray_trainer", "verl.workers.rollout.llm_server"
    return load("verl", name, stand_ins=(server,))["ray_trainer"]


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

MODES = ("vanilla", "gspo", "cispo", "sapo", "gpg", "dppo_tv", "dppo_kl", "geo_mean")
CORRECTIONS: tuple[dict[str, object], ...] = (
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


def policy_loss(mode: str, **settings: object) -> Subject:
    """The policy loss of a mode (`policy_loss.loss_mode`), with its settings."""
    from verl.workers.config import PolicyLossConfig

    config = PolicyLossConfig(loss_mode=mode, **settings)
    return subject(named("verl", {"loss_mode": mode, **settings}), lambda batch: _loss(batch, config))


def _corrected(**settings: object) -> Subject:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct
    from verl.workers.config import PolicyLossConfig

    def loss(batch: Batch) -> Tensor:
        old = batch.logp.detach()
        weights, mask, _ = correct(old, batch.behavior_logp, batch.mask.to(old.dtype), **settings)
        more = {} if weights is None else {"rollout_is_weights": weights.batch["rollout_is_weights"]}
        return _loss(batch, PolicyLossConfig(), old_log_probs=old, response_mask=mask, **more)

    return subject(named("verl rollout_correction", settings), loss)


def _bypassed(**settings: object) -> Subject:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config import PolicyLossConfig

    correction = RolloutCorrectionConfig(bypass_mode=True, **({"rollout_is": None} | settings))
    config = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction)
    return subject(named("verl loss_mode=bypass_mode", settings), lambda batch: _loss(batch, config))


def _loss(batch: Batch, policy_loss: Any, **tensors: Tensor) -> Tensor:
    from verl.workers.utils.losses import ppo_loss

    data = micro_batch(batch, batch.advantages, tokens=int(batch.mask.sum()), **tensors)
    return ppo_loss(actor(policy_loss=policy_loss), *data)[0]


# verl with klgrad: the KL that is declared under `klgrad`, by the functions that its trainers and workers call.
#
# In the loss, `KLLoss` wraps verl's own `ppo_loss`, on a micro-batch in the layout of the workers; the rollout engine
# is the sampler. In the advantage, the coefficient is subtracted from the advantages, which verl's own `ppo_loss`
# applies on the first update on a batch: the log-probs before the update are those of the policy, and the sampler is
# the engine.

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
    """A declaration in verl, by the settings under `klgrad`, with β = 1; `reduction` is verl's `loss_agg_mode`."""
    from ..verl.declaration import term_of

    declaration = term_of({"coef": 1.0, **node})
    loss = _in_advantage if declaration.in_advantage else _in_loss
    name = named("verl klgrad", {"placement": "loss", **node, "loss_agg_mode": reduction})
    return subject(name, partial(loss, declaration, reduction))


def _in_loss(declaration: VerlObjective, reduction: str, batch: Batch) -> Tensor:
    from verl.workers.utils.losses import ppo_loss

    from ..verl.loss import KLLoss

    wrapped = KLLoss(partial(ppo_loss, config=actor(loss_agg_mode=reduction)), declaration)
    output, data = micro_batch(batch, batch.advantages, rollout_log_probs=batch.behavior_logp)
    if declaration.from_teacher:
        del data["ref_log_prob"]  # which verl has not computed then
        data["teacher_logprobs"] = teacher_log_probs(batch)
    return wrapped(output, data)[0]


def _in_advantage(declaration: VerlObjective, reduction: str, batch: Batch) -> Tensor:
    from verl.workers.utils.losses import ppo_loss

    from ..verl.loss import lowered_advantages, rollout_of_step

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


# verl with klgrad: the settings under `klgrad` of a configuration file, as a KL to audit.

PREFIX = "klgrad."
NUMBERS = {"influence_bound": 1.0, "target": 1.0}
"""Settings that are absent by default, with a value of their type."""


def _read_declared(run: Run, mode: str) -> Verdict:
    """Add the declared KL, and what to change; the divergence that it declares."""
    from ..verl.declaration import VerlObjective, term_of

    types = {**asdict(VerlObjective()), **NUMBERS}
    shown = {name: value for name, value in run.values.items() if name.startswith(PREFIX)}
    plain = {name.removeprefix(PREFIX): value for name, value in shown.items()}
    node = {x: v if v is None else as_type(f"{PREFIX}{x}", v, types.get(x)) for x, v in plain.items()}
    declaration = term_of(node)
    reduction = SUM if declaration.reduction == "sequence" else mode
    settings = {name: value for name, value in node.items() if name not in ("coef", "target", "target_unit", "horizon")}
    if declaration.term.weighting is None:
        why = "the rollout engine differs from the policy, and more so on later updates"
        run.changes.append(Change(f"{PREFIX}ratio", "prefix", "none", why, optional=True))
    name = named("verl klgrad", {"placement": "loss", **settings, "loss_agg_mode": reduction})
    caveat = "Audited at the first update on a batch." if declaration.in_advantage else ""
    place = "advantage" if declaration.in_advantage else "loss"
    if declaration.over_entries:
        caveat = "Not audited: it is over the teacher's top k, from logits that the audit does not have."
    build = None if declaration.over_entries else partial(declared, settings, reduction)
    run.parts.append(KLPart(place, name, float(declaration.coef), build, caveat))
    run.settings |= shown
    run.given += shown
    return declaration.term.descends.on_policy


# verl: `actor_rollout_ref.actor`, `algorithm` and `data`.

ACTOR, ALGORITHM = "actor_rollout_ref.actor.", "algorithm."
DISTILLATION = "distillation."
TEACHER_LOSS = f"{DISTILLATION}distillation_loss."
KNOWN: dict[str, object] = {
    **under(ACTOR, use_kl_loss=False, kl_loss_type="low_var_kl", kl_loss_coef=0.001, loss_agg_mode=TOKEN_MEAN),
    **under(ALGORITHM, use_kl_in_reward=False, kl_penalty="kl"),
    f"{ALGORITHM}kl_ctrl.kl_coef": 0.001,
    **under(ALGORITHM, adv_estimator="gae", norm_adv_by_std_in_grpo=True),
    **under(ACTOR, ppo_epochs=1, ppo_mini_batch_size=256),
    "data.train_batch_size": 1024,
    f"{DISTILLATION}enabled": False,
    **under(TEACHER_LOSS, loss_mode="k3", use_policy_gradient=False, use_task_rewards=True),
    **under(TEACHER_LOSS, distillation_loss_coef=1.0, loss_max_clamp=None),
}
"""The defaults of the settings that matter; a test compares them with verl's."""

HARMLESS = (
    *(f"{ALGORITHM}kl_ctrl.{name}" for name in ("_target_", "type", "horizon", "target_kl")),
    *(f"{ACTOR}policy_loss.{name}" for name in ("kl_cov_ratio", "ppo_kl_coef", "dro_beta")),
    *(f"critic.kl_ctrl.{name}" for name in ("type", "kl_coef")),
)
"""What adapts β, policy losses, and settings of older releases that nothing reads."""

SAME = {"k1": "kl", "k1+": "kl+", "k2": "mse", "k2+": "mse", "mse+": "mse", "k3": "low_var_kl", "k3+": "low_var_kl+"}
"""Other names of the estimators."""

ESTIMATORS = ("kl", "kl+", "abs", "abs+", "mse", "low_var_kl", "low_var_kl+")
REVERSE = ("kl+", "abs+", "mse", "low_var_kl+")
"""Estimators whose gradient as a loss is that of k2."""

REDUCTIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the settings of a verl trainer, with verl's defaults for those that are missing."""
    run = Run("verl", given, KNOWN, ACTOR, ALGORITHM, TEACHER_LOSS)
    mode = run.one_of("loss_agg_mode", REDUCTIONS)
    in_reward, in_loss = run["use_kl_in_reward"], run["use_kl_loss"]
    declares, distils = any(name.startswith(PREFIX) for name in given), run[f"{DISTILLATION}enabled"]
    if in_loss or not (in_reward or declares or distils):
        run.parts += [_read_loss(run, mode)] * in_loss
    if in_reward:
        run.parts.append(_read_reward(run, mode))
    target: Verdict = "reverse-kl-sequence" if in_reward else "reverse-kl-token"
    own = sum(part.coefficient != 0 for part in run.parts) + distils
    run.notes += ["Both KLs are on: their gradients add up."] * (own > 1)
    if declares:
        target = _read_declared(run, mode)
    if distils:
        run.parts.append(_read_teacher(run))
        run.notes += [TOPK_DESCENDS] * (run["loss_mode"] == "forward_kl_topk")
    else:  # shown where there is a teacher
        run.settings = {x: v for x, v in run.settings.items() if not x.startswith(DISTILLATION) or x in given}
    if mode in ("seq-mean-token-mean", "token-mean"):
        optional = mode == "token-mean"
        run.change("loss_agg_mode", SUM, Why.MEAN_OVER_TOKENS if optional else Why.LENGTH, optional=optional)
    run.notes += [ADAPTS] * bool(in_reward and given.get(f"{ALGORITHM}kl_ctrl.type") == "adaptive")
    beside = "klgrad refuses to train beside a KL of verl's own: switch one of them off."
    run.notes += [beside] * bool(declares and (in_loss or in_reward))
    run.is_stale_above("ppo_mini_batch_size", "data.train_batch_size")
    run.is_stale_by("ppo_epochs", SEVERAL, least=2)
    run.is_sampled_by("an inference engine")
    return run.of("its actor", target)


def _read_teacher(run: Run) -> KLPart:
    """The KL to the teacher: as a loss, or as the advantage of each token (`use_policy_gradient`)."""
    told: str = run["loss_mode"]
    in_advantage = run["use_policy_gradient"]
    name, coefficient = f"{TEACHER_LOSS}distillation_loss_coef", 1.0
    kind = one_of(run.name_of("loss_mode"), TEACHER_MODES.get(told, told), ("k1", "k2", "k3", "abs", "forward_kl_topk"))
    clamp = number_or_none(run.values, f"{TEACHER_LOSS}loss_max_clamp", None)
    if run["use_task_rewards"]:
        coefficient = run[name]
    elif name in run.values:
        run.unread[name] = "without use_task_rewards it is 1"
    if kind == "k1" and not in_advantage:
        raise RunFileError("use_policy_gradient=True with k1", "k1 as a loss", "verl refuses it: it descends nothing")
    wanted = "k1" if in_advantage else "k2"
    if kind != wanted:
        why = Why.ONLY_K1 if in_advantage else Why.AS_LOSS.get(kind, TOPK if kind == "forward_kl_topk" else Why.K3)
        run.change("loss_mode", wanted, why)
    if clamp is not None:
        why = "values beyond it are cut" if in_advantage else "beyond it there is no gradient"
        run.changes.append(Change(f"{TEACHER_LOSS}loss_max_clamp", None, clamp, why))
    clamped = "" if clamp is None else f" loss_max_clamp={clamp:g}"
    loss = f"verl distillation loss_mode={kind} use_policy_gradient={in_advantage}{clamped}"
    caveat = f"ref is the teacher here. Audited with loss_agg_mode={SUM}."
    place = "advantage" if in_advantage else "loss"
    build = None if kind == "forward_kl_topk" else partial(_distilled, kind, in_advantage, clamp)
    return KLPart(place, loss, coefficient, build, caveat)


TEACHER_MODES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
TOPK_DESCENDS = (
    "loss_mode=forward_kl_topk descends the forward KL from the teacher restricted to its top k tokens, off by up to "
    "twice the probability left out. It has no gradient where its value is negative, which happens when the student "
    "gives those tokens more probability than the teacher; with use_policy_gradient=True it descends nothing."
)
TOPK = "the tail outside the teacher's top k is left out, and there is no gradient where the value is negative"


def _read_loss(run: Run, mode: str) -> KLPart:
    kind = _estimator(run, "kl_loss_type")
    run.switch_on("use_kl_loss", True, "without it verl has no KL")
    run.switch_on("kl_loss_coef", KNOWN[f"{ACTOR}kl_loss_coef"], "at 0 there is no KL")
    if kind not in REVERSE:
        run.change("kl_loss_type", "low_var_kl+", Why.AS_LOSS.get("k1" if kind == "kl" else kind, Why.CUT_K3))
    loss = f"verl use_kl_loss kl_loss_type={kind} loss_agg_mode={mode}"
    return KLPart("loss", loss, run["kl_loss_coef"], partial(in_loss, kind, mode))


def _read_reward(run: Run, mode: str) -> KLPart:
    kind = _estimator(run, "kl_penalty").rstrip("+")
    estimator, by_std = run["adv_estimator"], run["norm_adv_by_std_in_grpo"]
    run.switch_on("kl_ctrl.kl_coef", KNOWN[f"{ALGORITHM}kl_ctrl.kl_coef"], "at 0 there is no KL")
    if kind != "kl":
        run.change("kl_penalty", "kl", Why.ONLY_K1)
    if estimator == "grpo" and by_std:
        run.change("norm_adv_by_std_in_grpo", False, Why.GROUP_STD)
    elif estimator not in ("grpo", "rloo"):
        run.change("adv_estimator", "rloo", Why.BATCH_STD if estimator in WHITENED else Why.NOT_AUDITED)
    advantage = {"gae": "gae critic=0", "grpo": "grpo" if by_std else "grpo without std"}.get(estimator, estimator)
    loss = f"verl use_kl_in_reward kl_penalty={kind} adv_estimator={advantage}"
    caveat = "Audited with a critic that is 0." if estimator == "gae" else ""
    if mode not in (SUM, f"{SUM}-norm"):
        more = "is the same times the number of completions" if mode == "token-sum" else "divides by lengths as well"
        caveat = f"{caveat} Audited with loss_agg_mode={SUM}: {mode} {more}.".strip()
    return KLPart("reward", loss, run["kl_ctrl.kl_coef"], caveat=caveat)


def _estimator(run: Run, name: str) -> str:
    told: str = run[name]
    return one_of(run.name_of(name), SAME.get(told, told), ESTIMATORS)


FRAMEWORK = Framework.of(
    "verl",
    subjects,
    whole_losses=policy_losses,
    reader=Reader(
        "verl",
        KNOWN,
        read_config,
        re.compile(rf"{OTHER_PROGRAMS}((verl|recipe)[./](.*[./_])?|.*/)?main(_\w+)?(\.py)?"),
        beginnings=("actor_rollout_ref.", "algorithm."),
        harmless=HARMLESS,
        sections=(PREFIX,),
        elsewhere=re.compile(r"\$\{RAY\[@\]\}"),  # how its examples pass the settings of Ray
    ),
)
