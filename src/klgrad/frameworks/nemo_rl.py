"""NeMo-RL: its KL formulae, and `loss_fn` and `grpo` of its GRPO and PPO recipes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..errors import RunFileError
from .formulae import OVER_COMPLETIONS, OVER_TOKENS, InReward, estimate, kl_subject, number_or_none, part_of
from .framework import Framework
from .run_settings import EARLIER, KLPart, Reader, Run, Why, under

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..targets import Verdict
    from .formulae import PerToken
    from .harness import Batch, Subject, Tensor


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
    kl_type = "reference_policy_kl_type={}".format
    default = terms_of("k3", to_sampler=False)
    yield kl_subject("nemo-rl", f"{kl_type('k3')} token_level_loss=True", default, OVER_TOKENS)
    yield kl_subject("nemo-rl", f"{kl_type('k3')} token_level_loss=False", default, OVER_COMPLETIONS)
    for kind in ("k1", "k2"):
        terms = terms_of(kind, to_sampler=False)
        yield kl_subject("nemo-rl", f"{kl_type(kind)} token_level_loss=True", terms, OVER_TOKENS)
    for name, clamp in (("", 10.0), (" kl_output_clamp_value=null", None)):
        settings = f"{kl_type('k3')} token_level_loss=True use_on_policy_kl_approximation=True{name}"
        yield kl_subject("nemo-rl", settings, terms_of("k3", to_sampler=True, clamp=clamp), OVER_TOKENS)
    # In the reward a token has its own estimate only, whitened over the batch with the scores.
    for kind in ("k3", "k1"):
        form = InReward(kind, 0, 10.0, 20.0, whitened=True, clip=(0.2, 0.2))
        settings = f"use_kl_in_reward adv_estimator=reinforce_plus_plus {kl_type(kind)}"
        yield kl_subject("nemo-rl", settings, form, OVER_TOKENS)


# Its recipes.

LOSS, GRPO, PPO = "loss_fn.", "grpo.", "ppo."
KNOWN: dict[str, Any] = {
    **under(LOSS, reference_policy_kl_penalty=0.01, reference_policy_kl_type="k3"),
    **under(LOSS, kl_input_clamp_value=20.0, kl_output_clamp_value=10.0, use_on_policy_kl_approximation=False),
    **under(LOSS, use_kl_in_reward=False, token_level_loss=True),
    f"{GRPO}adv_estimator.name": "grpo",
    **under(GRPO, num_prompts_per_step=32, num_generations_per_prompt=16),
    f"{GRPO}async_grpo.enabled": False,
    f"{PPO}adv_estimator.name": "",
    **under(PPO, num_prompts_per_step=0, num_generations_per_prompt=0),
    "policy.train_global_batch_size": 512,
}
"""The defaults of `ClippedPGLossConfig`, and those of the recipe grpo_math_1B, on which the others build.

Those of PPO stand for a recipe without that section.
"""

HARMLESS = (
    *(f"{GRPO}adv_estimator.", f"{PPO}adv_estimator."),
    *("policy.optimizer.", "policy.megatron_cfg.", "policy.hf_config_overrides."),
)

CLAMPS = (f"{LOSS}kl_input_clamp_value", f"{LOSS}kl_output_clamp_value")
DISTILLATION = (f"{LOSS}kl_type", f"{LOSS}mixed_kl_weight", f"{LOSS}zero_outside_topk", f"{LOSS}reverse_kl")
OTHER = ("dpo.", "distillation.")
ADDS_KL = ("reinforce_plus_plus", "gae")
"""Estimators that subtract a KL from the reward. The others never see it."""

NOWHERE = "use_kl_in_reward takes the KL out of the loss, and the advantages of {} have none"


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the recipe, with NeMo-RL's defaults for what is missing."""
    if others := [name for name in given if name in DISTILLATION or name.startswith(OTHER)]:
        remedy = "their losses are not read; use klgrad audit FILE:FUNCTION"
        raise RunFileError("a recipe of GRPO or PPO", f"{others[0]}, of distillation or of DPO", remedy)
    clamps = {name: number_or_none(given, name, KNOWN[name]) for name in CLAMPS}
    run = Run("nemo-rl", {x: value for x, value in given.items() if x not in CLAMPS}, KNOWN, LOSS)
    run.settings |= clamps
    run.given += [name for name in CLAMPS if name in given]
    kind = run.one_of("reference_policy_kl_type", ("k1", "k2", "k3"))
    estimator = run[f"{PPO}adv_estimator.name"] or run[f"{GRPO}adv_estimator.name"]
    target: Verdict = "reverse-kl-token"
    run.switch_on("reference_policy_kl_penalty", 0.01, "at 0 there is no KL")
    if run["use_kl_in_reward"] and estimator in ADDS_KL:
        run.parts.append(_read_reward(run, kind, estimator))
        target = "reverse-kl-sequence" if estimator == "gae" else "reverse-kl-token"
    elif run["use_kl_in_reward"]:
        run.change("use_kl_in_reward", False, NOWHERE.format(estimator))
        _read_loss(run, kind)
        if run["reference_policy_kl_penalty"]:
            run.unread[f"{LOSS}reference_policy_kl_penalty"] = NOWHERE.format(estimator)
    else:
        run.parts.append(_read_loss(run, kind))
    run.switch_on("token_level_loss", True, Why.LENGTH)
    section = PPO if run[f"{PPO}num_prompts_per_step"] else GRPO
    sizes = (f"{section}num_prompts_per_step", f"{section}num_generations_per_prompt")
    run.is_stale_above("policy.train_global_batch_size", *sizes)
    run.is_stale_by(f"{GRPO}async_grpo.enabled", EARLIER)
    run.is_sampled_by("an inference engine")
    return run.of(estimator, target)


