"""SkyRL: the KL in the loss (`use_kl_loss`, the default), and in the reward (`use_kl_in_reward`) end to end.

In the loss, `compute_approx_kl` receives logp, ref_logp and the loss mask; the worker averages over the tokens of each
completion, then over completions, for every `loss_reduction`. In the reward, the methods of the trainer run in its
order: `apply_reward_kl_penalty` takes the log-probs at sampling and those of the reference,
`compute_advantages_and_returns` and `_normalize_advantages` turn the rewards into advantages, and the policy loss
applies them to logp. Scores are the advantages of the audit on the last token, and `loss_reduction` is
`seq_mean_token_sum_norm` unless the name contains `token_mean`. With `tis` (`tis_ratio_type`) the sampler is the
inference engine, and the log-probs before the update are those of the policy, as on the first update after a rollout;
`uncapped` has a `sequence_tis_ratio_clip_high` that is never reached. That correction does not affect the KL in the
loss. The package does not import on every Python version, so only its files are loaded.
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import RunFileError
from .framework import Framework
from .harness import bare, load, named, scores, standing_in, subject, untrained
from .run_settings import ADAPTS, OTHER_PROGRAMS, SEVERAL, KLPart, Reader, Run, Why, under

if TYPE_CHECKING:
    from .harness import Batch, Critic, Subject, Tensor

STAND_INS = (
    *("jaxtyping", "loguru", "omegaconf", "ray", "skyrl_gym", "tqdm", "transformers", "yaml"),
    *("skyrl.backends", "skyrl.env_vars", "skyrl.train"),
)
TRAIN = "skyrl.backends.skyrl_train"
FILES = (
    "skyrl.train.config:skyrl/train/config/config",
    *(f"{TRAIN}.utils.{name}" for name in ("torch_utils", "off_policy_correction_utils", "ppo_utils")),
    f"{TRAIN}.training_batch",
    "skyrl.train.trainer",
)

ADVANTAGES = ("grpo", "grpo without std", "rloo", "maxrl", "reinforce++", "gae critic=0")
WHITENED = ("gae", "reinforce++")
"""Advantages that are whitened over the batch with the KL in them, by the audits of version 0.4.0. The others use one
group at a time."""

TOKEN_MEAN, SUM = "token_mean", "seq_mean_token_sum_norm"
CORRECTIONS: dict[str, dict[str, object]] = {
    "tis=token": {"tis_ratio_type": "token"},
    "tis=sequence": {"tis_ratio_type": "sequence"},
    "tis=sequence uncapped": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1e9},
}


def subjects() -> list[Subject]:
    """In the loss: every estimator. In the reward: the defaults, then every setting that changes the verdict."""
    in_loss = [_in_loss(estimator) for estimator in ("k3", "k1", "k2", "abs")]
    averaged = [in_reward("k3", "grpo", TOKEN_MEAN), in_reward("k1", "rloo", TOKEN_MEAN)]
    by_advantage = [in_reward("k1", advantage) for advantage in ADVANTAGES]
    by_estimator = [in_reward(estimator, "rloo") for estimator in ("k3", "k2", "abs")]
    corrected = [in_reward("k1", "rloo", correction) for correction in CORRECTIONS]
    return [*in_loss, *averaged, *by_advantage, *by_estimator, *corrected]


def _in_loss(estimator: str) -> Subject:
    kl, mean = modules()["ppo_utils"].compute_approx_kl, modules()["torch_utils"].masked_mean

    def loss(batch: Batch) -> Tensor:
        mask = batch.mask.to(batch.logp.dtype)
        per_token = kl(batch.logp, batch.ref_logp, loss_mask=mask, kl_estimator_type=estimator)
        return mean(per_token, mask, dim=-1).mean()

    return subject(f"skyrl use_kl_loss kl_estimator_type={estimator}", loss)


def in_reward(
    estimator: str, advantage: str, more: str = "", *, lambd: float = 1.0, critic: Critic = untrained
) -> Subject:
    """The KL in the reward, by the methods of the trainer; `more` is `TOKEN_MEAN` or one of `CORRECTIONS`."""
    trainer = _trainer(estimator, advantage, lambd, more)
    policy_loss = modules()["ppo_utils"].ppo_policy_loss

    def loss(batch: Batch) -> Tensor:
        old_logp = batch.logp.detach() if more in CORRECTIONS else batch.old_logp
        data = _training_batch(batch, old_logp, critic(batch))
        with standing_in(("loguru",)):  # which RLOO imports when it is called
            data = trainer.compute_advantages_and_returns(trainer.apply_reward_kl_penalty(data))
        advantages = trainer._normalize_advantages(data, [(0, len(batch.logp))])["advantages"]
        return policy_loss(
            batch.logp,
            old_logp,
            advantages,
            trainer.cfg.trainer.algorithm,
            loss_mask=data["loss_mask"],
            rollout_logprobs=batch.behavior_logp,
        )[0]

    name = f"skyrl use_kl_in_reward estimator={estimator} advantage={advantage} {more}".rstrip()
    unwhitened = "advantage_estimator=rloo" if advantage.split()[0] in WHITENED else ""
    return subject(name, loss, k1="" if estimator == "k1" else "kl_estimator_type=k1", unwhitened=unwhitened)


@cache
def modules() -> dict[str, ModuleType]:
    """The loaded files by name."""
    return load("skyrl", *FILES, stand_ins=STAND_INS)


def _trainer(estimator: str, advantage: str, lambd: float, more: str) -> Any:
    """A trainer with what these methods read: a configuration and the controller of β."""
    config = modules()["config"]
    algorithm = config.AlgorithmConfig(
        use_kl_loss=False,
        use_kl_in_reward=True,
        kl_loss_coef=1.0,
        kl_estimator_type=estimator,
        advantage_estimator=advantage.split()[0],
        grpo_norm_by_std="without std" not in advantage,
        lambd=lambd,
        loss_reduction=TOKEN_MEAN if more == TOKEN_MEAN else SUM,
        max_seq_len=1,  # divides the sum of scores and KL
        off_policy_correction=config.OffPolicyCorrectionConfig(**CORRECTIONS.get(more, {})),
    )
    settings = SimpleNamespace(
        trainer=SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=1),
        generator=SimpleNamespace(step_wise_trajectories=False),
    )
    controller = modules()["ppo_utils"].get_kl_controller(algorithm)
    trainer = modules()["trainer"].RayPPOTrainer
    return bare(trainer, cfg=settings, reward_kl_controller=controller, all_metrics={})


def _training_batch(batch: Batch, old_logp: Tensor, values: Tensor) -> Any:
    mask = batch.mask.to(batch.logp.dtype)
    tensors = {
        "loss_mask": mask,
        "response_mask": mask,
        "rewards": scores(batch),
        "action_log_probs": old_logp,
        "base_action_log_probs": batch.ref_logp,
        "values": values,
    }
    data = modules()["training_batch"].TrainingInputBatch(tensors)
    data.metadata = {"uids": batch.group.tolist(), "avg_response_length": float(mask.sum(-1).mean())}
    return data


# SkyRL: the policy losses of its registry, and its corrections for a sampler that is another program.
#
# The advantages are those of the audit, on every token, reduced as by the trainer (`loss_reduction=token_mean`, the
# default). Without a correction the sampler is the policy before the update. With one (`off_policy_correction`) it is
# the inference engine, and the log-probs before the update are those of the policy, as on the first update after a
# rollout. `rollout_is` and `dppo` compare with the inference engine themselves. `clip_cov` and `kl_cov` choose their
# tokens at random, and `cross_entropy` is no policy loss: they are left out.

TYPES = ("regular", "dual_clip", "gspo", "cispo", "sapo", "rollout_is", "dppo", "importance_sampling")
POLICY_CORRECTIONS: tuple[dict[str, object], ...] = (
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "sequence"},
    {"sequence_mask_metric": "product"},
    {"sequence_mask_metric": "geometric"},
)


def policy_losses() -> list[Subject]:
    """The types of loss, and the kinds of correction with the default type."""
    return [
        *(policy_loss(kind) for kind in TYPES),
        *(policy_loss("regular", **settings) for settings in POLICY_CORRECTIONS),
    ]


def policy_loss(kind: str, **correction: object) -> Subject:
    """The loss of a type (`policy_loss_type`), with these settings of `off_policy_correction`."""
    config, utils = modules()["config"], modules()["ppo_utils"]
    algorithm = config.AlgorithmConfig(
        policy_loss_type=kind, off_policy_correction=config.OffPolicyCorrectionConfig(**correction)
    )
    function = utils.PolicyLossRegistry.get(kind)

    def loss(batch: Batch) -> Tensor:
        mask = batch.mask.to(batch.logp.dtype)
        advantages = utils.apply_loss_reduction_to_advantages_minibatch(
            batch.advantages, mask, algorithm.loss_reduction, len(mask), mask.shape[1]
        )
        old = batch.logp.detach() if correction else batch.old_logp
        with standing_in(("loguru",)):  # which some losses import when they are called
            return function(
                batch.logp, old, advantages, algorithm, loss_mask=mask, rollout_logprobs=batch.behavior_logp
            )[0]

    return subject(named("skyrl", {"policy_loss_type": kind, **correction}), loss)


# SkyRL: `trainer.algorithm` and the sizes of its batches.

ALGORITHM = "trainer.algorithm."
KNOWN: dict[str, object] = {
    **under(ALGORITHM, use_kl_loss=True, use_kl_in_reward=False, kl_loss_coef=0.001, kl_estimator_type="k3"),
    **under(ALGORITHM, advantage_estimator="grpo", grpo_norm_by_std=True, loss_reduction=TOKEN_MEAN),
    **under("trainer.", train_batch_size=1024, policy_mini_batch_size=256, update_epochs_per_batch=1),
}
"""The defaults of the settings that matter, read in the source of version 0.4.0."""

HARMLESS = tuple(f"{ALGORITHM}{name}" for name in ("kl_ctrl.type", "kl_ctrl.kl_target", "kl_ctrl.horizon")) + tuple(
    f"{ALGORITHM}kl_cov.{name}" for name in ("kl_cov_frac", "ppo_kl_coef")
)
"""What adapts β, and a policy loss."""


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the settings of a SkyRL trainer, with SkyRL's defaults for those that are missing."""
    run = Run("skyrl", given, KNOWN, ALGORITHM)
    in_reward, in_loss = run["use_kl_in_reward"], run["use_kl_loss"]
    if in_reward and in_loss:
        received, remedy = "both (use_kl_loss is on by default)", "switch one off: SkyRL refuses both"
        raise RunFileError("use_kl_loss or use_kl_in_reward", received, remedy)
    run.is_stale_above("trainer.policy_mini_batch_size", "trainer.train_batch_size")
    run.is_stale_by("trainer.update_epochs_per_batch", SEVERAL, least=2)
    run.is_sampled_by("an inference engine")
    estimator = run.one_of("kl_estimator_type", ("k1", "k2", "k3", "abs"))
    if not in_reward:
        run.switch_on("use_kl_loss", True, "without it SkyRL has no KL")
    run.switch_on("kl_loss_coef", 0.001, "at 0 there is no KL")
    if in_reward:
        run.parts.append(_read_reward(run, estimator))
        run.notes += [ADAPTS] * (given.get(f"{ALGORITHM}kl_ctrl.type") == "adaptive")
        return run.of("its trainer", "reverse-kl-sequence")
    run.change("kl_estimator_type", "k2", Why.AS_LOSS.get(estimator, Why.CUT_K3))
    part = KLPart("loss", f"skyrl use_kl_loss kl_estimator_type={estimator}", run["kl_loss_coef"])
    run.parts += [part] * in_loss
    run.notes.append(
        "SkyRL divides a KL in the loss by the length of each completion, for every loss_reduction: no setting is "
        "the reverse KL where lengths vary. `klgrad advise skyrl --level token` has code that is."
    )
    return run.of("its trainer", "reverse-kl-token")


