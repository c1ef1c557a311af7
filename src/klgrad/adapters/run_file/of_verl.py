"""verl: `actor_rollout_ref.actor`, `algorithm` and `data`."""

from functools import partial
from typing import TYPE_CHECKING, Any

from ...targets import Verdict
from .of_verl_declared import PREFIX, declared_part, has_declared
from .run import ADAPTS, TOKEN_MEAN, Change, Part, Run, one_of, with_defaults

if TYPE_CHECKING:
    from ...audit import Subject

ACTOR, ALGORITHM = "actor_rollout_ref.actor.", "algorithm."
DEFAULTS: dict[str, Any] = {
    f"{ACTOR}use_kl_loss": False,
    f"{ACTOR}kl_loss_type": "low_var_kl",
    f"{ACTOR}kl_loss_coef": 0.001,
    f"{ACTOR}loss_agg_mode": "token-mean",
    f"{ALGORITHM}use_kl_in_reward": False,
    f"{ALGORITHM}kl_penalty": "kl",
    f"{ALGORITHM}kl_ctrl.kl_coef": 0.001,
    f"{ALGORITHM}adv_estimator": "gae",
    f"{ALGORITHM}norm_adv_by_std_in_grpo": True,
    f"{ACTOR}ppo_epochs": 1,
    f"{ACTOR}ppo_mini_batch_size": 256,
    "data.train_batch_size": 1024,
}
"""The defaults of the settings that matter; a test compares them with verl's."""

HARMLESS = (
    *(f"{ALGORITHM}kl_ctrl.{name}" for name in ("_target_", "type", "horizon", "target_kl")),
    *(f"{ACTOR}policy_loss.{name}" for name in ("kl_cov_ratio", "ppo_kl_coef", "dro_beta")),
    *(f"critic.kl_ctrl.{name}" for name in ("type", "kl_coef")),
)
"""What adapts β, policy losses, and settings of older releases that nothing reads."""

SAME = {
    "k1": "kl",
    "k2": "mse",
    "k3": "low_var_kl",
    "k1+": "kl+",
    "k2+": "mse",
    "mse+": "mse",
    "k3+": "low_var_kl+",
}
"""Other names of the estimators."""

TYPES = ("kl", "kl+", "abs", "abs+", "mse", "low_var_kl", "low_var_kl+")
REVERSE = ("kl+", "abs+", "mse", "low_var_kl+")
"""Estimators whose gradient as a loss is that of k2."""

WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages that are whitened over the batch with the KL in them, read in the source of version 0.9.1.

`gdpo` is whitened too, but its rewards are those of `gdpo_reward_keys`, without the KL.
"""

REDUCTIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
SUM = "seq-mean-token-sum"
ENGINE = "verl samples with an inference engine, whose log-probs differ from those of the trainer"


def verl_run(given: dict[str, Any]) -> Run:
    """Read the settings of a verl trainer, with verl's defaults for those that are missing."""
    settings, named = with_defaults(given, DEFAULTS)
    mode = one_of(f"{ACTOR}loss_agg_mode", settings[f"{ACTOR}loss_agg_mode"], REDUCTIONS)
    parts: list[Part] = []
    changes: list[Change] = []
    in_reward, in_loss = settings[f"{ALGORITHM}use_kl_in_reward"], settings[f"{ACTOR}use_kl_loss"]
    declares = has_declared(given)
    if in_loss or not (in_reward or declares):
        found, wanted = _in_loss(settings, mode)
        parts, changes = [found] * (in_loss and found.coefficient != 0), wanted
    if in_reward:
        found, wanted = _in_reward(settings, mode)
        parts, changes = [*parts, *[found] * (found.coefficient != 0)], [*changes, *wanted]
    target: Verdict = "reverse-kl-sequence" if in_reward else "reverse-kl-token"
    if declares:
        found, wanted, target = declared_part(given, mode)
        parts, changes = [*parts, found], [*changes, *wanted]
        shown = {name: value for name, value in given.items() if name.startswith(PREFIX)}
        settings, named = settings | shown, (*named, *shown)
    changes += _reduction(mode)
    notes = ("Both KLs are on: their gradients add up.",) if len(parts) - declares > 1 else ()
    if in_reward and given.get(f"{ALGORITHM}kl_ctrl.type") == "adaptive":
        notes = (*notes, ADAPTS)
    if declares and (in_loss or in_reward):
        notes = (*notes, "klgrad refuses to train beside a KL of verl's own: switch one of them off.")
    return Run("verl", "its actor", settings, named, tuple(parts), _stale(settings), target, tuple(changes), notes)


