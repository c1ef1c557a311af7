"""NeMo-RL: its KL formulae, and `loss_fn` and `grpo` of its GRPO and PPO recipes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..errors import RunFileError
from .formulae import (
    OVER_COMPLETIONS,
    OVER_TOKENS,
    InReward,
    estimate,
    framework_of,
    kl_subject,
    number_or_none,
    part_of,
)
from .framework import Default, Source
from .run_settings import Change, KLPart, Reader, Run, Why, one_of, with_defaults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch
    from ..targets import Verdict
    from .formulae import PerToken


def terms_of(kind: str, *, to_sampler: bool, log_clamp: float | None = 20.0, clamp: float | None = 10.0) -> PerToken:
    """The KL of NeMo-RL in the loss, with its bounds on the log-ratio and on the value."""

    def terms(batch: Batch) -> Tensor:
        x = batch.ref_logp - batch.logp
        inside = x if log_clamp is None else x.clamp(-log_clamp, log_clamp)
        ratio = (batch.logp - (batch.behavior_logp if to_sampler else batch.logp.detach())).exp()
        ratio = ratio.nan_to_num(nan=0.0, posinf=0.0)
        kl = ratio.where(x == inside, ratio.detach()) * estimate(kind, inside)
        return kl if clamp is None else kl.clamp(-clamp, clamp)

    return terms


def losses() -> Iterator[Subject]:
    """The estimate times a ratio that is 1 and has a gradient, or π/μ; its value is clamped at 10."""

    def per_token(kind: str, to_sampler: bool, clamp: bool) -> PerToken:
        return terms_of(kind, to_sampler=to_sampler, clamp=10.0 if clamp else None)

    kl_type = "reference_policy_kl_type={}".format
    default = per_token("k3", False, True)
    yield kl_subject("nemo-rl", f"{kl_type('k3')} token_level_loss=True", default, OVER_TOKENS)
    yield kl_subject("nemo-rl", f"{kl_type('k3')} token_level_loss=False", default, OVER_COMPLETIONS)
    for kind in ("k1", "k2"):
        terms = per_token(kind, False, True)
        yield kl_subject("nemo-rl", f"{kl_type(kind)} token_level_loss=True", terms, OVER_TOKENS)
    for name, clamp in (("", True), (" kl_output_clamp_value=null", False)):
        settings = f"{kl_type('k3')} token_level_loss=True use_on_policy_kl_approximation=True{name}"
        yield kl_subject("nemo-rl", settings, per_token("k3", True, clamp), OVER_TOKENS)
    # In the reward a token has its own estimate only, whitened over the batch with the scores.
    for kind in ("k3", "k1"):
        form = InReward(kind, 0, 10.0, 20.0, whitened=True, clip=(0.2, 0.2))
        settings = f"use_kl_in_reward adv_estimator=reinforce_plus_plus {kl_type(kind)}"
        yield kl_subject("nemo-rl", settings, form, OVER_TOKENS)


# Its recipes.

LOSS, GRPO, PPO = "loss_fn.", "grpo.", "ppo."
KNOWN: dict[str, Any] = {
    f"{LOSS}reference_policy_kl_penalty": 0.01,
    f"{LOSS}reference_policy_kl_type": "k3",
    f"{LOSS}kl_input_clamp_value": 20.0,
    f"{LOSS}kl_output_clamp_value": 10.0,
    f"{LOSS}use_on_policy_kl_approximation": False,
    f"{LOSS}use_kl_in_reward": False,
    f"{LOSS}token_level_loss": True,
    f"{GRPO}adv_estimator.name": "grpo",
    f"{GRPO}num_prompts_per_step": 32,
    f"{GRPO}num_generations_per_prompt": 16,
    f"{GRPO}async_grpo.enabled": False,
    f"{PPO}adv_estimator.name": "",
    f"{PPO}num_prompts_per_step": 0,
    f"{PPO}num_generations_per_prompt": 0,
    "policy.train_global_batch_size": 512,
}
"""The defaults of `ClippedPGLossConfig`, and those of the recipe grpo_math_1B, on which the others build.

