"""Settings of verl by which the declared KL would mean something else: each is refused with its reason."""

from typing import Any

from ..core.term import KLTerm
from ..errors import MeaningError
from .settings import NODE, Settings

PLAIN_LOSSES = ("vanilla", "gpg")
"""Values of `policy_loss.loss_mode` with the gradient -A_t ∇log π(y_t) on samples of π, token by token."""


def check(config: Any, term: KLTerm, settings: Settings) -> None:
    """Raise `MeaningError` for the first setting that contradicts the declaration."""
    _own_kl(config)
    _distillation(config, settings)
    _term(config, term, settings)
    _mask(config)
    _sampler(config, term, settings)
    if settings.placement == "advantage":
        _advantage(config, settings)


def _own_kl(config: Any) -> None:
    on = [
        name
        for name, value in (
            ("actor_rollout_ref.actor.use_kl_loss", config["actor_rollout_ref"]["actor"]["use_kl_loss"]),
            ("algorithm.use_kl_in_reward", config["algorithm"]["use_kl_in_reward"]),
        )
        if value
    ]
    if on:
        raise MeaningError(
            f"one KL: that of `{NODE}`, or verl's own",
            f"`{NODE}` and {' and '.join(f'{name}=True' for name in on)}",
            f"set {' and '.join(f'{name}=False' for name in on)}; klgrad makes verl load the reference without them",
        )


def _distillation(config: Any, settings: Settings) -> None:
    enabled = bool((config.get("distillation") or {}).get("enabled", False))
    if settings.reference == "ref" and enabled:
        raise MeaningError(
            f"one KL: that of `{NODE}`, or that of verl's distillation",
            f"`{NODE}` and distillation.enabled=True",
            f"set {NODE}.reference=teacher for the declared KL to the teacher, or distillation.enabled=False",
        )
    if settings.reference == "ref":
        return
    if not enabled:
        raise MeaningError(
            f"distillation.enabled=True with {NODE}.reference=teacher",
            "distillation.enabled=False",
            "declare the teacher under distillation.teacher_models, as verl documents",
        )
    if settings.placement != "loss":
        raise MeaningError(
            f"{NODE}.placement=loss with {NODE}.reference=teacher",
            settings.placement,
            "write placement=loss: only workers have the teacher's log-probs",
        )
    if settings.target is not None:
        raise MeaningError(
            f"a constant β with {NODE}.reference=teacher",
            f"target={settings.target:g}",
            "drop `target`: the driver does not see the KL to the teacher",
        )
    if config["distillation"]["distillation_loss"]["loss_mode"] == "forward_kl_topk":
        raise MeaningError(
            f"a teacher that scores the sampled token with {NODE}.reference=teacher",
            "distillation.distillation_loss.loss_mode=forward_kl_topk",
            "write loss_mode=k1; klgrad replaces the loss, and the mode then only says what the teacher returns",
        )


def _term(config: Any, term: KLTerm, settings: Settings) -> None:
    if term.estimator == "exact":
        raise MeaningError(
            "a sampled estimator: k1, k1_k3, or k3 for the forward KL",
            "estimator=exact",
            "write estimator=k1: verl's reference returns the log-prob of the sampled token, not of the vocabulary",
        )
    if term.baseline != "leave_one_out":
        return
    if settings.placement == "loss":
        raise MeaningError(
            "no baseline with placement=loss",
            "baseline=leave_one_out",
            "write placement=advantage, where the whole group is known; verl's micro-batches divide groups",
        )
    if config["actor_rollout_ref"]["rollout"]["n"] < 2:
        raise MeaningError(
            "actor_rollout_ref.rollout.n of 2 or more with baseline=leave_one_out",
            f"{config['actor_rollout_ref']['rollout']['n']}",
            "raise rollout.n, or write baseline=none",
        )


def _correction(config: Any) -> Any:
    return config["algorithm"].get("rollout_correction") or {}


def skips_scoring(config: Any) -> bool:
    """Whether verl takes the rollout engine's log-probs for those of the policy before the update."""
    return bool(_correction(config).get("bypass_mode"))


def _mask(config: Any) -> None:
    if _correction(config).get("rollout_rs"):
        raise MeaningError(
            "the KL of all tokens",
            f"algorithm.rollout_correction.rollout_rs={_correction(config)['rollout_rs']}",
            "set it to null: rejected tokens would lose their KL, and the others their future",
        )


def _sampler(config: Any, term: KLTerm, settings: Settings) -> None:
    if term.weighting is None or settings.sampler != "rollout":
        return
    if not config["actor_rollout_ref"]["rollout"]["calculate_log_probs"]:
        raise MeaningError(
            "the rollout engine's log-probs for `ratio` with sampler=rollout",
            "actor_rollout_ref.rollout.calculate_log_probs=False",
            "set it to True, or write sampler=old",
        )


def _advantage(config: Any, settings: Settings) -> None:
    actor = config["actor_rollout_ref"]["actor"]
    mode = (actor.get("policy_loss") or {}).get("loss_mode", "vanilla")
    if mode not in PLAIN_LOSSES:
        raise MeaningError(
            f"actor.policy_loss.loss_mode in {PLAIN_LOSSES} with placement=advantage",
            str(mode),
            "write placement=loss: this mode weights or selects tokens by their advantages or by whole completions",
        )
    if settings.reduction != "policy":
        raise MeaningError(
            "reduction=policy with placement=advantage",
            settings.reduction,
            "write placement=loss: advantages are reduced like the policy loss",
        )
    if settings.ratio != "none" and settings.sampler == "old":
        raise MeaningError(
            "sampler=rollout for `ratio` with placement=advantage",
            "sampler=old",
            "write ratio=none: advantages are computed at the old policy, whose ratio to itself is 1",
        )
    if skips_scoring(config):
        raise MeaningError(
            "log-probs of the trainer with placement=advantage",
            "algorithm.rollout_correction.bypass_mode=True",
            "write placement=loss: with this mode the driver has only those of the rollout engine",
        )
    if weighted := _correction(config).get("rollout_is"):
        raise MeaningError(
            "no rollout_is with placement=advantage",
            f"algorithm.rollout_correction.rollout_is={weighted}",
            f"write placement=loss with {NODE}.ratio: verl multiplies advantages, and the KL in them, by its own ratio",
        )
