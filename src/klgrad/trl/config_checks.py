"""Checks of the settings of `KLConfig`: types, limits, contradictions, and notes on what they mean."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields as dataclass_fields
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from .. import zoo
from ..core.term import KLTerm
from ..errors import MeaningError
from ..zoo import Cell

if TYPE_CHECKING:
    from .config import KLConfig


# Types, choices and ranges of the settings that this package adds; TRL and transformers check their own.

KINDS: dict[type, tuple[str, type]] = {
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("text", str),
    bool: ("true or false", bool),
}
"""A type of a setting in words, and what a value of it is."""

Complaint = tuple[str, str, str]
"""Expected, received, remedy."""

LIMITS: dict[str, tuple[str, float, str]] = {
    "kl_coef": (">=", 0, "a negative β would reward distance from the reference"),
    "kl_target": (">", 0, "name the KL to hold, or None for a constant β"),
    "kl_memory": (">=", 1, "MiB for tiles of logits; 256 is the default"),
    "kl_horizon": (">=", 1, "use 50, for example"),
    "kl_top_k": (">=", 1, "use 64, for example, or leave it out for the full vocabulary"),
    "rollout_lag": (">=", 0, "0 trains on fresh completions"),
    "train_size": (">=", 1, "write how many questions to train on"),
    "eval_size": (">=", 0, "0 evaluates nothing"),
    "eval_every": (">=", 0, "0 evaluates only before and after"),
    "student_layers": (">=", 1, "write how many layers to keep"),
    "num_processes": (">=", 1, "1 trains in this process"),
}
"""The smallest value of a setting, and what to do about a smaller one."""


@dataclass(frozen=True)
class OwnSetting:
    """One setting of this package: a number, a text or a switch, which may be None if that is its default."""

    name: str
    kind: type
    default: Any
    choices: tuple[Any, ...] | None

    def complaint(self, value: Any) -> Complaint | None:
        """Why a value cannot be used, by its type, its choices or its range; None if it can."""
        misfit = self.misfit(value)
        if misfit is not None or value is None or self.name not in LIMITS:
            return misfit
        sign, bound, remedy = LIMITS[self.name]
        if value > bound or (sign == ">=" and value == bound):
            return None
        return f"`{self.name}` {sign} {bound:g}", repr(value), remedy

    def misfit(self, value: Any) -> Complaint | None:
        """Why a value is not of the declared type and among the choices; None if it is."""
        if value is None and self.default is None:
            return None
        word, abstract = KINDS[self.kind]
        if not isinstance(value, abstract) or isinstance(value, bool) != (self.kind is bool):
            said = "no value" if value is None else KINDS.get(type(value), (f"a {type(value).__name__}",))[0]
            return f"`{self.name}` as {word}", f"{value!r}, {said}", self._remedy(value)
        if isinstance(value, Real) and not math.isfinite(value):
            return f"`{self.name}` as a finite number", str(value), "write a number"
        if self.choices is not None and value not in self.choices:
            return f"`{self.name}` {' or '.join(self.choices)}", repr(value), f"{self.default} is the default"
        return None

    def _remedy(self, value: Any) -> str:
        if self.kind is str and isinstance(value, list) and all(isinstance(x, str) for x in value):
            return f"write it as one text, with commas: {self.name}: {','.join(value)}"
        if self.kind is str and isinstance(value, Real):
            return f'write it in quotes: {self.name}: "{value}"'
        return "leave the setting out for its default" if value is None else f"write {KINDS[self.kind][0]}"


@cache
def own_settings(kind: type) -> dict[str, OwnSetting]:
    """The fields that a dataclass adds to those of its base, by name."""
    hints, fields = get_type_hints(kind), {f.name: f for f in dataclass_fields(kind)}
    return {
        name: OwnSetting(name, next(x for x in get_args(hints[name]) or (hints[name],) if x in KINDS),
                         fields[name].default, fields[name].metadata.get("choices"))
        for name in kind.__annotations__ if name in fields
    }  # fmt: skip


def changed(config: Any) -> dict[str, Any]:
    """The fields of a dataclass instance that differ from their defaults."""
    given = {f.name: getattr(config, f.name) for f in dataclass_fields(config) if f.init}
    defaults = {f.name: f.default_factory() if f.default is MISSING and f.default_factory is not MISSING else f.default
                for f in dataclass_fields(config) if f.init}  # fmt: skip
    return {name: value for name, value in given.items() if value != defaults[name]}


# Settings of a `KLConfig` that contradict each other, refused before anything is loaded.

PLACEMENTS = ("loss", "advantage", "reward")
REDUCTIONS = ("policy", "sequence")
TAILS = ("sampled", "lump")
UNITS = ("sequence", "token")
SAMPLERS = (
    "do_sample", "num_beams", "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", "min_length", "min_new_tokens", "guidance_scale", "exponential_decay_length_penalty",
    "frequency_penalty", "presence_penalty", "logit_bias", "min_tokens",
)  # fmt: skip
"""Keys of `generation_kwargs`, for transformers and for vLLM, that change the distribution that is sampled."""
TERM_FIELDS = (
    "kl_divergence",
    "kl_level",
    "kl_estimator",
    "kl_discount",
    "kl_baseline",
    "kl_ratio",
    "kl_influence_bound",
)
"""Fields that describe the term: a `KLTerm` takes their place, and a loss of the zoo leaves them no meaning."""


def check_own(config: "KLConfig", settings: Mapping[str, OwnSetting]) -> None:
    """Check types, choices and ranges of this package's settings."""
    for name, setting in settings.items():
        complaint = setting.complaint(getattr(config, name))
        if complaint is not None:
            raise MeaningError(*complaint)


