"""slime and its fork miles: their KL formulae; of slime the flags of `train.py` and `train_async.py`."""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Any

from .formulae import OVER_COMPLETIONS, OVER_TOKENS, SUM, AsLoss, InReward, kl_subject, part_of, ratio_of
from .framework import Framework
from .run_settings import SEVERAL, KLPart, Reader, Run, Why

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..audit import Subject


def losses() -> Iterator[Subject]:
    """The estimate, with π/π_old on request; the value of low_var_kl is clamped at 10."""
    yield from _in_loss("slime", None)
    # With these estimators the advantage is the score alone, and the KL of --kl-coef is dropped.
    yield kl_subject("slime", "--kl-coef --advantage-estimator grpo", lambda b: -b.advantages * ratio_of(b), SUM)


def _in_loss(framework: str, log_clamp: float | None) -> Iterator[Subject]:
    """The KL in the loss of slime, and of miles, whose low_var_kl bounds the log-ratio too."""
    for kind, unbiased in product(KINDS, (False, True)):
        settings = f"--use-kl-loss --kl-loss-type {kind}{' --use-unbiased-kl' * unbiased}"
        yield kl_subject(framework, settings, _form(kind, unbiased, log_clamp), OVER_COMPLETIONS)
    settings = "--use-kl-loss --kl-loss-type k3 --use-unbiased-kl --calculate-per-token-loss"
    yield kl_subject(framework, settings, _form("k3", True), OVER_TOKENS)


def _form(kind: str, unbiased: bool, log_clamp: float | None = None) -> AsLoss:
    return AsLoss("k3", log_clamp, 10.0, unbiased) if kind == "low_var_kl" else AsLoss(kind, ratio=unbiased)


def losses_of_miles() -> Iterator[Subject]:
    """A fork of slime: its KLs in the loss, then that of the reward, and distillation."""
    yield from _in_loss("miles", 20.0)
    clip = (0.2, 0.2)
    for kind in ("k1", "k3"):
        settings = f"--kl-coef --kl-loss-type {kind} --advantage-estimator reinforce_plus_plus"
        yield kl_subject("miles", settings, InReward(kind, clip=clip), OVER_COMPLETIONS)
    yield kl_subject("miles", "--use-opd", InReward("k1", discount=0, clip=clip), OVER_COMPLETIONS)
    # As of slime, the advantages of grpo drop the KL of --kl-coef.
    yield kl_subject("miles", "--kl-coef --advantage-estimator grpo", lambda b: -b.advantages * ratio_of(b), SUM)


# The flags of slime.

KNOWN: dict[str, object] = {
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "kl_coef": 0.0,
    "advantage_estimator": "grpo",
    "normalize_advantages": False,
    "gamma": 1.0,
    "calculate_per_token_loss": False,
    "use_opd": False,
    "opd_kl_coef": 1.0,
    "loss_type": "policy_loss",
    "custom_advantage_function_path": "",
    "ref_update_interval": 0,
    "rollout_batch_size": 0,
    "n_samples_per_prompt": 1,
    "global_batch_size": 0,
    "num_steps_per_rollout": 0,
}
"""The defaults; those of the sizes and of a path stand for None."""

HARMLESS = ("ci_disable_kl_checker", "disable_grpo_std_normalization")
WITHOUT_KL = ("grpo", "gspo", "cispo")
"""Estimators whose advantages are the rewards alone."""

