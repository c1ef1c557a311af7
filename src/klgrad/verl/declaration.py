"""The KL that a verl run declares: its settings, their checks, notes on what they mean, and how they reach workers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from ..core.term import KLTerm
from ..errors import MeaningError, UnknownNameError
from ..integrations import AdaptiveCoefficient, Facts, Objective, choice_field, refuse_if

# The settings under `klgrad` in verl's configuration: those of every objective, and those that only verl has.

NODE = "klgrad"
"""The name of the node in verl's configuration, and of the one inside `actor_rollout_ref`, all that its workers get."""

PREFIX = "klgrad_"
"""Before the name of the mode of verl's that a trainer of klgrad's is based on."""

Config = Any
"""verl's configuration, or a node of it: of OmegaConf, or nested mappings."""


@dataclass(frozen=True, kw_only=True)
class VerlObjective(Objective):
    """What the settings under `klgrad` declare. It is sent to the workers, and compares by value.

    Attributes:
        placement: `loss` adds the term to the policy loss in the workers; `advantage` subtracts its coefficient from
            the advantages after verl has normalised them.
        sampler: whose log-probs the ratio divides by: `rollout`, the rollout engine, or `old`, the policy before the
            update as the trainer computes it.
        reference: `ref`, verl's reference model, or `teacher`, the teacher of verl's distillation.
        tail: with `estimator=exact`, how the entries beyond the teacher's top k are treated: `lump`, as one entry, or
            `none`, not at all.
        task_rewards: whether the policy loss is trained beside the KL; False for distillation without rewards. It
            follows from verl's own settings.
    """

    prefix: ClassVar[str] = f"{NODE}."

    placement: str = choice_field("loss", "advantage")
    sampler: str = choice_field("rollout", "old")
    reference: str = choice_field("ref", "teacher")
    tail: str = choice_field("lump", "none")
    task_rewards: bool = True

    def named(self, name: str, value: object) -> str:
        return f"{name}={value}"

    @property
    def term(self) -> KLTerm:
        return self.declared_term

    @property
    def in_advantage(self) -> bool:
        """Whether the driver subtracts the coefficient from the advantages."""
        return self.placement == "advantage"

    @property
    def from_teacher(self) -> bool:
        """Whether the reference is the teacher of verl's distillation."""
        return self.reference == "teacher"

    @property
    def over_entries(self) -> bool:
        """Whether the KL is a sum over the teacher's top k, from the logits in the workers."""
        return self.estimator == "exact"

    def __str__(self) -> str:
        beta, formula = f"β={self.coef:g}", self.term.formula
        if self.target is not None:
            beta += f" at first, for {self.target:g} nats per {self.target_unit}"
        if self.reduction == "policy":
            formula = replace(formula, unit="reduced as loss_agg_mode reduces the policy loss")
        if self.over_entries:
            tail = {"lump": "the rest as one entry", "none": "without the rest"}[self.tail]
            formula = replace(formula, notes=(*formula.notes, f"over the teacher's top k, {tail}"))
        return f"{self.term.name} in the {self.placement}, {beta}: {formula}"


def term_of(node: Config) -> VerlObjective:
    """Read the node `klgrad` alone, without the rest of the configuration. Unknown names and bad values are errors."""
    known = [f.name for f in fields(VerlObjective) if f.name != "task_rewards"]
    for name in node:
        if name not in known:
            raise UnknownNameError(f"setting of `{NODE}`", str(name), known)
    objective = VerlObjective(**{str(name): value for name, value in node.items()})
    _ = objective.term  # its own checks
    return objective


def read_declaration(config: Config) -> VerlObjective:
    """Check verl's whole configuration, and read what it declares.

    A `MeaningError` says where settings contradict each other, or verl would change what they mean.
    """
    node = config.get(NODE)
    if node is None:
        raise MeaningError(
            f"the KL declared under `{NODE}`, because trainer.v1.trainer_mode asks for it",
            "no such settings",
            f"add +{NODE}.coef=0.05, for example, or use trainer.v1.trainer_mode=sync for no KL",
        )
    objective = term_of(node)
    check(config, objective)
    if not objective.from_teacher:
        return objective
    return replace(objective, task_rewards=bool(config["distillation"]["distillation_loss"]["use_task_rewards"]))


# Settings of verl by which the declared KL would mean something else: each is refused with its reason.

PLAIN_LOSSES = ("vanilla", "gpg")
"""Values of `policy_loss.loss_mode` with the gradient -A_t ∇log π(y_t) on samples of π, token by token."""