def together(config: "KLConfig") -> None:
    """Refuse a target for a β of 0."""
    if config.kl_target is not None and not config.kl_coef > 0:
        raise MeaningError(
            "`kl_coef` > 0 with `kl_target`",
            "0",
            "use a positive `kl_coef`: β is adapted by multiplication, and 0 would stay 0",
        )


def reference(config: "KLConfig") -> None:
    """Refuse to move a teacher."""
    if config.teacher is not None and config.sync_ref_model:
        raise MeaningError(
            "a frozen teacher", "sync_ref_model=True", "drop one of the two: the student would overwrite the teacher"
        )


def cell_of(config: "KLConfig") -> Cell:
    """The loss of the zoo that is named; fields that have no meaning beside a whole loss are refused."""
    if config.kl_placement != "loss":
        raise MeaningError(
            "`kl_placement`='loss' with `kl_cell`", repr(config.kl_placement), "leave it out: `kl_cell` is a whole loss"
        )
    for name, value in changed_among(config, (*TERM_FIELDS, "kl_top_k")).items():
        raise MeaningError(f"no `{name}` beside `kl_cell`", f"{name}={value!r}", "`kl_cell` is a whole loss: drop one")
    found = zoo.get(str(config.kl_cell))
    if found.per_token is None and config.kl_reduction != "sequence":
        raise MeaningError(
            f"`kl_reduction`='sequence' with kl_cell={found.name!r}, whose own reduction is part of the loss",
            f"kl_reduction={config.kl_reduction!r}, which reduces a loss per token as `loss_type` says",
            "write kl_reduction='sequence'; `kl_coef` then multiplies the loss as it stands",
        )
    return found