ESTIMATORS = (*WITHOUT_KL, "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
KINDS = ("k1", "k2", "k3", "low_var_kl")
ONLY_LOGGED = "use_kl_loss with kl_loss_coef=0: the reference is scored and the KL logged, and nothing is descended."
MOVES = "The reference is replaced by the policy every {} rollouts: a KL to it is no distance from the start."


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the flags, with slime's defaults for those that are missing."""
    run = Run("slime", given, KNOWN)
    run.one_of("kl_loss_type", KINDS)
    estimator = run.one_of("advantage_estimator", ESTIMATORS)
    run.one_of("loss_type", ("policy_loss",))
    run.one_of("custom_advantage_function_path", ("",))
    reduction = OVER_TOKENS if run["calculate_per_token_loss"] else OVER_COMPLETIONS
    in_reward = run["kl_coef"] != 0 and estimator not in WITHOUT_KL
    in_loss = run["use_kl_loss"] and run["kl_loss_coef"] != 0
    if in_loss or not (in_reward or run["use_opd"]):
        part = _read_loss(run, reduction)
        run.parts += [part] * in_loss
    if in_reward:
        run.parts.append(_read_reward(run, reduction))
    if run["use_opd"]:
        form = InReward("k1", discount=0.0, whitened=run["normalize_advantages"])
        name = f"--use-opd{' --normalize-advantages' * form.whitened}{_per_token(run)}"
        run.parts.append(part_of("slime", name, form, reduction, run["opd_kl_coef"], TEACHER, "advantage"))
    if any(part.coefficient for part in run.parts):
        run.switch_on("calculate_per_token_loss", True, f"{Why.LENGTH}, in the policy loss too")
    run.notes += [MOVES.format(run["ref_update_interval"])] * (run["ref_update_interval"] > 0)
    run.notes += [ONLY_LOGGED] * (run["use_kl_loss"] and not in_loss)
    run.notes += ["Both KLs are on: their gradients add up."] * (sum(x.coefficient != 0 for x in run.parts) > 1)
    if run["kl_coef"] and estimator in WITHOUT_KL:
        why = f"the advantages of {estimator} are the rewards alone; the reference is loaded and scored all the same"
        run.unread["kl_coef"] = why
    if not run["use_kl_loss"]:
        run.unread |= {x: "use_kl_loss is not set" for x in ("kl_loss_coef", "use_unbiased_kl") if run[x]}
    is_sequence = in_reward and estimator != TOKEN_LEVEL
    run.is_stale_by("num_steps_per_rollout", SEVERAL, least=2)
    if run["num_steps_per_rollout"] <= 1:
        run.is_stale_above("global_batch_size", "rollout_batch_size", "n_samples_per_prompt")
    run.is_sampled_by("SGLang")
    return run.of(estimator, "reverse-kl-sequence" if is_sequence else "reverse-kl-token")


TOKEN_LEVEL = "reinforce_plus_plus_baseline"
TEACHER = "ref is the teacher here. The advantages of the rewards are added to it."


def _per_token(run: Run) -> str:
    return " --calculate-per-token-loss" * run["calculate_per_token_loss"]


def _read_loss(run: Run, reduction: str) -> KLPart:
    kind, unbiased = run["kl_loss_type"], run["use_unbiased_kl"]
    run.switch_on("use_kl_loss", True, "without it slime has no KL in the loss")
    run.switch_on("kl_loss_coef", 0.001, "at 0 there is no KL")
    if not ((kind == "k2" and not unbiased) or (kind in ("k1", "k3") and unbiased)):
        why = {"k1": Why.AS_LOSS["k1"], "k2": "k2 times a ratio with a gradient is no divergence's", "k3": Why.K3}
        run.change("kl_loss_type", "k3", why.get(kind, Why.CLAMPED_K3))
        run.switch_on("use_unbiased_kl", True, "the ratio turns k3 into the reverse KL")
    name = f"--use-kl-loss --kl-loss-type {kind}{' --use-unbiased-kl' * unbiased}{_per_token(run)}"
    return part_of("slime", name, _form(kind, unbiased), reduction, run["kl_loss_coef"])


def _read_reward(run: Run, reduction: str) -> KLPart:
    kind, estimator, whitened = run["kl_loss_type"], run["advantage_estimator"], run["normalize_advantages"]
    run.change("kl_loss_type", "k1", Why.ONLY_K1)
    if whitened:
        run.change("advantage_estimator", "ppo", f"{estimator} has to be whitened: {Why.BATCH_STD}")
        run.change("normalize_advantages", False, Why.BATCH_STD)
    form = InReward(
        "k3" if kind == "low_var_kl" else kind,
        discount=0.0 if estimator == TOKEN_LEVEL else run["gamma"],
        clamp=10.0 if kind == "low_var_kl" else None,
        whitened=whitened,
    )
    name = f"--kl-coef --advantage-estimator {estimator} --kl-loss-type {kind}"
    name += f"{' --normalize-advantages' * whitened}{_per_token(run)}"
    caveat = "Audited with a critic that is 0." if estimator == "ppo" else ""
    return part_of("slime", name, form, reduction, run["kl_coef"], caveat)


FRAMEWORK = Framework.of(
    "slime",
    losses,
    reader=Reader(
        "slime",
        KNOWN,
        read_config,
        re.compile(r"(.*/)?slime/train(_async)?\.py"),
        beginnings=("hf_checkpoint", "ref_load", "num_rollout", "opd_", "kl_loss_type", "use_unbiased_kl"),
        harmless=HARMLESS,
        flags="-",
        elsewhere=re.compile(r"\$\{MODEL_ARGS\[@\]\}"),
    ),
)
MILES = Framework.of("miles", losses_of_miles)