def check(config: Config, objective: VerlObjective) -> None:
    """Raise `MeaningError` for the first setting that contradicts the declaration."""
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    own = {
        "actor_rollout_ref.actor.use_kl_loss": actor["use_kl_loss"],
        "algorithm.use_kl_in_reward": config["algorithm"]["use_kl_in_reward"],
    }
    off = " and ".join(f"{name}=False" for name in own if own[name])
    refuse_if(
        off,
        f"one KL: that of `{NODE}`, or verl's own",
        f"`{NODE}` and {off.replace('False', 'True')}",
        f"set {off}; klgrad makes verl load the reference without them",
    )
    if objective.from_teacher:
        _check_teacher(config, objective)
    else:
        refuse_if(
            (config.get("distillation") or {}).get("enabled", False),
            f"one KL: that of `{NODE}`, or that of verl's distillation",
            f"`{NODE}` and distillation.enabled=True",
            f"set {NODE}.reference=teacher for the declared KL to the teacher, or distillation.enabled=False",
        )
        refuse_if(
            objective.over_entries,
            "a sampled estimator: k1, k1_k3, k3 for the forward KL, or sampled for other divergences",
            "estimator=exact",
            "write estimator=k1: verl's reference returns the log-prob of the sampled token, not of the vocabulary",
        )
    refuse_if(
        objective.baseline == "leave_one_out" and objective.placement == "loss",
        "no baseline with placement=loss",
        "baseline=leave_one_out",
        "write placement=advantage, where the whole group is known; verl's micro-batches divide groups",
    )
    rejected = _correction(config).get("rollout_rs")
    refuse_if(
        rejected,
        "the KL of all tokens",
        f"algorithm.rollout_correction.rollout_rs={rejected}",
        "set it to null: rejected tokens would lose their KL, and the others their future",
    )
    refuse_if(
        objective.ratio != "none" and objective.sampler == "rollout" and not rollout["calculate_log_probs"],
        "the rollout engine's log-probs for `ratio` with sampler=rollout",
        "actor_rollout_ref.rollout.calculate_log_probs=False",
        "set it to True, or write sampler=old",
    )
    if objective.in_advantage:
        _check_advantage(config, objective)


TOP_K = "forward_kl_topk"
"""The `loss_mode` with which the teacher returns its likeliest entries, and workers show their logits to the loss."""


def _check_teacher(config: Config, objective: VerlObjective) -> None:
    refuse_if(
        not (config.get("distillation") or {}).get("enabled", False),
        f"distillation.enabled=True with {NODE}.reference=teacher",
        "distillation.enabled=False",
        "declare the teacher under distillation.teacher_models, as verl documents",
    )
    refuse_if(
        objective.placement != "loss" or objective.target is not None,
        f"{NODE}.placement=loss and a constant β with {NODE}.reference=teacher",
        f"placement={objective.placement}, target={objective.target}",
        "write placement=loss, and drop `target`: only workers have the teacher's log-probs",
    )
    mode = config["distillation"]["distillation_loss"]["loss_mode"]
    name, why = "distillation.distillation_loss.loss_mode", "klgrad replaces the loss; the mode says what it can read"
    refuse_if(
        mode == TOP_K and not objective.over_entries,
        f"a teacher that scores the sampled token with {NODE}.reference=teacher",
        f"{name}={TOP_K}",
        f"write loss_mode=k1, or {NODE}.estimator=exact with {NODE}.level=token; {why}",
    )
    if not objective.over_entries:
        return
    refuse_if(mode != TOP_K, f"the teacher's top k with estimator=exact: {name}={TOP_K}", str(mode), why)
    refuse_if(
        objective.level != "token" or objective.ratio != "none",
        f"{NODE}.level=token and ratio=none with estimator=exact",
        f"level={objective.level}, ratio={objective.ratio}",
        "write these: the teacher's top k say nothing of the sampled token, on which a future or a ratio would be",
    )
    actor = config["actor_rollout_ref"]["actor"]
    strategy, parallel = actor.get("strategy", "fsdp"), actor.get("ulysses_sequence_parallel_size", 1)
    refuse_if(
        not str(strategy).startswith("fsdp") or parallel > 1,
        "FSDP without sequence parallelism with estimator=exact",
        f"strategy={strategy}, ulysses_sequence_parallel_size={parallel}",
        "write estimator=k1: there each worker has a part of the logits",
    )


def _correction(config: Config) -> Config:
    return config["algorithm"].get("rollout_correction") or {}


def skips_scoring(config: Config) -> bool:
    """Whether verl takes the rollout engine's log-probs for those of the policy before the update."""
    return bool(_correction(config).get("bypass_mode"))


def _check_advantage(config: Config, objective: VerlObjective) -> None:
    mode = (config["actor_rollout_ref"]["actor"].get("policy_loss") or {}).get("loss_mode", "vanilla")
    refuse_if(
        mode not in PLAIN_LOSSES,
        f"actor.policy_loss.loss_mode in {PLAIN_LOSSES} with placement=advantage",
        str(mode),
        "write placement=loss: this mode weights or selects tokens by their advantages or by whole completions",
    )
    refuse_if(
        objective.ratio != "none" and objective.sampler == "old",
        "sampler=rollout for `ratio` with placement=advantage",
        "sampler=old",
        "write ratio=none: advantages are computed at the old policy, whose ratio to itself is 1",
    )
    refuse_if(
        skips_scoring(config),
        "log-probs of the trainer with placement=advantage",
        "algorithm.rollout_correction.bypass_mode=True",
        "write placement=loss: with this mode the driver has only those of the rollout engine",
    )
    weighted = _correction(config).get("rollout_is")
    refuse_if(
        weighted,
        "no rollout_is with placement=advantage",
        f"algorithm.rollout_correction.rollout_is={weighted}",
        f"write placement=loss with {NODE}.ratio: verl multiplies advantages, and the KL in them, by its own ratio",
    )