Those of PPO stand for a recipe without that section.
"""

HARMLESS = (
    f"{GRPO}adv_estimator.",
    f"{PPO}adv_estimator.",
    "policy.optimizer.",
    "policy.megatron_cfg.",
    "policy.hf_config_overrides.",
)

CLAMPS = (f"{LOSS}kl_input_clamp_value", f"{LOSS}kl_output_clamp_value")
DISTILLATION = (f"{LOSS}kl_type", f"{LOSS}mixed_kl_weight", f"{LOSS}zero_outside_topk", f"{LOSS}reverse_kl")
OTHER = ("dpo.", "distillation.")
ADDS_KL = ("reinforce_plus_plus", "gae")
"""Estimators that subtract a KL from the reward. The others never see it."""

ENGINE = "NeMo-RL samples with an inference engine, whose log-probs differ from those of the trainer"
NOWHERE = "use_kl_in_reward takes the KL out of the loss, and the advantages of {} have none"


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the recipe, with NeMo-RL's defaults for what is missing."""
    if found := [name for name in given if name in DISTILLATION or name.startswith(OTHER)]:
        received = f"{found[0]}, of distillation or of DPO"
        raise RunFileError(
            "a recipe of GRPO or PPO", received, "their losses are not read; use klgrad audit FILE:FUNCTION"
        )
    clamps = {name: number_or_none(given, name, KNOWN[name]) for name in CLAMPS}
    plain = {name: value for name, value in given.items() if name not in CLAMPS}
    settings, named = with_defaults(plain, KNOWN)
    settings |= clamps
    named = (*named, *(name for name in CLAMPS if name in given))
    kind = one_of(f"{LOSS}reference_policy_kl_type", settings[f"{LOSS}reference_policy_kl_type"], ("k1", "k2", "k3"))
    estimator = settings[f"{PPO}adv_estimator.name"] or settings[f"{GRPO}adv_estimator.name"]
    beta, in_reward = settings[f"{LOSS}reference_policy_kl_penalty"], settings[f"{LOSS}use_kl_in_reward"]
    unread = {}
    parts: list[KLPart] = []
    target: Verdict = "reverse-kl-token"
    if in_reward and estimator in ADDS_KL:
        part, changes = _read_reward(settings, kind, estimator)
        parts = [part] * (beta != 0)
        target = "reverse-kl-sequence" if estimator == "gae" else "reverse-kl-token"
    else:
        part, changes = _read_loss(settings, kind)
        parts = [part] * (beta != 0 and not in_reward)
        if in_reward:
            changes.insert(0, Change(f"{LOSS}use_kl_in_reward", False, True, NOWHERE.format(estimator)))
            unread = {f"{LOSS}reference_policy_kl_penalty": NOWHERE.format(estimator)} if beta else {}
    if not beta:
        changes.insert(0, Change(f"{LOSS}reference_policy_kl_penalty", 0.01, 0.0, "at 0 there is no KL"))
    if not settings[f"{LOSS}token_level_loss"]:
        changes.append(Change(f"{LOSS}token_level_loss", True, False, Why.LENGTH))
    return Run(
        "nemo-rl", estimator, settings, named, tuple(parts), _stale(settings), target, tuple(changes), unread=unread
    )


def _reduction(settings: dict[str, Any]) -> str:
    return OVER_TOKENS if settings[f"{LOSS}token_level_loss"] else OVER_COMPLETIONS