def _part(run: Run, name: str, form: PerToken, caveat: str = "") -> KLPart:
    reduction = OVER_TOKENS if run["token_level_loss"] else OVER_COMPLETIONS
    return part_of("nemo-rl", name, form, reduction, run["reference_policy_kl_penalty"], caveat)


def _read_loss(run: Run, kind: str) -> KLPart:
    log_clamp, clamp = (run[name] for name in CLAMPS)
    to_sampler = run["use_on_policy_kl_approximation"]
    if kind == "k2":
        why = "its ratio has a gradient, which adds a part of no divergence"
        run.change("reference_policy_kl_type", "k3", why)
    if clamp is not None:
        why = f"beyond a value of {clamp:g} there is no gradient, and the tokens furthest from ref are not pulled"
        run.change(CLAMPS[1], None, why)
    if log_clamp is not None:
        run.change(CLAMPS[0], None, f"beyond a log-ratio of ±{log_clamp:g} there is no gradient", optional=True)
    why = "the ratio to the sampler corrects the KL for its samples"
    run.change("use_on_policy_kl_approximation", True, why, optional=True)
    name = f"reference_policy_kl_type={kind} token_level_loss={run['token_level_loss']}"
    name += " use_on_policy_kl_approximation=True" * to_sampler
    name += "" if clamp == 10 else f" kl_output_clamp_value={'null' if clamp is None else f'{clamp:g}'}"
    name += "" if log_clamp == 20 else f" kl_input_clamp_value={'null' if log_clamp is None else f'{log_clamp:g}'}"
    return _part(run, name, terms_of(kind, to_sampler=to_sampler, log_clamp=log_clamp, clamp=clamp))


def _read_reward(run: Run, kind: str, estimator: str) -> KLPart:
    """Its estimate has the default bounds there, whatever the recipe says."""
    whitened = estimator == "reinforce_plus_plus"
    if whitened:
        run.change("use_kl_in_reward", False, f"{Why.BATCH_STD}; in the loss nothing does")
        _read_loss(run, kind)
    else:
        run.change("reference_policy_kl_type", "k1", Why.ONLY_K1)
    form = InReward(kind, discount=0.0 if whitened else 1.0, clamp=10.0, whitened=whitened)
    caveat = "" if whitened else "Audited with a critic that is 0, λ = 1 and advantages that are not normalised."
    name = f"use_kl_in_reward reference_policy_kl_type={kind} adv_estimator={estimator}"
    return _part(run, f"{name} token_level_loss={run['token_level_loss']}", form, caveat)


FRAMEWORK = Framework.of(
    "nemo-rl",
    losses,
    reader=Reader(
        "NeMo-RL",
        KNOWN,
        read_config,
        re.compile(r"(.*/)?run_(grpo|ppo|vlm_grpo)\w*\.py"),
        beginnings=("loss_fn.",),
        harmless=HARMLESS,
        sections=(*DISTILLATION, *OTHER),
    ),
)