def _in_loss(settings: dict[str, Any], mode: str) -> tuple[Part, list[Change]]:
    name = f"{ACTOR}kl_loss_type"
    given: str = settings[name]
    kind = SAME.get(given, given)
    one_of(name, kind, TYPES)
    changes = []
    if not settings[f"{ACTOR}use_kl_loss"]:
        changes.append(Change(f"{ACTOR}use_kl_loss", True, False, "without it verl has no KL"))
    changes += _not_zero(settings, f"{ACTOR}kl_loss_coef")
    if kind not in REVERSE:
        why = {"kl": "k1 as a loss descends nothing", "abs": "|log π/ref| is no KL"}
        cut = "k3 as a loss descends the forward KL, and its clamp has no gradient where log π/ref is below -2.61"
        changes.append(Change(name, "low_var_kl+", settings[name], why.get(kind, cut)))
    loss = f"verl use_kl_loss kl_loss_type={kind} loss_agg_mode={mode}"
    return Part("loss", loss, settings[f"{ACTOR}kl_loss_coef"], partial(_loss, kind, mode)), changes


def _in_reward(settings: dict[str, Any], mode: str) -> tuple[Part, list[Change]]:
    name = f"{ALGORITHM}kl_penalty"
    given: str = settings[name]
    kind = SAME.get(given, given)
    one_of(name, kind, TYPES)
    estimator, by_std = settings[f"{ALGORITHM}adv_estimator"], settings[f"{ALGORITHM}norm_adv_by_std_in_grpo"]
    changes = _not_zero(settings, f"{ALGORITHM}kl_ctrl.kl_coef")
    if kind.rstrip("+") != "kl":
        changes.append(Change(name, "kl", settings[name], "in the reward only k1 descends the reverse KL"))
    if estimator == "grpo" and by_std:
        why = "the standard deviation of the group divides the KL too"
        changes.append(Change(f"{ALGORITHM}norm_adv_by_std_in_grpo", False, True, why))
    elif estimator not in ("grpo", "rloo"):
        whitened = "whitened advantages divide the KL by the standard deviation of the batch"
        why = whitened if estimator in WHITENED else "this estimator is not audited"
        changes.append(Change(f"{ALGORITHM}adv_estimator", "rloo", estimator, why))
    advantage = {"gae": "gae critic=0", "grpo": "grpo" if by_std else "grpo without std"}.get(estimator, estimator)
    loss = f"verl use_kl_in_reward kl_penalty={kind.rstrip('+')} adv_estimator={advantage}"
    caveat = "Audited with a critic that is 0." if estimator == "gae" else ""
    if mode not in (SUM, f"{SUM}-norm"):
        more = "is the same times the number of completions" if mode == "token-sum" else "divides by lengths as well"
        caveat = f"{caveat} Audited with loss_agg_mode={SUM}: {mode} {more}.".strip()
    return Part("reward", loss, settings[f"{ALGORITHM}kl_ctrl.kl_coef"], caveat=caveat), changes


def _not_zero(settings: dict[str, Any], name: str) -> list[Change]:
    return [] if settings[name] else [Change(name, DEFAULTS[name], 0.0, "at 0 there is no KL")]


def _reduction(mode: str) -> list[Change]:
    name = f"{ACTOR}loss_agg_mode"
    if mode == "seq-mean-token-mean":
        return [Change(name, SUM, mode, "it divides by the length of each completion")]
    if mode == "token-mean":
        return [Change(name, SUM, mode, TOKEN_MEAN, optional=True)]
    return []


def _stale(settings: dict[str, Any]) -> tuple[str, ...]:
    batch, mini = settings["data.train_batch_size"], settings[f"{ACTOR}ppo_mini_batch_size"]
    found = []
    if batch > mini:
        found.append(f"train_batch_size={batch} above ppo_mini_batch_size={mini}: a batch is used for several updates")
    if settings[f"{ACTOR}ppo_epochs"] > 1:
        found.append(f"ppo_epochs={settings[f'{ACTOR}ppo_epochs']}: a batch is used for several updates")
    return (*found, ENGINE)


def _loss(kind: str, mode: str) -> "Subject":
    from ..verl import in_loss

    return in_loss(kind, mode)
