"""The KL of a run from its settings, for each framework."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..errors import RunFileError
from ..targets import Verdict

if TYPE_CHECKING:
    from ..audit import Subject


# `Run`: what a configuration file says about the KL of a run.


@dataclass(frozen=True)
class Part:
    """One KL of a run.

    Attributes:
        place: where the framework adds it.
        loss: the name of the audited loss with these settings.
        coefficient: β.
        build: makes that loss, where the framework's list of settings may not have it; None to take it from the list.
        caveat: what the audited loss leaves out.
    """

    place: Literal["loss", "reward", "advantage"]
    loss: str
    coefficient: float
    build: "Callable[[], Subject] | None" = None
    caveat: str = ""


ADAPTS = "β is adapted during training: the number below is its first value."
TOKEN_MEAN = "a mean over the tokens of the batch is right in large batches only"
"""The reason of an optional change."""


@dataclass(frozen=True)
class Change:
    """One setting to change.

    Attributes:
        name: the setting.
        value: the new value.
        was: the value in this run.
        why: the reason.
        optional: whether the KL is right without it in large batches.
    """

    name: str
    value: Any
    was: Any
    why: str
    optional: bool = False


@dataclass(frozen=True)
class Run:
    """The KL of a run.

    Attributes:
        framework: its name in `klgrad audit`.
        trainer: the trainer or the place in the framework, in words.
        settings: the settings that matter, with the framework's defaults where the file has none.
        given: those of them that the file has.
        parts: its KLs; none if the run has no KL.
        stale: why completions are not samples of the policy that is updated; empty if they are.
        target: the reverse KL that `changes` lead to.
        changes: what to change for it.
        notes: further remarks.
        overrides: those of `given` that were given beside the file.
    """

    framework: str
    trainer: str
    settings: dict[str, Any]
    given: tuple[str, ...]
    parts: tuple[Part, ...]
    stale: tuple[str, ...]
    target: Verdict
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = field(default=())
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a KL that is climbed: the audits are of the loss with a positive coefficient."""
        for part in self.parts:
            if not part.coefficient >= 0:  # NaN is refused too
                raise RunFileError(
                    f"a coefficient of at least 0 for the KL in the {part.place}",
                    f"{part.coefficient:g}",
                    "a negative coefficient rewards distance from the reference; remove the sign, or write 0 for no KL",
                )


