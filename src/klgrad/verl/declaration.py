"""The KL that a verl run declares: its settings, their checks, and notes on what they mean."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from ..core.families import CHOICES
from ..core.importance import ImportanceWeighting, Ratio
from ..core.term import KLTerm
from ..errors import MeaningError, UnknownNameError
from ..integrations import AdaptiveCoefficient, bound_of

# The settings under `klgrad` in verl's configuration: their names, types and defaults.

NODE = "klgrad"
"""The name of the node in verl's configuration."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field per setting; `docs/verl.md` explains each.

    Attributes:
        coef: β, the weight of the KL. With `target`, its starting value.
        placement: `loss` adds the term to the policy loss in the workers; `advantage` subtracts its coefficient from
            the advantages after verl has normalised them.
        divergence: `reverse` is KL(π‖ref), `forward` is KL(ref‖π).
        level: `sequence` or `token`.
        estimator: `k1`, `k1_k3`, or `k3` for the forward KL.
        discount: g in [0, 1] on the later tokens, at sequence level.
        baseline: `none` or `leave_one_out`, over the completions of a prompt.
        ratio: importance ratio to the sampler: `none`, `token`, `prefix` or `sequence`.
        ratio_bound: `truncate:MAX`, `clip:LOW:HIGH`, `mask:LOW:HIGH` or `none`.
        sampler: whose log-probs the ratio divides by: `rollout`, the rollout engine, or `old`, the policy before the
            update as the trainer computes it.
        influence_bound: c > 0 clips each token's own part to [-c, c].
        reduction: `policy`, as `loss_agg_mode` reduces the policy loss, or `sequence`: summed over each completion,
            averaged over completions.
        reference: `ref`, verl's reference model, or `teacher`, the teacher of verl's distillation.
        target: adapt β so that KL(π‖ref) stays near this value; None for a constant β.
        target_unit: nats per `sequence` or per `token`.
        horizon: steps over which β changes by a factor of e if the relative error is 1.
    """

    coef: float = 0.05
    placement: str = "loss"
    divergence: str = "reverse"
    level: str = "sequence"
    estimator: str = "k1"
    discount: float = 1.0
    baseline: str = "none"
    ratio: str = "none"
    ratio_bound: str = "truncate:2"
    sampler: str = "rollout"
    influence_bound: float | None = None
    reduction: str = "policy"
    reference: str = "ref"
    target: float | None = None
    target_unit: str = "sequence"
    horizon: int = 50

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise MeaningError(
                    f"`{NODE}.{name}` in {allowed}", repr(getattr(self, name)), f"write {NODE}.{name}={allowed[0]}"
                )
        for name in ("coef", "discount", "influence_bound", "target", "horizon"):
            value = getattr(self, name)
            if not _is_number(value) and not (value is None and name in OPTIONAL):
                raise MeaningError(f"`{NODE}.{name}` as a finite number", repr(value), f"write {NODE}.{name}=1")
        if self.coef < 0:
            raise MeaningError(f"`{NODE}.coef` of 0 or more", f"{self.coef:g}", "write 0 for no KL")
        if (self.target is not None and self.target <= 0) or self.horizon <= 0:
            raise MeaningError(
                f"`{NODE}.target` and `{NODE}.horizon` above 0", f"{self.target} and {self.horizon}", "drop `target`"
            )


ALLOWED: dict[str, tuple[str, ...]] = {
    "placement": ("loss", "advantage"),
    "divergence": tuple(CHOICES["divergence"]),
    "level": tuple(CHOICES["level"]),
    "estimator": tuple(CHOICES["estimator"]),
    "baseline": tuple(CHOICES["baseline"]),
    "ratio": ("none", *get_args(Ratio)),
    "sampler": ("rollout", "old"),
    "reduction": ("policy", "sequence"),
    "reference": ("ref", "teacher"),
    "target_unit": ("sequence", "token"),
}
"""The values of the settings that are words."""

OPTIONAL = ("influence_bound", "target")
"""The settings that are numbers or None."""


def settings_of(node: Mapping[str, Any]) -> Settings:
    """Read the node.

    Raises:
        UnknownNameError: for a setting that does not exist, with near matches.
        MeaningError: for a value that is not allowed.
    """
    known = [f.name for f in fields(Settings)]
    for name in node:
        if name not in known:
            raise UnknownNameError(f"setting of `{NODE}`", str(name), known)
    return Settings(**{str(name): value for name, value in node.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Settings of verl by which the declared KL would mean something else: each is refused with its reason.

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


# From verl's configuration to what is trained: a `KLTerm`, its placement, and β.


@dataclass(frozen=True)
class Declaration:
    """What the settings under `klgrad` declare. It is sent to the workers, and compares by value.

    Attributes:
        term: the KL term.
        settings: the settings that it was made of.
        task_rewards: whether the policy loss is trained beside the KL; False for distillation without rewards.
    """

    term: KLTerm
    settings: Settings
    task_rewards: bool = True

    @property
    def in_advantage(self) -> bool:
        """Whether the driver subtracts the coefficient from the advantages."""
        return self.settings.placement == "advantage"

    @property
    def from_teacher(self) -> bool:
        """Whether the reference is the teacher of verl's distillation."""
        return self.settings.reference == "teacher"

    def beta(self) -> AdaptiveCoefficient:
        """β as the run starts."""
        return AdaptiveCoefficient(self.settings.coef, self.settings.target, self.settings.horizon)

    def __str__(self) -> str:
        s = self.settings
        beta = (
            f"β={s.coef:g}" if s.target is None else f"β={s.coef:g} at first, for {s.target:g} nats per {s.target_unit}"
        )
        formula = self.term.formula
        if s.reduction == "policy":
            formula = replace(formula, unit="reduced as loss_agg_mode reduces the policy loss")
        return f"{self.term.name} in the {s.placement}, {beta}: {formula}"


