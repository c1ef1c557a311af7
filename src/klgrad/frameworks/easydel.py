"""EasyDeL: its GRPO, its PPO from the rewards to the loss, and the divergence of its distillation (GKD).

`grpo_step` and `ppo_step` receive a batch with the mask and the log-probs of ref, and β = 1; logp stands for the model.
Its trainer gives GRPO no log-probs of an older policy: the ratio is 1. The advantages of PPO are made by
`PPOTrainer._preprocess_batch_input` with these completions, no reward function, and a critic that is 0.
`generalized_jsd_loss` receives the logits of the student and the teacher. Only these files are loaded.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from .framework import Framework
from .harness import bare, load, of_arrays, subject

if TYPE_CHECKING:
    from ..audit import Subject

STAND_INS = ("eformer", "flax", "optax", "transformers", "jaxtyping")


def subjects() -> list[Subject]:
    """GRPO with each reduction, the default first; PPO with each estimator; GKD with each kind of β."""
    return [
        *map(_grpo, ("dapo", "grpo", "dr_grpo")),
        _ppo("k1", whiten=True),
        _ppo("k3", whiten=True),
        _ppo("k1", whiten=False),
        *map(_gkd, (0.5, 0.0, 1.0)),
    ]


def _grpo(loss_type: str) -> Subject:
    step = _file("group_relative_policy_optimization").grpo_step

    def loss(x: dict[str, Any]) -> Any:
        batch = {
            "prompt_ids": x["tokens"],
            "prompt_mask": x["mask"],
            "completion_ids": x["tokens"],
            "completion_mask": x["mask"],
            "advantages": x["rewards"],
            "ref_per_token_logps": x["ref_logp"],
        }
        return step(_state(x), batch, 1, 1.0, is_training=False, loss_type=loss_type).loss

    # A mean over the tokens of the batch couples its groups.
    return subject(f"easydel grpo loss_type={loss_type}", of_arrays(loss, "jax"))


def _ppo(estimator: str, *, whiten: bool) -> Subject:
    step = _file("proximal_policy_optimization_trainer").ppo_step
    arguments = SimpleNamespace(
        kl_coef=1.0,
        kl_estimator=estimator,
        gamma=1.0,
        lam=0.95,
        whiten_rewards=False,
        whiten_advantages=whiten,
        mask_truncated_completions=False,
        missing_eos_penalty=None,
    )

    def loss(x: dict[str, Any]) -> Any:
        batch, _ = _ppo_trainer(arguments, x)._preprocess_batch_input(_state(x), x, True)
        return step(_state(x), batch, 0, 0.2, 0.0, 0.2, 0.0, None, is_training=False).loss

    name = f"easydel ppo kl_estimator={estimator} whiten_advantages={whiten}"
    k1, unwhitened = "" if estimator == "k1" else "kl_estimator=k1", "whiten_advantages=False" if whiten else ""
    return subject(name, of_arrays(loss, "jax"), k1=k1, unwhitened=unwhitened)


def _gkd(beta: float) -> Subject:
    divergence = _file("generalized_knowledge_distillation_trainer").generalized_jsd_loss

    def loss(x: dict[str, Any]) -> Any:
        return divergence(x["logits"], x["ref_logits"], mask=x["mask"], beta=beta)

    return subject(f"easydel gkd beta={beta:g}", of_arrays(loss, "jax"))


# What these functions need, with the log-probs of the batch in the place of a model.


def _state(x: dict[str, Any]) -> SimpleNamespace:
    model = SimpleNamespace(__call__=None, logp=x["logp"])
    return SimpleNamespace(graphstate=None, graphother=None, merge=lambda _: model)


def _ppo_trainer(arguments: SimpleNamespace, x: dict[str, Any]) -> Any:
    """A trainer whose model has sampled these completions."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    return bare(
        _trainer_file().PPOTrainer,
        arguments=arguments,
        reward_funcs=[],
        reward_processing_classes=[],
        reward_func_names=[],
        reward_weights=jnp.zeros(0),
        train_is_conversational=False,
        ref_state=_state(x),
        generate_unified=lambda **_: SimpleNamespace(
            sequences=x["tokens"],
            prompt_ids=x["tokens"][:, :0],
            prompt_mask=x["mask"][:, :0],
            completion_ids=x["tokens"],
            completion_prompts=[],
            raw_text=[""],
            text=[""],
            reasoning=None,
            tool_calls=None,
        ),
        compute_refmodel_logps=lambda *_: x["ref_logp"],
        compute_rollout_logps_values=lambda *_: (x["old_logp"], jnp.zeros_like(x["old_logp"])),
        _extract_reward_batch_sidechannels=lambda _: {},
        _purify_batch=lambda _: {"input_ids": x["tokens"][:, :0], "attention_mask": x["mask"][:, :0]},
        _make_attn_mask=lambda _: x["mask"],
        _coerce_generation_texts=lambda texts, fallback: texts,
        _coerce_optional_generation_texts=lambda *_, **__: [],
        _coerce_generation_metadata_list=lambda *_, **__: [],
        _all_gather=lambda value: value,
        _log_training_generations_to_wandb=lambda **_: None,
    )


def _loaded(folder: str, file: str) -> ModuleType:
    name = f"easydel.trainers.{folder}.{file}"
    return load("easydel", name, stand_ins=STAND_INS, replaced=("easydel",))[file]


@cache
def _file(folder: str) -> ModuleType:
    """The functions of one trainer; what they use of a sharded model does nothing."""
    module = _loaded(folder, "_fn")
    vars(module).update(
        with_sharding_constraint=lambda arr, sharding: arr,
        make_assertions_and_get_sizes=lambda **_: (None, None, None),
        LossMetrics=SimpleNamespace,
        get_per_token_logps=lambda model, *_, **__: model.logp,
        get_per_token_logps_values_entropies=lambda model, *_: (model.logp, 0 * model.logp, 0 * model.logp),
    )
    return module


@cache
def _trainer_file() -> ModuleType:
    """The trainer of PPO, which JAX can compile: it takes numbers out of its arrays for its metrics."""
    module = _loaded("proximal_policy_optimization_trainer", "ppo_trainer")
    vars(module).update(float=lambda x: x, capture_time=lambda: nullcontext(lambda: 0.0))
    return module


FRAMEWORK = Framework.of("easydel", subjects)
