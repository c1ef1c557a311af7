"""ms-swift: the loss of its GRPO trainer, with the KL in the loss (the default) and in the reward.

`_compute_loss_and_metrics` of `GRPOTrainer` receives a batch with ref_logp, old_logp and per-token advantages, and its
model returns logp; beta = 1. In the loss its k3 has log-ratios clamped at 20 and values clamped at 10. No ratio
multiplies it but `rollout_importance_sampling_mode`, for which the sampler is the inference engine and the log-probs
before the update are those of the policy. In the reward (`advantage_estimator=rloo`, `reinforce_plus_plus`) the KL of a
completion is the sum of its log-ratios at sampling, and `compute_advantages` subtracts it from the score: the advantage
of the audit, zero by default. The package needs more than TRL to import, so only its files are loaded; TRL is replaced
meanwhile, because the file deletes methods of TRL's trainer.
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import RunFileError
from .formulae import OVER_COMPLETIONS, OVER_TOKENS, SUM, AsLoss, InReward, InScore, part_of
from .framework import Framework
from .harness import bare, load, subject
from .run_settings import SEVERAL, Change, KLPart, Reader, Run, Why

if TYPE_CHECKING:
    from .harness import Batch, Subject, Tensor

REPLACED = ("swift", "trl", "transformers", "accelerate", "vllm", "packaging")

TOKEN_MEANS = ("bnpo", "dapo")
"""Loss types that average over the tokens of the batch."""

SCALED_BY = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}
"""The default `scale_rewards` of each `advantage_estimator`."""

SWITCHED_OFF = (
    "compute_entropy",
    "disable_rollout_importance_sampling",
    "log_rollout_offpolicy_metrics",
    "model_accepts_loss_kwargs",
    "overlong_filter",
    "_has_teacher",
)
"""What the loss asks the trainer for and the package has off by default."""


def subjects() -> list[Subject]:
    """In the loss: the reductions, then the ratios to the inference engine. In the reward: each kind of advantage."""
    return [
        *(_in_loss(kind) for kind in ("grpo", *TOKEN_MEANS, "dr_grpo")),
        *(_in_loss("dr_grpo", mode) for mode in ("token_truncate", "sequence_truncate")),
        *(in_reward(estimator) for estimator in ("rloo", "reinforce_plus_plus", "grpo")),
    ]


def _in_loss(loss_type: str, mode: str | None = None) -> Subject:
    trainer = _trainer(loss_type, mode=mode)

    def loss(batch: Batch) -> Tensor:
        return _loss(trainer, batch, batch.advantages)

    name = f"ms-swift loss_type={loss_type}" + (f" rollout_importance_sampling_mode={mode}" if mode else "")
    return subject(name, loss)


def in_reward(estimator: str) -> Subject:
    """The KL in the reward (`kl_in_reward`), with a loss that sums over the tokens of each completion."""
    trainer, advantage = _trainer("dr_grpo", kl_in_reward=True), _modules()["advantage"]

    def loss(batch: Batch) -> Tensor:
        advantages, _ = advantage.compute_advantages(
            batch.advantages[:, :1],
            batch.logp.new_ones(1),
            batch.group_size,
            advantage_estimator=estimator,
            scale_rewards=SCALED_BY[estimator],
            kl_in_reward=True,
            beta=1.0,
            kl_values=((batch.old_logp - batch.ref_logp) * batch.mask).sum(-1),
        )
        return _loss(trainer, batch, advantage.expand_advantage_to_per_token(advantages, batch.mask))

    name = f"ms-swift kl_in_reward advantage_estimator={estimator} loss_type=dr_grpo"
    return subject(name, loss, unwhitened="advantage_estimator=rloo" if SCALED_BY[estimator] == "batch" else "")


def _loss(trainer: Any, batch: Batch, advantages: Tensor) -> Tensor:
    sampled_elsewhere = trainer.rollout_importance_sampling_mode is not None
    data = SimpleNamespace(
        completion_mask=batch.mask,
        truncated_mask=batch.mask.new_zeros(len(batch.mask)),
        ref_per_token_logps=batch.ref_logp,
        old_per_token_logps=None if sampled_elsewhere else batch.old_logp,
        rollout_per_token_logps=batch.behavior_logp,
        teacher_per_token_logps=None,
        advantages=advantages,
        num_items_in_batch=batch.mask.sum(),
    )
    trainer.max_completion_length = batch.mask.shape[1]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.logp, None)
    return trainer._compute_loss_and_metrics(None, {}, data)[0]


def _trainer(loss_type: str, *, mode: str | None = None, kl_in_reward: bool = False) -> Any:
    """A trainer with what the loss reads, at the package's defaults."""
    return bare(
        _modules()["grpo_trainer"].GRPOTrainer,
        beta=1.0,
        loss_type=loss_type,
        kl_in_reward=kl_in_reward,
        rollout_importance_sampling_mode=mode,
        rollout_importance_sampling_threshold=2.0,
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        args=SimpleNamespace(delta=None, gradient_accumulation_steps=1),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather_for_metrics=lambda x: x),
        current_gradient_accumulation_steps=1,
        compute_loss_func=None,
        sdar_loss_coef=0.0,
        off_policy_sequence_mask_delta=None,
        chord_sft_iterator=None,
        **dict.fromkeys(SWITCHED_OFF, False),
    )