def _read_loss(settings: dict[str, Any], kind: str) -> tuple[KLPart, list[Change]]:
    log_clamp, clamp = (settings[name] for name in CLAMPS)
    to_sampler = settings[f"{LOSS}use_on_policy_kl_approximation"]
    changes = []
    if kind == "k2":
        why = "its ratio has a gradient, which adds a part of no divergence"
        changes.append(Change(f"{LOSS}reference_policy_kl_type", "k3", "k2", why))
    if clamp is not None:
        why = f"beyond a value of {clamp:g} there is no gradient, and the tokens furthest from ref are not pulled"
        changes.append(Change(CLAMPS[1], None, clamp, why))
    if log_clamp is not None:
        why = f"beyond a log-ratio of ±{log_clamp:g} there is no gradient"
        changes.append(Change(CLAMPS[0], None, log_clamp, why, optional=True))
    if not to_sampler:
        why = "the ratio to the sampler corrects the KL for its samples"
        changes.append(Change(f"{LOSS}use_on_policy_kl_approximation", True, False, why, optional=True))
    name = f"reference_policy_kl_type={kind} token_level_loss={settings[f'{LOSS}token_level_loss']}"
    name += " use_on_policy_kl_approximation=True" * to_sampler
    name += "" if clamp == 10 else f" kl_output_clamp_value={'null' if clamp is None else f'{clamp:g}'}"
    name += "" if log_clamp == 20 else f" kl_input_clamp_value={'null' if log_clamp is None else f'{log_clamp:g}'}"
    form = terms_of(kind, to_sampler=to_sampler, log_clamp=log_clamp, clamp=clamp)
    beta = settings[f"{LOSS}reference_policy_kl_penalty"]
    return part_of("nemo-rl", name, form, _reduction(settings), beta), changes


def _read_reward(settings: dict[str, Any], kind: str, estimator: str) -> tuple[KLPart, list[Change]]:
    """Its estimate has the default bounds there, whatever the recipe says."""
    changes = [Change(f"{LOSS}reference_policy_kl_type", "k1", kind, Why.ONLY_K1)] * (kind != "k1")
    whitened = estimator == "reinforce_plus_plus"
    if whitened:
        why = f"{Why.BATCH_STD}; in the loss nothing does"
        changes = [Change(f"{LOSS}use_kl_in_reward", False, True, why), *_read_loss(settings, kind)[1]]
    form = InReward(kind, discount=0.0 if whitened else 1.0, clamp=10.0, whitened=whitened)
    caveat = "" if whitened else "Audited with a critic that is 0, λ = 1 and advantages that are not normalised."
    name = f"use_kl_in_reward reference_policy_kl_type={kind} adv_estimator={estimator}"
    name += f" token_level_loss={settings[f'{LOSS}token_level_loss']}"
    beta = settings[f"{LOSS}reference_policy_kl_penalty"]
    return part_of("nemo-rl", name, form, _reduction(settings), beta, caveat), changes


def _stale(settings: dict[str, Any]) -> tuple[str, ...]:
    section = PPO if settings[f"{PPO}num_prompts_per_step"] else GRPO
    rows = settings[f"{section}num_prompts_per_step"] * settings[f"{section}num_generations_per_prompt"]
    update = settings["policy.train_global_batch_size"]
    found = []
    if rows > update:
        found.append(f"{rows} completions of a step above train_global_batch_size={update}: several updates use them")
    if settings[f"{GRPO}async_grpo.enabled"]:
        found.append("async_grpo.enabled=true: completions of earlier policies are trained on")
    return (*found, ENGINE)


FRAMEWORK = framework_of(
    "nemo-rl",
    losses,
    Source(
        "NVIDIA-NeMo/RL",
        "0.7.0",
        (
            "nemo_rl/algorithms/utils.py",
            "nemo_rl/algorithms/loss/loss_functions.py",
            "nemo_rl/algorithms/advantage_estimator.py",
        ),
    ),
    Default(
        "k3 as a loss, reference_policy_kl_penalty=0.01",
        "nemo-rl reference_policy_kl_type=k3 token_level_loss=True",
    ),
    reader=Reader(
        "NeMo-RL",
        KNOWN,
        read_config,
        re.compile(r"(.*/)?run_(grpo|ppo|vlm_grpo)\w*\.py"),
        beginnings=("loss_fn.",),
        harmless=HARMLESS,
        sections=(*DISTILLATION, *OTHER),
        source="NVIDIA-NeMo/RL: nemo_rl/algorithms/loss/loss_functions.py, nemo_rl/algorithms/advantage_estimator.py, "
        "examples/configs/grpo_math_1B.yaml; read on 2026-11-18 at 7ea279abf of 2026-08-22",
    ),
    caveats=(
        "`use_kl_in_reward` takes `reference_policy_kl_type` too, which is k3 by default: in the reward that is the "
        "reverse KL minus the forward KL.",
    ),
)