def _read_reward(run: Run, estimator: str) -> KLPart:
    kind, mode, by_std = (run[x] for x in ("advantage_estimator", "loss_reduction", "grpo_norm_by_std"))
    run.change("kl_estimator_type", "k1", Why.ONLY_K1)
    if kind == "grpo" and by_std:
        run.change("grpo_norm_by_std", False, Why.GROUP_STD)
    elif kind not in ("grpo", "rloo"):
        run.change("advantage_estimator", "rloo", Why.BATCH_STD if kind in WHITENED else Why.NOT_AUDITED)
    averaged = mode == "token_mean"
    why = f"{Why.MEAN_OVER_TOKENS if averaged else 'it divides by lengths'}; set max_seq_len with it"
    run.change("loss_reduction", SUM, why, optional=averaged)
    advantage = "gae critic=0" if kind == "gae" else kind
    advantage += " without std" if kind == "grpo" and not by_std else ""
    averaged = (estimator, kind, mode) in (("k3", "grpo", "token_mean"), ("k1", "rloo", "token_mean"))
    loss = f"skyrl use_kl_in_reward estimator={estimator} advantage={advantage}{' token_mean' if averaged else ''}"
    caveat = "" if averaged or mode == SUM else f"Audited with loss_reduction={SUM}: {mode} divides by lengths as well."
    return KLPart("reward", loss, run["kl_loss_coef"], caveat=caveat)


FRAMEWORK = Framework.of(
    "skyrl",
    subjects,
    whole_losses=policy_losses,
    reader=Reader(
        "SkyRL",
        KNOWN,
        read_config,
        re.compile(rf"{OTHER_PROGRAMS}skyrl(_train)?[./].*"),
        beginnings=("trainer.algorithm.",),
        harmless=HARMLESS,
    ),
)