@cache
def _modules() -> dict[str, ModuleType]:
    return load("ms-swift", "swift.rl_core.advantage", "swift.rlhf_trainers.grpo_trainer", replaced=REPLACED)


# The flags of `swift rlhf --rlhf_type grpo` and `megatron rlhf`.

KNOWN: dict[str, object] = {
    "rlhf_type": "",
    "beta": 0.04,
    "loss_type": "grpo",
    "advantage_estimator": "grpo",
    "kl_in_reward": None,
    "scale_rewards": "",
    "teacher_model": "",
    "teacher_model_server": "",
    "teacher_kl_coef": 1.0,
    "num_iterations": 1,
    "steps_per_generation": 0,
    "gradient_accumulation_steps": 1,
    "use_vllm": False,
    "rollout_importance_sampling_mode": "",
}
"""The defaults; empty text and 0 stand for None."""

HARMLESS = ("adam_beta1", "adam_beta2", "sdar_gate_beta")
REDUCTIONS = {
    "grpo": OVER_COMPLETIONS, "sapo": OVER_COMPLETIONS, "bnpo": OVER_TOKENS, "dapo": OVER_TOKENS,
    "cispo": OVER_TOKENS, "fipo": OVER_TOKENS, "dr_grpo": SUM,
}  # fmt: skip
IN_REWARD = "k3 as a loss is cut off and descends the forward KL; in the reward k1 is used"


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the flags, with the defaults of ms-swift for those that are missing."""
    run = Run("ms-swift", given, KNOWN)
    if run["rlhf_type"] != "grpo":
        received = f"rlhf_type {run['rlhf_type']}" if run["rlhf_type"] else "no rlhf_type"
        raise RunFileError("a run of GRPO", received, "its loss is not read; use klgrad audit FILE:FUNCTION")
    kind, estimator = run.one_of("loss_type", REDUCTIONS), run.one_of("advantage_estimator", SCALED_BY)
    told, mode = run["kl_in_reward"], run["rollout_importance_sampling_mode"]
    in_reward = estimator != "grpo" if told is None else str(told).lower() == "true"
    run.switch_on("beta", 0.04, "at 0 no reference is loaded, and there is no KL")
    if not in_reward:
        run.changes.append(Change("kl_in_reward", True, False, IN_REWARD))
    part = _read_reward(run)
    if not in_reward:
        name = f"loss_type={kind}{f' rollout_importance_sampling_mode={mode}' if mode else ''}"
        caveat = "The ratio to the inference engine that multiplies it is left out." if mode else ""
        form = AsLoss("k3", log_clamp=20.0, clamp=10.0)
        part = part_of("ms-swift", name, form, REDUCTIONS[kind], run["beta"], caveat)
    run.parts = [part] * (part.coefficient != 0)
    if run["teacher_model"] or run["teacher_model_server"]:
        form, caveat = InReward("k1", discount=0.0), "ref is the teacher here."
        name, beta = f"teacher loss_type={kind}", run["teacher_kl_coef"]
        run.parts.append(part_of("ms-swift", name, form, REDUCTIONS[kind], beta, caveat, "advantage"))
    elif "teacher_kl_coef" in given:
        run.unread["teacher_kl_coef"] = "there is no teacher_model and no teacher_model_server"
    run.notes += [Why.TWO_REFERENCES] * (len(run.parts) > 1)
    run.is_stale_by("num_iterations", SEVERAL, least=2)
    run.is_stale_above("gradient_accumulation_steps", "steps_per_generation")
    if run["use_vllm"]:
        run.is_sampled_by("vLLM")
    return run.of(f"GRPO, advantages by {estimator}", "reverse-kl-sequence")


def _read_reward(run: Run) -> KLPart:
    """The KL in the reward, which is advised where it is in the loss, too."""
    kind, estimator = run["loss_type"], run["advantage_estimator"]
    scaled = run["scale_rewards"] or SCALED_BY[estimator]
    run.change("advantage_estimator", "rloo", "it has no division by a standard deviation")
    if scaled != SCALED_BY["rloo"]:
        why = Why.BATCH_STD if scaled == "batch" else Why.GROUP_STD
        run.changes.append(Change("scale_rewards", "none", scaled, why))
    optional = REDUCTIONS[kind] == OVER_TOKENS
    run.change("loss_type", "dr_grpo", Why.MEAN_OVER_TOKENS if optional else Why.LENGTH, optional=optional)
    name = f"kl_in_reward advantage_estimator={estimator} loss_type={kind}"
    caveat = "" if scaled == "none" else f"Its division by the standard deviation of the {scaled} is left out."
    return part_of("ms-swift", name, InScore(), REDUCTIONS[kind], run["beta"], caveat)


FRAMEWORK = Framework.of(
    "ms-swift",
    subjects,
    reader=Reader(
        "ms-swift",
        KNOWN,
        read_config,
        re.compile(r"(swift|megatron) rlhf|(.*/)?swift/cli/rlhf\.py|swift\.cli\.rlhf"),
        beginnings=("rlhf_type",),
        harmless=HARMLESS,
        flags="_",
    ),
)