def changed_among(config: "KLConfig", names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the named fields that are not at their defaults."""
    return {name: value for name, value in changed(config).items() if name in names}


def placement(config: "KLConfig", term: KLTerm) -> None:
    """Refuse settings by which TRL would change the meaning of a term in the advantages or rewards."""
    if config.kl_placement == "loss":
        return
    if term.weighting is not None:
        raise MeaningError(
            f"no `kl_ratio` with kl_placement={config.kl_placement!r}",
            f"kl_ratio={config.kl_ratio!r}",
            "TRL multiplies advantages by a ratio of its own; kl_placement='loss' weights the KL once",
        )
    if config.kl_reduction != "policy":
        raise MeaningError(
            f"`kl_reduction`='policy' with kl_placement={config.kl_placement!r}",
            repr(config.kl_reduction),
            "advantages are reduced like the policy loss; use kl_placement='loss' to sum the KL",
        )
    _masks(config)
    if config.kl_placement == "advantage":
        _advantage(config)
    else:
        _reward(term)


def truncation(config: "KLConfig") -> None:
    """Refuse to leave out completions that are cut off: the others are no sample of the policy."""
    if config.mask_truncated_completions and config.kl_coef > 0:
        raise MeaningError(
            "the KL of all completions",
            "mask_truncated_completions=True",
            "set it to False: without the completions that reach max_completion_length, the gradient is that of no "
            "divergence; or set kl_coef=0 for no KL",
        )


def _advantage(config: "KLConfig") -> None:
    if config.importance_sampling_level != "token":
        raise MeaningError(
            "`importance_sampling_level`='token' with kl_placement='advantage'",
            repr(config.importance_sampling_level),
            "use kl_placement='loss': one ratio per completion would mix the coefficients of its tokens",
        )


def _masks(config: "KLConfig") -> None:
    """Refuse masks of the policy loss: they would also mask a KL that is part of it."""
    if config.off_policy_mask_threshold is not None:
        raise MeaningError(
            f"no `off_policy_mask_threshold` with kl_placement={config.kl_placement!r}",
            f"{config.off_policy_mask_threshold}",
            "use kl_placement='loss': the KL would change which tokens are masked, and be masked with them",
        )
    if config.top_entropy_quantile < 1.0:
        raise MeaningError(
            f"`top_entropy_quantile`=1 with kl_placement={config.kl_placement!r}",
            f"{config.top_entropy_quantile}",
            "use kl_placement='loss': the KL of all other tokens would be dropped",
        )


def _reward(term: KLTerm) -> None:
    if (term.divergence, term.level, term.estimator) != ("reverse", "sequence", "k1"):
        raise MeaningError(
            "reverse KL, sequence level, k1 for kl_placement='reward'",
            f"{term.name}",
            "a reward carries one number per completion; put any other term in the loss or the advantage",
        )
    if term.discount != 1 or term.baseline != "none" or term.influence_bound:
        raise MeaningError(
            "no discount, baseline or influence bound with kl_placement='reward'",
            f"{term.name}",
            "the group's mean is the baseline there; use kl_placement='advantage' with them",
        )


def stale(config: "KLConfig") -> str | None:
    """The setting by which completions are older than the policy that is trained on them; None if there is none."""
    if config.rollout_lag:
        return f"rollout_lag={config.rollout_lag}"
    if config.num_iterations > 1:
        return f"num_iterations={config.num_iterations}"
    if config.gradient_accumulation_steps % (config.steps_per_generation or 1):
        return f"steps_per_generation={config.steps_per_generation}"
    return "use_vllm=True" if config.use_vllm else None


def staleness(config: "KLConfig") -> None:
    """Refuse `rollout_lag` without importance weights, unless `rollout_lag_uncorrected` is set."""
    if config.rollout_lag and not config.rollout_lag_uncorrected and not is_weighted(config):
        raise MeaningError(
            "`kl_ratio` with `rollout_lag`",
            "none",
            "set kl_ratio='prefix' with kl_placement='loss', because the sampler is no longer the policy; or set "
            "rollout_lag_uncorrected=True to study what happens without a correction",
        )


def is_weighted(config: "KLConfig") -> bool:
    """Whether the KL has importance weights, or needs none for old completions."""
    term = config.objective.term
    return term is not None and (term.weighting is not None or needs_no_weights(term))


def needs_no_weights(term: KLTerm) -> bool:
    """Whether the term is right on old completions: a KL summed over the vocabulary does not depend on the sampler."""
    return term.weighting is None and term.descends.off_policy != "unknown"


def top_k(config: "KLConfig") -> None:
    """Refuse `kl_top_k` for an estimator that does not sum over the vocabulary."""
    if config.kl_top_k is None:
        return
    if config.kl_estimator != "exact":
        raise MeaningError(
            "`kl_estimator`='exact' with `kl_top_k`",
            f"kl_estimator={config.kl_estimator!r}",
            "drop one of the two: a sampled estimator uses the sampled token alone",
        )


# Settings that change the meaning of the declared KL without being an error: each gives a warning.

PER_COMPLETION_MEANS = ("grpo", "sapo")
"""Values of `loss_type` that average over the tokens of each completion."""


class MeaningWarning(UserWarning):
    """A setting that changes which completions the declared KL is averaged over, or how it is weighted."""


def notes(config: "KLConfig") -> list[str]:
    """One sentence for each such setting.

    Example:
        >>> from klgrad.trl import KLConfig
        >>> notes(KLConfig("runs/mine", bf16=False))
        []
    """
    found = (note(config) for note in NOTES)
    return [sentence for sentence in found if sentence is not None]


def warn_of(config: "KLConfig", stacklevel: int) -> None:
    """Give each of the `notes` as a `MeaningWarning`."""
    for sentence in notes(config):
        warnings.warn(sentence, MeaningWarning, stacklevel=stacklevel + 1)


def _old_completions(config: "KLConfig") -> str | None:
    why = stale(config)
    if why is None or is_weighted(config) or config.rollout_lag or config.kl_placement == "reward":
        return None
    return (
        f"{why} trains on completions that another policy sampled, and kl_ratio='none' leaves the KL uncorrected "
        "for it; kl_ratio='prefix' corrects it at sequence level, 'token' on the sampler's prefixes"
    )


def _other_samples(config: "KLConfig") -> str | None:
    """Filters and penalties: the completions are no samples of the policy, and their true log-probs are not known."""
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    changed = [f"{name}={getattr(config, name)}" for name, value in neutral.items() if getattr(config, name) != value]
    given = config.generation_kwargs if isinstance(config.generation_kwargs, dict) else {}
    changed += [f"generation_kwargs {name}={given[name]}" for name in SAMPLERS if name in given]
    if config.vllm_structured_outputs_regex:
        changed.append("vllm_structured_outputs_regex")
    term = config.objective.term
    if not changed or (term is not None and needs_no_weights(term)):
        return None
    return (
        f"{', '.join(changed)}: completions are not sampled from the policy that is trained, so that the KL is an "
        "average over other completions than its own, and kl_ratio does not correct for it"
    )


def _entropy(config: "KLConfig") -> str | None:
    if not config.entropy_coef and not config.use_adaptive_entropy:
        return None
    return (
        f"entropy_coef={config.entropy_coef:g}: TRL adds an entropy bonus to the loss, so that the optimum is not that "
        "of the reward and the KL alone"
    )


def _moving_reference(config: "KLConfig") -> str | None:
    if not config.sync_ref_model:
        return None
    return (
        f"sync_ref_model moves the reference towards the policy every {config.ref_model_sync_steps} updates: the KL is "
        "to a reference that moves, and no longer to the model as it started"
    )


def _scaled_advantages(config: "KLConfig") -> str | None:
    bound = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.loss_type != "cispo" or bound >= 1:
        return None
    share = "and a KL in the loss is not" if config.kl_placement == "loss" else "and the KL with them"
    return (
        f"loss_type='cispo' limits the ratio to epsilon_high={bound:g}, below 1: on-policy all advantages are "
        f"multiplied by it, {share}; set epsilon_high to 5, for example"
    )


def _weighed_by_trl(config: "KLConfig") -> str | None:
    if not config.use_vllm or not config.vllm_importance_sampling_correction or config.kl_placement == "loss":
        return None
    return (
        f"vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r} weights the KL in the "
        f"{config.kl_placement} like the policy loss, and drops or truncates it with the policy loss"
    )


def _per_completion(config: "KLConfig") -> str | None:
    """A mean over each completion: the tokens of short completions count more, in batches of any size."""
    if config.loss_type not in PER_COMPLETION_MEANS or config.objective.reduction != "policy" or not config.kl_coef:
        return None
    return (
        f"loss_type={config.loss_type!r} averages the KL over the tokens of each completion, so that a token of a "
        f"short completion counts more, and the gradient is that of no divergence, however large the batch; "
        f"{_other_reductions(config)}"
    )


def _per_forward_pass(config: "KLConfig") -> str | None:
    """A mean over the tokens of each forward pass: the size of the update does not help."""
    each = config.per_device_train_batch_size
    together = each * config.gradient_accumulation_steps * config.world_size
    reduced = config.objective.reduction == "policy" and config.kl_coef
    if config.loss_type != "bnpo" or not reduced or each == together:
        return None
    effect = "a token counts more beside short completions, and the gradient is that of the declared KL only as the "
    effect += "completions of a pass become many"
    if each == 1:
        effect = "that is a mean over the tokens of each completion, the gradient of no divergence"
    return (
        f"loss_type='bnpo' divides the KL by the tokens of one forward pass, of {each} completion{'s' * (each != 1)} "
        f"on each process, and not by those of the update, of {together}: {effect}; {_other_reductions(config)}"
    )


def _other_reductions(config: "KLConfig") -> str:
    """What keeps the declared KL; in the advantage and the reward, the KL is always reduced like the policy loss."""
    first = "kl_reduction='sequence', " if config.kl_placement == "loss" else ""
    return f"{first}loss_type='dapo' or loss_type='dr_grpo' keeps the declared KL"


def _scaled_rewards(config: "KLConfig") -> str | None:
    if config.kl_placement != "reward" or not config.kl_coef:
        return None
    cause = None if config.scale_rewards in (False, "none") else f"scale_rewards={config.scale_rewards!r}"
    other = "scale_rewards='none'"
    if config.multi_objective_aggregation != "sum_then_normalize":  # where TRL does not read scale_rewards
        cause = f"multi_objective_aggregation={config.multi_objective_aggregation!r}"
        other = f"multi_objective_aggregation='sum_then_normalize' with {other}"
    if cause is None:
        return None
    each = "batch" if cause == "scale_rewards='batch'" else "prompt"
    return (
        f"kl_placement='reward' with {cause}: a standard deviation divides the KL too, so that β differs from {each} "
        f"to {each}; kl_placement='advantage', or {other}, keeps the declared KL"
    )


def _noise(config: "KLConfig") -> str | None:
    if not config.neftune_noise_alpha:
        return None
    return (
        f"neftune_noise_alpha={config.neftune_noise_alpha:g} adds noise to the policy's embeddings and not to the "
        "reference's, and the KL includes the difference"
    )


NOTES: tuple[Callable[["KLConfig"], str | None], ...] = (
    _old_completions,
    _other_samples,
    _entropy,
    _moving_reference,
    _scaled_advantages,
    _weighed_by_trl,
    _per_completion,
    _per_forward_pass,
    _scaled_rewards,
    _noise,
)