def with_defaults(given: dict[str, Any], defaults: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings that matter, as values of their defaults' types, and the names of those that were given."""
    named = tuple(name for name in defaults if name in given)
    return defaults | {name: as_type(name, given[name], defaults[name]) for name in named}, named


def as_type(name: str, value: Any, default: Any) -> Any:
    """A value of a file, where `1e-3` may be a string, as a value of the type of the default."""
    kind = type(default)
    if isinstance(value, list | dict | tuple | set):  # never written out: aliases of YAML may make it endless
        raise RunFileError(f"{name} as one value", f"a {type(value).__name__}", _remedy(name, None, default))
    if isinstance(value, str) and ("$" in value or "`" in value):
        hydra = "; Hydra prints all values with --cfg job --resolve" if "." in name else ""
        raise RunFileError(f"a value for {name}", repr(value), f"give it by --set {name}=VALUE{hydra}")
    if default is None or (isinstance(value, kind) and kind is not int):
        return value
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind in (int, float):
            return kind(value)
        return str(value)
    except (KeyError, ValueError, TypeError):
        raise RunFileError(f"{name} as {KINDS[kind]}", repr(value), _remedy(name, value, default)) from None


def _remedy(name: str, value: Any, default: Any) -> str:
    return f"write {name}: {_example(value, default)}, for example"


def _example(value: Any, default: Any) -> Any:
    """The number in the text, if there is one; the default otherwise, or a usual β where that is 0."""
    kind = type(default)
    if kind not in (int, float):
        return default
    numbers = NUMBER.findall(value) if isinstance(value, str) else []
    number = float(numbers[0]) if len(numbers) == 1 else -1.0
    usable = 0 <= number < math.inf and (kind is float or number.is_integer())
    return kind(number) if usable else default or 0.04


NUMBER = re.compile(r"-?\d*\.?\d+(?:[eE][-+]?\d+)?")
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    """The value, if it is one of those known."""
    if value not in known:
        raise RunFileError(f"{name} as one of {', '.join(known)}", repr(value), "correct it, or name another framework")
    return value


# TRL: the fields of a `GRPOConfig` or `RLOOConfig`.

SAMPLING = {
    "num_iterations": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "use_vllm": False,
}
GRPO: dict[str, Any] = {
    "beta": 0.0,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "use_bias_correction_kl": True,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    **SAMPLING,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
}
RLOO: dict[str, Any] = {
    "beta": 0.05,
    "normalize_advantages": False,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    **SAMPLING,
}
TRAINERS = {"grpo": GRPO, "rloo": RLOO}
"""The defaults of the settings that matter, by trainer; a test compares them with TRL's."""

TELLING = (
    *(name for name in GRPO | RLOO if name not in ("per_device_train_batch_size", "gradient_accumulation_steps")),
    "num_generations", "reward_funcs", "max_completion_length",
)  # fmt: skip
"""Settings that tell a run of these trainers from TRL's others."""

PER_COMPLETION = ("grpo", "sapo")
PER_TOKEN = ("dapo", "cispo", "vespo")
PER_PASS = ("bnpo",)
SUMMED = ("dr_grpo", "luspo")
"""What each `loss_type` divides by: the length of each completion, the tokens of the batch, those of one forward pass
on one device, or a constant."""

LATER = "the later updates of a generation use completions of an earlier policy"
BETA = 0.04
OWN_FIELDS = ("kl_coef", "kl_level", "kl_divergence", "kl_estimator", "kl_placement", "kl_ratio", "kl_cell")
"""Fields of this package's `KLConfig`."""


def trl_run(given: dict[str, Any], trainer: str | None) -> Run:
    """Read the fields of TRL's configuration.

    Args:
        given: the settings of the file.
        trainer: `grpo` or `rloo`; None to tell by the settings, which is GRPO where they do not tell.

    Returns:
        The run.
    """
    if own := [name for name in OWN_FIELDS if name in given]:
        raise RunFileError("TRL's own settings", f"{own[0]}, of KLConfig", "use klgrad train --config FILE --dry-run")
    kind = trainer or ("rloo" if "normalize_advantages" in given else "grpo")
    settings, named = with_defaults(given, TRAINERS[kind])
    read = _grpo if kind == "grpo" else _rloo
    unsure = trainer is None and kind == "grpo" and "loss_type" not in given
    return read(settings, named, ("Read as the settings of a GRPOTrainer; --trainer rloo for RLOO.",) * unsure)


def _grpo(settings: dict[str, Any], named: tuple[str, ...], notes: tuple[str, ...]) -> Run:
    kind = one_of("loss_type", settings["loss_type"], (*PER_TOKEN, *PER_PASS, *PER_COMPLETION, *SUMMED))
    one_of("importance_sampling_level", settings["importance_sampling_level"], ("token", "sequence"))
    changes = _common(settings)
    if settings["importance_sampling_level"] != "token":
        why = "the KL would be corrected by one ratio per completion; this changes the policy loss too"
        changes.append(_to(settings, "importance_sampling_level", "token", why))
    if not settings["use_bias_correction_kl"]:
        changes.append(_to(settings, "use_bias_correction_kl", True, "k3 alone descends the forward KL"))
    if kind in PER_COMPLETION:
        changes.append(_to(settings, "loss_type", "dr_grpo", "it divides by the length of each completion"))
    elif kind in PER_TOKEN:
        changes.append(Change("loss_type", "dr_grpo", kind, TOKEN_MEAN, optional=True))
    why, caveat, audited = _of_one_pass(settings)
    if why:
        changes.append(_to(settings, "loss_type", "dr_grpo", why))
    chosen = audited_settings({**settings, "loss_type": audited})
    loss = " ".join(["trl grpo", *(f"{name}={value}" for name, value in chosen.items())])
    part = Part("loss", loss, settings["beta"], partial(_trl_subject, "grpo", chosen), caveat)
    return _run("GRPOTrainer", settings, named, part, changes, notes)


def _of_one_pass(settings: dict[str, Any]) -> tuple[str, str, str]:
    """Why to change a loss that divides by the tokens of one forward pass, how it was audited, and as what."""
    kind, rows = settings["loss_type"], settings["per_device_train_batch_size"]
    if kind not in PER_PASS:
        return "", "", kind
    why = f"it divides by the tokens of one forward pass, of per_device_train_batch_size={rows} completions"
    if rows == 1:
        caveat = f"Audited as loss_type=grpo: with one completion in a forward pass {kind} is the same."
        return f"{why}: by the length of each completion", caveat, "grpo"
    caveat = (
        f"Audited with the batch in one forward pass; here a pass has {rows} completions, however large the batch is: "
        "what holds in large batches holds if this number is large."
    )
    return why, caveat, kind


def _rloo(settings: dict[str, Any], named: tuple[str, ...], notes: tuple[str, ...]) -> Run:
    changes = _common(settings)
    if settings["normalize_advantages"]:
        why = "the standard deviation of the batch divides the KL too"
        changes.append(_to(settings, "normalize_advantages", False, why))
    shown = ("normalize_advantages", *(n for n in ("mask_truncated_completions", "use_vllm") if settings[n]))
    chosen = {name: settings[name] for name in shown}
    loss = " ".join(["trl rloo", *(f"{name}={value}" for name, value in chosen.items())])
    part = Part("reward", loss, settings["beta"], partial(_trl_subject, "rloo", chosen))
    return _run("RLOOTrainer", settings, named, part, changes, notes)


def _run(
    trainer: str,
    settings: dict[str, Any],
    named: tuple[str, ...],
    part: Part,
    changes: list[Change],
    notes: tuple[str, ...],
) -> Run:
    parts = (part,) if settings["beta"] else ()
    target: Verdict = "reverse-kl-token" if part.place == "loss" else "reverse-kl-sequence"
    if settings["sync_ref_model"]:
        notes = (*notes, "sync_ref_model moves the reference during training.")
    return Run("trl", trainer, settings, named, parts, _trl_stale(settings), target, tuple(changes), notes)


def audited_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of GRPO that its KL depends on, with those defaults that the adapter's list of settings names."""
    chosen = {name: settings[name] for name in ("loss_type", "importance_sampling_level", "use_bias_correction_kl")}
    if not settings["use_bias_correction_kl"]:
        chosen["importance_sampling_level"] = "token"  # no ratio touches the KL
    plain = chosen["importance_sampling_level"] == "token" and chosen["use_bias_correction_kl"]
    others = {"mask_truncated_completions": settings["mask_truncated_completions"], "use_vllm": settings["use_vllm"]}
    if settings["use_vllm"]:
        others["vllm_importance_sampling_correction"] = settings["vllm_importance_sampling_correction"]
        others["vllm_importance_sampling_mode"] = settings["vllm_importance_sampling_mode"]
    others = {name: value for name, value in others.items() if value != GRPO[name]}
    if plain and (others or chosen["loss_type"] not in ("dapo", "grpo", *SUMMED)):
        chosen = {"loss_type": chosen["loss_type"]}  # the list of settings leaves defaults out here
    return chosen | others


def _common(settings: dict[str, Any]) -> list[Change]:
    found = []
    if not settings["beta"]:
        found.append(_to(settings, "beta", BETA, "without it TRL loads no reference and has no KL"))
    if settings["mask_truncated_completions"]:
        why = "it drops the KL of completions that are cut off"
        found.append(_to(settings, "mask_truncated_completions", False, why))
    return found


def _to(settings: dict[str, Any], name: str, value: Any, why: str) -> Change:
    return Change(name, value, settings[name], why)


def _trl_stale(settings: dict[str, Any]) -> tuple[str, ...]:
    found = []
    if settings["num_iterations"] > 1:
        found.append(f"num_iterations={settings['num_iterations']}: each batch is used for several updates")
    steps, accumulated = settings["steps_per_generation"], settings["gradient_accumulation_steps"]
    if _whole(steps) > accumulated:
        found.append(f"steps_per_generation={steps} above gradient_accumulation_steps={accumulated}: {LATER}")
    found += _stale_by_size(settings)
    if settings["use_vllm"]:
        found.append("use_vllm: the log-probs of vLLM, which samples, differ from those of the trainer")
    return tuple(found)


def _stale_by_size(settings: dict[str, Any]) -> list[str]:
    """The reason by `generation_batch_size`, which depends on the number of processes: no file has that."""
    size, batch = settings["generation_batch_size"], settings["per_device_train_batch_size"]
    accumulated = settings["gradient_accumulation_steps"]
    processes = math.ceil(_whole(size) / max(batch * accumulated, 1))  # TRL fails with a batch of 0
    if processes <= 1:
        return []
    above = f"per_device_train_batch_size={batch} times gradient_accumulation_steps={accumulated}"
    return [f"generation_batch_size={size} above {above}: {LATER}, unless there are at least {processes} processes"]


def _whole(value: Any) -> int:
    """The number in a field that is None by default; 0 for None. A script has both as text."""
    return int(value) if str(value).isdigit() else 0


def _trl_subject(kind: str, settings: dict[str, Any]) -> "Subject":
    from . import trl

    return {"grpo": trl.grpo, "rloo": trl.rloo}[kind](**settings)


# verl with klgrad: the settings under `klgrad` of a configuration file, as a KL to audit.

PREFIX = "klgrad."
NUMBERS = {"influence_bound": 1.0, "target": 1.0}
"""Settings that are absent by default, with a value of their type."""


def has_declared(given: dict[str, Any]) -> bool:
    """Whether the file declares a KL under `klgrad`."""
    return any(name.startswith(PREFIX) for name in given)


def declared_part(given: dict[str, Any], mode: str) -> tuple[Part, list[Change], Verdict]:
    """The declared KL; what to change; and the divergence that it declares.

    Args:
        given: the settings of the file.
        mode: `loss_agg_mode`.
    """
    from ..verl.declaration import VerlObjective, term_of

    types = {**asdict(VerlObjective()), **NUMBERS}
    named = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
    node = {
        name: value if value is None else as_type(f"{PREFIX}{name}", value, types.get(name))
        for name, value in named.items()
    }
    found = term_of(node)
    reduction = "seq-mean-token-sum" if found.reduction == "sequence" else mode
    settings = {name: value for name, value in node.items() if name not in ("coef", "target", "target_unit", "horizon")}
    changes = []
    if found.term.weighting is None:
        why = "the rollout engine differs from the policy, and more so on later updates"
        changes.append(Change(f"{PREFIX}ratio", "prefix", "none", why, optional=True))
    written = " ".join(f"{name}={value}" for name, value in {"placement": "loss", **settings}.items())
    name = f"verl klgrad {written} loss_agg_mode={reduction}"
    caveat = "Audited at the first update on a batch." if found.in_advantage else ""
    part = Part(
        "advantage" if found.in_advantage else "loss",
        name,
        float(found.coef),
        partial(_subject, settings, reduction),
        caveat,
    )
    return part, changes, found.term.descends.on_policy


def _subject(settings: dict[str, Any], reduction: str) -> "Subject":
    from .verl import declared

    return declared(settings, reduction)


# verl: `actor_rollout_ref.actor`, `algorithm` and `data`.

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
    from .verl import in_loss

    return in_loss(kind, mode)


# OpenRLHF: the flags of `openrlhf.cli.train_ppo_ray`.

OPENRLHF_DEFAULTS: dict[str, Any] = {
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

OPENRLHF_HARMLESS = ("algo.kl.target", "algo.kl.horizon", "kl_target", "kl_horizon", "train.ema_beta", "ema_beta")
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

OPENRLHF_WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""Estimators that are whitened over the batch after the KL is added; with `no_std_norm` only the mean is subtracted."""

BATCH_MEAN = "the mean of the batch is subtracted after the KL is added, which is right in large batches only"
BATCH_STD = "whitening divides the KL by the standard deviation of the batch"

OPENRLHF_ENGINE = "OpenRLHF samples with vLLM, whose log-probs differ from those of the trainer"


def openrlhf_run(given: dict[str, Any]) -> Run:
    """Read the flags, with OpenRLHF's defaults for those that are missing."""
    settings, named = with_defaults(given, OPENRLHF_DEFAULTS)
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
        part = _openrlhf_in_reward(settings, estimator, changes)
    parts = (part,) if settings["algo.kl.init_coef"] else ()
    adapts = given.get("algo.kl.target", given.get("kl_target")) is not None
    notes = (ADAPTS,) if adapts and parts else ()
    return Run("openrlhf", "PPO", settings, named, parts, _openrlhf_stale(settings), target, tuple(changes), notes)


def _openrlhf_in_reward(settings: dict[str, Any], estimator: str, changes: list[Change]) -> Part:
    kind = settings["algo.advantage.estimator"]
    mean_only = kind in OPENRLHF_WHITENED and settings["algo.advantage.no_std_norm"]  # the others ignore the flag
    if estimator != "k1":
        changes.append(Change("algo.kl.estimator", "k1", estimator, "in the reward only k1 descends the reverse KL"))
    if kind in OPENRLHF_WHITENED:
        why = BATCH_MEAN if mean_only else BATCH_STD
        changes.append(Change("algo.advantage.estimator", "rloo", kind, why, optional=mean_only))
    advantage = "gae critic=0" if kind == "gae" else kind
    if mean_only:
        advantage += " no_std_norm"
    loss = f"openrlhf algo.kl in reward estimator={estimator} advantage={advantage}"
    caveat = "Audited with a critic that is 0." if kind == "gae" else ""
    return Part("reward", loss, settings["algo.kl.init_coef"], caveat=caveat)


def _openrlhf_stale(settings: dict[str, Any]) -> tuple[str, ...]:
    rows = settings["rollout.batch_size"] * settings["rollout.n_samples_per_prompt"]
    update = settings["train.batch_size"]
    found = []
    if rows > update:
        found.append(f"{rows} completions of a rollout above train.batch_size={update}: several updates use a rollout")
    if settings["train.max_epochs"] > 1:
        found.append(f"train.max_epochs={settings['train.max_epochs']}: a batch is used for several updates")
    return (*found, OPENRLHF_ENGINE)


def with_old_names(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """The changes by the names that a release before 0.10.2 has."""
    old = {new: name for name, new in OLD.items()}
    renamed = lambda change: {"name": old[change.name]}
    late = lambda change: {"why": f"{change.why}; releases with the old flags lack it"}
    return tuple(replace(x, **(renamed(x) if x.name in old else late(x))) for x in changes)


# SkyRL: `trainer.algorithm` and the sizes of its batches.

SKYRL_ALGORITHM = "trainer.algorithm."
SKYRL_DEFAULTS: dict[str, Any] = {
    f"{SKYRL_ALGORITHM}use_kl_loss": True,
    f"{SKYRL_ALGORITHM}use_kl_in_reward": False,
    f"{SKYRL_ALGORITHM}kl_loss_coef": 0.001,
    f"{SKYRL_ALGORITHM}kl_estimator_type": "k3",
    f"{SKYRL_ALGORITHM}advantage_estimator": "grpo",
    f"{SKYRL_ALGORITHM}grpo_norm_by_std": True,
    f"{SKYRL_ALGORITHM}loss_reduction": "token_mean",
    "trainer.train_batch_size": 1024,
    "trainer.policy_mini_batch_size": 256,
    "trainer.update_epochs_per_batch": 1,
}
"""The defaults of the settings that matter, read in the source of version 0.3.0."""

SKYRL_HARMLESS = tuple(
    f"{SKYRL_ALGORITHM}{name}" for name in ("kl_ctrl.type", "kl_ctrl.kl_target", "kl_ctrl.horizon")
) + tuple(f"{SKYRL_ALGORITHM}kl_cov.{name}" for name in ("kl_cov_frac", "ppo_kl_coef"))
"""What adapts β, and a policy loss."""

SKYRL_WHITENED = ("gae", "reinforce++")
"""Advantages that are whitened over the batch with the KL in them, by the audits of version 0.3.0."""

SKYRL_SUM = "seq_mean_token_sum_norm"
SKYRL_ENGINE = "SkyRL samples with an inference engine, whose log-probs differ from those of the trainer"


def skyrl_run(given: dict[str, Any]) -> Run:
    """Read the settings of a SkyRL trainer, with SkyRL's defaults for those that are missing."""
    settings, named = with_defaults(given, SKYRL_DEFAULTS)
    in_reward, in_loss = settings[f"{SKYRL_ALGORITHM}use_kl_in_reward"], settings[f"{SKYRL_ALGORITHM}use_kl_loss"]
    if in_reward and in_loss:
        raise RunFileError(
            "use_kl_loss or use_kl_in_reward",
            "both (use_kl_loss is on by default)",
            "switch one off: SkyRL refuses both",
        )
    name = f"{SKYRL_ALGORITHM}kl_estimator_type"
    estimator = one_of(name, settings[name], ("k1", "k2", "k3", "abs"))
    coefficient = settings[f"{SKYRL_ALGORITHM}kl_loss_coef"]
    zero = [] if coefficient else [Change(f"{SKYRL_ALGORITHM}kl_loss_coef", 0.001, 0.0, "at 0 there is no KL")]
    if in_reward:
        part, changes = _skyrl_in_reward(settings, estimator)
        adapts = given.get(f"{SKYRL_ALGORITHM}kl_ctrl.type") == "adaptive"
        parts = (part,) if coefficient else ()
        return _skyrl_run(settings, named, parts, "reverse-kl-sequence", [*zero, *changes], (ADAPTS,) * adapts)
    changes = [] if in_loss else [Change(f"{SKYRL_ALGORITHM}use_kl_loss", True, False, "without it SkyRL has no KL")]
    changes += zero
    if estimator != "k2":
        why = {"k1": "k1 as a loss descends nothing", "abs": "|log π/ref| is no KL"}
        cut = "k3 as a loss descends the forward KL, and its clamp has no gradient where log π/ref is below -2.61"
        changes.append(Change(name, "k2", estimator, why.get(estimator, cut)))
    part = Part("loss", f"skyrl use_kl_loss kl_estimator_type={estimator}", settings[f"{SKYRL_ALGORITHM}kl_loss_coef"])
    notes = (
        "SkyRL divides a KL in the loss by the length of each completion, for every loss_reduction: no setting is "
        "the reverse KL where lengths vary. `klgrad advise skyrl --level token` has code that is.",
    )
    return _skyrl_run(settings, named, (part,) if in_loss and coefficient else (), "reverse-kl-token", changes, notes)


def _skyrl_run(
    settings: dict[str, Any],
    named: tuple[str, ...],
    parts: tuple[Part, ...],
    target: Verdict,
    changes: list[Change],
    notes: tuple[str, ...] = (),
) -> Run:
    return Run("skyrl", "its trainer", settings, named, parts, _skyrl_stale(settings), target, tuple(changes), notes)


def _skyrl_in_reward(settings: dict[str, Any], estimator: str) -> tuple[Part, list[Change]]:
    kind, mode = settings[f"{SKYRL_ALGORITHM}advantage_estimator"], settings[f"{SKYRL_ALGORITHM}loss_reduction"]
    changes: list[Change] = []
    if estimator != "k1":
        why = "in the reward only k1 descends the reverse KL"
        changes.append(Change(f"{SKYRL_ALGORITHM}kl_estimator_type", "k1", estimator, why))
    if kind == "grpo" and settings[f"{SKYRL_ALGORITHM}grpo_norm_by_std"]:
        why = "the standard deviation of the group divides the KL too"
        changes.append(Change(f"{SKYRL_ALGORITHM}grpo_norm_by_std", False, True, why))
    elif kind not in ("grpo", "rloo"):
        whitened = "whitened advantages divide the KL by the standard deviation of the batch"
        why = whitened if kind in SKYRL_WHITENED else "this estimator is not audited"
        changes.append(Change(f"{SKYRL_ALGORITHM}advantage_estimator", "rloo", kind, why))
    if mode != SKYRL_SUM:
        averaged = mode == "token_mean"
        why = f"{TOKEN_MEAN if averaged else 'it divides by lengths'}; set max_seq_len with it"
        changes.append(Change(f"{SKYRL_ALGORITHM}loss_reduction", SKYRL_SUM, mode, why, optional=averaged))
    advantage = {"gae": "gae critic=0", "grpo": "grpo"}.get(kind, kind)
    advantage += " without std" if kind == "grpo" and not settings[f"{SKYRL_ALGORITHM}grpo_norm_by_std"] else ""
    averaged = (estimator, kind, mode) in (("k3", "grpo", "token_mean"), ("k1", "rloo", "token_mean"))
    loss = f"skyrl use_kl_in_reward estimator={estimator} advantage={advantage}{' token_mean' if averaged else ''}"
    caveat = (
        ""
        if averaged or mode == SKYRL_SUM
        else f"Audited with loss_reduction={SKYRL_SUM}: {mode} divides by lengths as well."
    )
    return Part("reward", loss, settings[f"{SKYRL_ALGORITHM}kl_loss_coef"], caveat=caveat), changes


def _skyrl_stale(settings: dict[str, Any]) -> tuple[str, ...]:
    batch, mini = settings["trainer.train_batch_size"], settings["trainer.policy_mini_batch_size"]
    found = []
    if batch > mini:
        found.append(f"train_batch_size={batch} above policy_mini_batch_size={mini}: several updates use a batch")
    if settings["trainer.update_epochs_per_batch"] > 1:
        epochs = settings["trainer.update_epochs_per_batch"]
        found.append(f"update_epochs_per_batch={epochs}: a batch is used for several updates")
    return (*found, SKYRL_ENGINE)
