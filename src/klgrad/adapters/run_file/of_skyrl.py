"""SkyRL: `trainer.algorithm` and the sizes of its batches."""

from typing import Any

from ...errors import RunFileError
from ...targets import Verdict
from .run import ADAPTS, TOKEN_MEAN, Change, Part, Run, one_of, with_defaults

ALGORITHM = "trainer.algorithm."
DEFAULTS: dict[str, Any] = {
    f"{ALGORITHM}use_kl_loss": True,
    f"{ALGORITHM}use_kl_in_reward": False,
    f"{ALGORITHM}kl_loss_coef": 0.001,
    f"{ALGORITHM}kl_estimator_type": "k3",
    f"{ALGORITHM}advantage_estimator": "grpo",
    f"{ALGORITHM}grpo_norm_by_std": True,
    f"{ALGORITHM}loss_reduction": "token_mean",
    "trainer.train_batch_size": 1024,
    "trainer.policy_mini_batch_size": 256,
    "trainer.update_epochs_per_batch": 1,
}
"""The defaults of the settings that matter, read in the source of version 0.3.0."""

HARMLESS = tuple(f"{ALGORITHM}{name}" for name in ("kl_ctrl.type", "kl_ctrl.kl_target", "kl_ctrl.horizon")) + tuple(
    f"{ALGORITHM}kl_cov.{name}" for name in ("kl_cov_frac", "ppo_kl_coef")
)
"""What adapts β, and a policy loss."""

WHITENED = ("gae", "reinforce++")
"""Advantages that are whitened over the batch with the KL in them, by the audits of version 0.3.0."""

SUM = "seq_mean_token_sum_norm"
ENGINE = "SkyRL samples with an inference engine, whose log-probs differ from those of the trainer"


def skyrl_run(given: dict[str, Any]) -> Run:
    """Read the settings of a SkyRL trainer, with SkyRL's defaults for those that are missing."""
    settings, named = with_defaults(given, DEFAULTS)
    in_reward, in_loss = settings[f"{ALGORITHM}use_kl_in_reward"], settings[f"{ALGORITHM}use_kl_loss"]
    if in_reward and in_loss:
        raise RunFileError(
            "use_kl_loss or use_kl_in_reward",
            "both (use_kl_loss is on by default)",
            "switch one off: SkyRL refuses both",
        )
    name = f"{ALGORITHM}kl_estimator_type"
    estimator = one_of(name, settings[name], ("k1", "k2", "k3", "abs"))
    coefficient = settings[f"{ALGORITHM}kl_loss_coef"]
    zero = [] if coefficient else [Change(f"{ALGORITHM}kl_loss_coef", 0.001, 0.0, "at 0 there is no KL")]
    if in_reward:
        part, changes = _in_reward(settings, estimator)
        adapts = given.get(f"{ALGORITHM}kl_ctrl.type") == "adaptive"
        parts = (part,) if coefficient else ()
        return _run(settings, named, parts, "reverse-kl-sequence", [*zero, *changes], (ADAPTS,) * adapts)
    changes = [] if in_loss else [Change(f"{ALGORITHM}use_kl_loss", True, False, "without it SkyRL has no KL")]
    changes += zero
    if estimator != "k2":
        why = {"k1": "k1 as a loss descends nothing", "abs": "|log π/ref| is no KL"}
        cut = "k3 as a loss descends the forward KL, and its clamp has no gradient where log π/ref is below -2.61"
        changes.append(Change(name, "k2", estimator, why.get(estimator, cut)))
    part = Part("loss", f"skyrl use_kl_loss kl_estimator_type={estimator}", settings[f"{ALGORITHM}kl_loss_coef"])
    notes = (
        "SkyRL divides a KL in the loss by the length of each completion, for every loss_reduction: no setting is "
        "the reverse KL where lengths vary. `klgrad advise skyrl --level token` has code that is.",
    )
    return _run(settings, named, (part,) if in_loss and coefficient else (), "reverse-kl-token", changes, notes)


def _run(
    settings: dict[str, Any],
    named: tuple[str, ...],
    parts: tuple[Part, ...],
    target: Verdict,
    changes: list[Change],
    notes: tuple[str, ...] = (),
) -> Run:
    return Run("skyrl", "its trainer", settings, named, parts, _stale(settings), target, tuple(changes), notes)


def _in_reward(settings: dict[str, Any], estimator: str) -> tuple[Part, list[Change]]:
    kind, mode = settings[f"{ALGORITHM}advantage_estimator"], settings[f"{ALGORITHM}loss_reduction"]
    changes: list[Change] = []
    if estimator != "k1":
        why = "in the reward only k1 descends the reverse KL"
        changes.append(Change(f"{ALGORITHM}kl_estimator_type", "k1", estimator, why))
    if kind == "grpo" and settings[f"{ALGORITHM}grpo_norm_by_std"]:
        why = "the standard deviation of the group divides the KL too"
        changes.append(Change(f"{ALGORITHM}grpo_norm_by_std", False, True, why))
    elif kind not in ("grpo", "rloo"):
        whitened = "whitened advantages divide the KL by the standard deviation of the batch"
        why = whitened if kind in WHITENED else "this estimator is not audited"
        changes.append(Change(f"{ALGORITHM}advantage_estimator", "rloo", kind, why))
    if mode != SUM:
        averaged = mode == "token_mean"
        why = f"{TOKEN_MEAN if averaged else 'it divides by lengths'}; set max_seq_len with it"
        changes.append(Change(f"{ALGORITHM}loss_reduction", SUM, mode, why, optional=averaged))
    advantage = {"gae": "gae critic=0", "grpo": "grpo"}.get(kind, kind)
    advantage += " without std" if kind == "grpo" and not settings[f"{ALGORITHM}grpo_norm_by_std"] else ""
    averaged = (estimator, kind, mode) in (("k3", "grpo", "token_mean"), ("k1", "rloo", "token_mean"))
    loss = f"skyrl use_kl_in_reward estimator={estimator} advantage={advantage}{' token_mean' if averaged else ''}"
    caveat = "" if averaged or mode == SUM else f"Audited with loss_reduction={SUM}: {mode} divides by lengths as well."
    return Part("reward", loss, settings[f"{ALGORITHM}kl_loss_coef"], caveat=caveat), changes


def _stale(settings: dict[str, Any]) -> tuple[str, ...]:
    batch, mini = settings["trainer.train_batch_size"], settings["trainer.policy_mini_batch_size"]
    found = []
    if batch > mini:
        found.append(f"train_batch_size={batch} above policy_mini_batch_size={mini}: several updates use a batch")
    if settings["trainer.update_epochs_per_batch"] > 1:
        epochs = settings["trainer.update_epochs_per_batch"]
        found.append(f"update_epochs_per_batch={epochs}: a batch is used for several updates")
    return (*found, ENGINE)