def declared(config: Any) -> Declaration:
    """Check verl's configuration, and read what it declares.

    Args:
        config: verl's whole configuration, an OmegaConf node or nested mappings.

    Raises:
        MeaningError: where settings contradict each other, or verl would change what they mean.
    """
    found = term_of(_node(config))
    check(config, found.term, found.settings)
    if not found.from_teacher:
        return found
    return Declaration(
        found.term, found.settings, bool(config["distillation"]["distillation_loss"]["use_task_rewards"])
    )


def term_of(node: Mapping[str, Any]) -> Declaration:
    """Read the node `klgrad` alone, without the rest of the configuration."""
    s = settings_of(node)
    bound = bound_of(str(s.ratio_bound), f"{NODE}.ratio_bound")
    fields: dict[str, Any] = {
        name: getattr(s, name) for name in ("divergence", "level", "estimator", "baseline", "influence_bound")
    }
    weighting = None if s.ratio == "none" else ImportanceWeighting(s.ratio, bound)  # pyright: ignore[reportArgumentType]
    return Declaration(KLTerm(**fields, discount=float(s.discount), weighting=weighting), s)


def _node(config: Any) -> Mapping[str, Any]:
    node = config.get(NODE)
    if node is None:
        raise MeaningError(
            f"the KL declared under `{NODE}`, because trainer.v1.trainer_mode asks for it",
            "no such settings",
            f"add +{NODE}.coef=0.05, for example, or use trainer.v1.trainer_mode=sync for no KL",
        )
    return node


# Settings of verl that change the meaning of the declared KL without being an error: one sentence each.

Note = Callable[[Any, Declaration], str | None]


def notes(config: Any, declaration: Declaration) -> list[str]:
    """The sentences that apply to a configuration; they are logged when a run starts."""
    found = (note(config, declaration) for note in NOTES)
    return [sentence for sentence in found if sentence is not None]


def _updates_per_batch(config: Any) -> int:
    actor = config["actor_rollout_ref"]["actor"]
    return actor["ppo_epochs"] * (config["data"]["train_batch_size"] // actor["ppo_mini_batch_size"])


def _old_completions(config: Any, declaration: Declaration) -> str | None:
    mode = config["trainer"]["v1"]["trainer_mode"]
    updates = _updates_per_batch(config)
    if "async" not in mode and updates <= 1:
        return None
    why = f"trainer_mode={mode}" if "async" in mode else f"{updates} updates on each batch"
    if declaration.in_advantage:
        return (
            f"{why}: the KL in the advantages is that of the policy before the update, and later updates descend PPO's "
            "clipped surrogate of it; placement=loss with ratio=prefix evaluates it at every update"
        )
    if declaration.term.weighting is not None:
        return None
    return (
        f"{why} trains on completions that another policy sampled, and ratio=none leaves the KL uncorrected for it; "
        "ratio=prefix corrects it at sequence level, ratio=token on the sampler's prefixes"
    )


def _per_completion(config: Any, declaration: Declaration) -> str | None:
    mode = config["actor_rollout_ref"]["actor"]["loss_agg_mode"]
    if mode != "seq-mean-token-mean" or declaration.settings.reduction != "policy":
        return None
    return (
        f"loss_agg_mode={mode} averages the KL over the tokens of each completion, so that a token of a short "
        "completion counts more, and the gradient is that of no divergence; reduction=sequence with placement=loss, or "
        "loss_agg_mode=token-mean, keeps the declared KL"
    )


def _other_samples(config: Any, declaration: Declaration) -> str | None:
    rollout = config["actor_rollout_ref"]["rollout"]
    neutral = {"top_p": (1, 1.0), "top_k": (-1, 0)}
    changed = [
        f"rollout.{name}={rollout.get(name)}" for name, ok in neutral.items() if rollout.get(name, ok[0]) not in ok
    ]
    if (config["algorithm"].get("filter_groups") or {}).get("enable"):
        changed.append("algorithm.filter_groups.enable=True")
    if not changed:
        return None
    return (
        f"{', '.join(changed)}: completions are not samples of the policy that is trained, so that the KL is an "
        "average over other completions than its own, and `ratio` does not correct for it"
    )


def _entropy(config: Any, declaration: Declaration) -> str | None:
    bonus = config["actor_rollout_ref"]["actor"]["entropy_coeff"]
    if not bonus or not declaration.task_rewards:  # without rewards the whole policy loss is dropped
        return None
    return (
        f"entropy_coeff={bonus:g}: verl adds an entropy bonus to the loss, so that the optimum is not that of the "
        "reward and the KL alone"
    )


def _temperature_of_the_teacher(config: Any, declaration: Declaration) -> str | None:
    temperature = config["actor_rollout_ref"]["rollout"]["temperature"]
    if not declaration.from_teacher or temperature == 1:
        return None
    return (
        f"rollout.temperature={temperature:g}: verl scores the student at this temperature and the teacher at 1, so "
        "that the KL is between these two; set rollout.temperature=1 for the KL of the models as they are"
    )


def _bypass(config: Any, declaration: Declaration) -> str | None:
    if declaration.from_teacher or not skips_scoring(config):
        return None
    return (
        "rollout_correction.bypass_mode=True: the driver has only the log-probs of the rollout engine, so that the KL "
        "that it logs, and by which it adapts β, is that of the engine's policy; the mismatch is not measured"
    )


NOTES: tuple[Note, ...] = (
    _old_completions,
    _per_completion,
    _other_samples,
    _entropy,
    _temperature_of_the_teacher,
    _bypass,
)
