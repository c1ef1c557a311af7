"""OpenRLHF: the flags of `openrlhf.cli.train_ppo_ray`."""

from dataclasses import replace
from typing import Any

from ...targets import Verdict
from .run import ADAPTS, Change, Part, Run, one_of, with_defaults

DEFAULTS: dict[str, Any] = {
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": False,
    "algo.kl.estimator": "k1",
    "algo.kl.unbiased_gradient": False,
    "algo.advantage.estimator": "gae",
    "algo.advantage.no_std_norm": False,
    "train.max_epochs": 1,
    "train.batch_size": 128,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
}
"""The defaults of the settings that matter, read in the source of version 0.11.2."""

HARMLESS = ("algo.kl.target", "algo.kl.horizon", "kl_target", "kl_horizon", "train.ema_beta", "ema_beta")
"""What adapts β, and an average of the weights."""

OLD = {
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "kl_estimator": "algo.kl.estimator",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "max_epochs": "train.max_epochs",
    "train_batch_size": "train.batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
}
"""The names of releases before 0.10.2, by those of today; their defaults were the same."""

ONLY_OLD = ("init_kl_coef", "advantage_estimator", "rollout_batch_size", "no_advantage_std_norm")
"""Those of them that no other framework has."""

OLD_NAMES = "Flags of OpenRLHF before 0.10.2 are read as today's. The audit is of 0.11.2; older releases may differ."

WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""Estimators that are whitened over the batch after the KL is added; with `no_std_norm` only the mean is subtracted."""

BATCH_MEAN = "the mean of the batch is subtracted after the KL is added, which is right in large batches only"
BATCH_STD = "whitening divides the KL by the standard deviation of the batch"

ENGINE = "OpenRLHF samples with vLLM, whose log-probs differ from those of the trainer"


def openrlhf_run(given: dict[str, Any]) -> Run:
    """Read the flags, with OpenRLHF's defaults for those that are missing."""
    settings, named = with_defaults(given, DEFAULTS)
    estimator = one_of("algo.kl.estimator", settings["algo.kl.estimator"], ("k1", "k2", "k3"))
    changes: list[Change] = []
    target: Verdict = "reverse-kl-token" if settings["algo.kl.use_loss"] else "reverse-kl-sequence"
    if not settings["algo.kl.init_coef"]:
        changes.append(Change("algo.kl.init_coef", 0.01, 0.0, "at 0 OpenRLHF loads no reference and has no KL"))
    if settings["algo.kl.use_loss"]:
        unbiased = settings["algo.kl.unbiased_gradient"]
        if not unbiased:
            why = "without it the value is clamped at 10, and k1 descends nothing, k3 the forward KL"
            changes.append(Change("algo.kl.unbiased_gradient", True, False, why))
        loss = f"openrlhf algo.kl.use_loss estimator={estimator} unbiased_gradient={unbiased}"
        part = Part("loss", loss, settings["algo.kl.init_coef"])
    else:
        part = _in_reward(settings, estimator, changes)
    parts = (part,) if settings["algo.kl.init_coef"] else ()
    adapts = given.get("algo.kl.target", given.get("kl_target")) is not None
    notes = (ADAPTS,) if adapts and parts else ()
    return Run("openrlhf", "PPO", settings, named, parts, _stale(settings), target, tuple(changes), notes)


def _in_reward(settings: dict[str, Any], estimator: str, changes: list[Change]) -> Part:
    kind = settings["algo.advantage.estimator"]
    mean_only = kind in WHITENED and settings["algo.advantage.no_std_norm"]  # the others ignore the flag
    if estimator != "k1":
        changes.append(Change("algo.kl.estimator", "k1", estimator, "in the reward only k1 descends the reverse KL"))
    if kind in WHITENED:
        why = BATCH_MEAN if mean_only else BATCH_STD
        changes.append(Change("algo.advantage.estimator", "rloo", kind, why, optional=mean_only))
    advantage = "gae critic=0" if kind == "gae" else kind
    if mean_only:
        advantage += " no_std_norm"
    loss = f"openrlhf algo.kl in reward estimator={estimator} advantage={advantage}"
    caveat = "Audited with a critic that is 0." if kind == "gae" else ""
    return Part("reward", loss, settings["algo.kl.init_coef"], caveat=caveat)


def _stale(settings: dict[str, Any]) -> tuple[str, ...]:
    rows = settings["rollout.batch_size"] * settings["rollout.n_samples_per_prompt"]
    update = settings["train.batch_size"]
    found = []
    if rows > update:
        found.append(f"{rows} completions of a rollout above train.batch_size={update}: several updates use a rollout")
    if settings["train.max_epochs"] > 1:
        found.append(f"train.max_epochs={settings['train.max_epochs']}: a batch is used for several updates")
    return (*found, ENGINE)


def with_old_names(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """The changes by the names that a release before 0.10.2 has."""
    old = {new: name for name, new in OLD.items()}
    renamed = lambda change: {"name": old[change.name]}
    late = lambda change: {"why": f"{change.why}; releases with the old flags lack it"}
    return tuple(replace(x, **(renamed(x) if x.name in old else late(x))) for x in changes)