# Settings of verl that change the meaning of the declared KL without being an error: one sentence each.


def notes(config: Config, objective: VerlObjective) -> list[str]:
    """The sentences that apply to a configuration; they are logged when a run starts."""
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    neutral = {"top_p": (1,), "top_k": (-1, 0)}
    given = {name: rollout.get(name, neutral[name][0]) for name in neutral}
    filters = [f"rollout.{name}={value}" for name, value in given.items() if value not in neutral[name]]
    if (config["algorithm"].get("filter_groups") or {}).get("enable"):
        filters.append("algorithm.filter_groups.enable=True")
    bonus, mode = actor["entropy_coeff"], actor["loss_agg_mode"]
    facts = Facts(
        "verl",
        stale=None if objective.in_advantage else _stale(config),
        filters=filters,
        # without rewards the whole policy loss is dropped, and the bonus with it
        entropy=f"entropy_coeff={bonus:g}" if bonus and objective.task_rewards else None,
        mean=f"loss_agg_mode={mode}" if mode == "seq-mean-token-mean" else None,
        sums="reduction=sequence with placement=loss, or loss_agg_mode=token-mean,",
    )
    return [*objective.notes(facts), *_notes_on_verl(config, objective)]


def _stale(config: Config) -> str | None:
    """The setting by which completions are older than the policy that is trained on them; None if there is none."""
    actor, mode = config["actor_rollout_ref"]["actor"], config["trainer"]["v1"]["trainer_mode"]
    updates = actor["ppo_epochs"] * (config["data"]["train_batch_size"] // actor["ppo_mini_batch_size"])
    if "async" in mode:
        return f"trainer_mode={mode}"
    return f"{updates} updates on each batch" if updates > 1 else None


def _notes_on_verl(config: Config, objective: VerlObjective) -> Iterator[str]:
    """Notes on settings that TRL does not have."""
    why, temperature = _stale(config), config["actor_rollout_ref"]["rollout"]["temperature"]
    if why is not None and objective.in_advantage:
        yield (
            f"{why}: the KL in the advantages is that of the policy before the update, and later updates descend PPO's "
            "clipped surrogate of it; placement=loss with ratio=prefix evaluates it at every update"
        )
    if objective.from_teacher and temperature != 1:
        yield (
            f"rollout.temperature={temperature:g}: verl scores the student at this temperature and the teacher at 1, "
            "so that the KL is between these two; set rollout.temperature=1 for the KL of the models as they are"
        )
    if skips_scoring(config) and not objective.from_teacher:
        yield (
            "rollout_correction.bypass_mode=True: the driver has only the log-probs of the rollout engine, so that the "
            "KL that it logs, and by which it adapts β, is that of the engine's policy; the mismatch is not measured"
        )


# verl's own trainers, registered or not, would ignore the settings under `klgrad`, and train without the declared KL.


class CheckedConfig:
    """The attribute `config` of a trainer: it refuses a configuration that declares a KL.

    A wrapper of `__init__` is not enough: verl's fully asynchronous trainers do not call that of their base.
    """

    def __get__(self, trainer: object, owner: type) -> object:
        if trainer is None:
            return self
        if "config" not in vars(trainer):
            raise AttributeError("config")
        return vars(trainer)["config"]

    def __set__(self, trainer: object, config: Config) -> None:
        if config.get(NODE) is not None:
            modes = f"{PREFIX}sync, {PREFIX}colocate_async or {PREFIX}separate_async"
            raise MeaningError(
                f"trainer.use_v1=True and trainer.v1.trainer_mode={modes} with settings under `{NODE}`",
                f"{type(trainer).__name__}, which trains without them",
                "run verl.trainer.main_ppo with one of these modes, or remove the settings",
            )
        vars(trainer)["config"] = config


# β in verl's checkpoints: a file in the folder of each step.

STATE_FILE = "klgrad.json"


def step_folder(config: Config, step: int) -> Path:
    """The folder of a step's checkpoint, as verl names it."""
    trainer = config["trainer"]
    if trainer["resume_mode"] == "resume_path":
        return Path(trainer["resume_from_path"])
    return Path(trainer["default_local_dir"]) / f"global_step_{step}"


def save_beta(beta: AdaptiveCoefficient, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE_FILE).write_text(json.dumps(beta.state_dict()))


def load_beta(beta: AdaptiveCoefficient, folder: Path) -> bool:
    """Continue with the β of a checkpoint; False if it has none, as that of a run without klgrad."""
    if not (folder / STATE_FILE).is_file():
        return False
    beta.load_state_dict(json.loads((folder / STATE_FILE).read_text()))
    return True
