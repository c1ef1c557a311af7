"""Checks of the settings of `KLConfig`: types, limits, contradictions, and notes on what they mean."""

import math
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields as dataclass_fields
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from .. import zoo
from ..core.term import KLTerm
from ..errors import MeaningError
from ..zoo import Cell

if TYPE_CHECKING:
    from .config import KLConfig


# Whether a value is of the type that a dataclass field declares, from the field's annotation and metadata alone.

MAY_BE_INFINITE = frozenset({"max_grad_norm"})
"""Settings that may be infinite: an infinite `max_grad_norm` clips nothing."""
NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a mapping"}

Complaint = tuple[str, str, str]
"""Expected, received, remedy."""


@dataclass(frozen=True)
class Setting:
    """One field of a configuration: its type, its choices and its default."""

    name: str
    kind: Any
    choices: tuple[Any, ...] | None
    const: Any
    default: Any

    def misfit(self, value: Any) -> Complaint | None:
        """Why a value is not of the declared type, or None if it is."""
        if fits(value, self.kind) or (self.const is not None and value == self.const):
            return self._not_finite(value) or self._not_chosen(value)
        expected = f"`{self.name}` as {described(self.kind)}"
        return expected, f"{value!r}, {_called(value)}", self._remedy(value)

    def _not_finite(self, value: Any) -> Complaint | None:
        if not isinstance(value, Real) or math.isfinite(value) or self.name in MAY_BE_INFINITE:
            return None
        return f"`{self.name}` as a finite number", str(value), "write a number"

    def _not_chosen(self, value: Any) -> Complaint | None:
        if self.choices is None or value is None or value in self.choices:
            return None
        return f"`{self.name}` {' or '.join(map(str, self.choices))}", repr(value), f"{self.default} is the default"

    def _remedy(self, value: Any) -> str:
        wants_text = fits("", self.kind)
        if wants_text and isinstance(value, list) and all(isinstance(x, str) for x in value):
            return f"write it as one text, with commas: {self.name}: {','.join(value)}"
        if wants_text and isinstance(value, Real):
            return f'write it in quotes: {self.name}: "{value}"'
        if value is None:
            return "leave the setting out for its default"
        return f"write {described(self.kind)}"


@cache
def settings_of_class(kind: type) -> dict[str, Setting]:
    """The fields of a dataclass that its constructor takes, by name."""
    hints = get_type_hints(kind)
    return {
        f.name: Setting(f.name, hints[f.name], _choices(f.metadata), f.metadata.get("const"), f.default)
        for f in dataclass_fields(kind)
        if f.init
    }


def changed(config: Any) -> dict[str, Any]:
    """The fields of a dataclass instance that differ from their defaults."""
    given = {f.name: getattr(config, f.name) for f in dataclass_fields(config) if f.init}
    defaults = {f.name: f.default_factory() if f.default is MISSING and f.default_factory is not MISSING else f.default
                for f in dataclass_fields(config) if f.init}  # fmt: skip
    return {name: value for name, value in given.items() if value != defaults[name]}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type. A bool is not a number; an int fits a float."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in _alternatives(parts))
    if origin is Literal:
        return value in parts
    if origin is list:
        return isinstance(value, list) and all(fits(each, parts[0]) for each in value)
    kind = origin or kind
    if kind is Any:
        return True
    if kind in (int, float):
        return isinstance(value, Real if kind is float else Integral) and not isinstance(value, bool)
    if issubclass(kind, Enum):
        return isinstance(value, kind) or value in [member.value for member in kind]
    return isinstance(value, kind)


def described(kind: Any) -> str:
    """An annotated type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(described(part) for part in _alternatives(parts) if part is not NoneType)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is list:
        return f"a list of {described(parts[0]).removeprefix('a ')}s" if parts[0] is not str else "a list of texts"
    kind = origin or kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(str(member.value) for member in kind)
    return NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _alternatives(parts: tuple[Any, ...]) -> list[Any]:
    """The types of a union. Beside an enumeration, `str` stands only for its members as text."""
    named = any(isinstance(part, type) and issubclass(part, Enum) for part in parts)
    return [part for part in parts if not (named and part is str)]


def _choices(metadata: Mapping[str, Any]) -> tuple[Any, ...] | None:
    found = metadata.get("choices")
    return None if found is None else tuple(found)


def _called(value: Any) -> str:
    """The type of a value in words."""
    if value is None:
        return "no value"
    return NAMES.get(type(value), f"a {type(value).__name__}")


# Ranges and choices of settings, of this package's and of TRL's, in one table.
#
# TRL and transformers check most of theirs late, when a model is loaded or trained, and some not at all.

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
LARGEST_SEED = 2**32 - 1
"""The largest that NumPy accepts."""


@dataclass(frozen=True)
class Limit:
    """What a value has to be, and what to do otherwise; `required` settings may not be None."""

    expected: str
    holds: Callable[[Any], bool]
    remedy: str
    required: bool = False
    choices: tuple[Any, ...] | None = None

    def complaint(self, name: str, value: Any) -> Complaint:
        """The message for a value outside the limit."""
        return f"`{name}` {self.expected}", repr(value), self.remedy


def _compared(sign: str, compare: Callable[[Any, Any], bool], bound: float, remedy: str, required: bool) -> Limit:
    return Limit(f"{sign} {bound:g}", lambda value: compare(value, bound), remedy, required)


def at_least(bound: float, remedy: str, *, required: bool = False) -> Limit:
    """>= `bound`."""
    return _compared(">=", operator.ge, bound, remedy, required)


def above(bound: float, remedy: str) -> Limit:
    """> `bound`."""
    return _compared(">", operator.gt, bound, remedy, False)


def between(low: float, high: float, remedy: str, *, above_low: bool = False, below_high: bool = False) -> Limit:
    """From `low` to `high`; either end may be excluded."""
    first, last = "above" if above_low else "from", "below" if below_high else "to"
    return Limit(
        f"{first} {low:g} {last} {high:g}",
        lambda value: (low < value if above_low else low <= value) and (value < high if below_high else value <= high),
        remedy,
    )


def among(choices: tuple[Any, ...], remedy: str) -> Limit:
    """One of these."""
    return Limit(" or ".join(map(str, choices)), lambda value: value in choices, remedy, choices=choices)


COUNT = "write a whole number that is larger than 0"
SHARE = "write a share of 1"
SEED = between(0, LARGEST_SEED, "random generators take no other seed")

LIMITS: dict[str, Limit] = {
    # Updates and batches: with 0 of any of them, nothing would be trained.
    "per_device_train_batch_size": at_least(1, COUNT),
    "per_device_eval_batch_size": at_least(1, COUNT),
    "gradient_accumulation_steps": at_least(1, "1 makes an update of every batch"),
    "steps_per_generation": at_least(1, "leave it out for `gradient_accumulation_steps`"),
    "generation_batch_size": at_least(1, "leave it out; it follows from the batch size"),
    "num_iterations": at_least(1, "1 uses every completion once; with 0 nothing would be trained"),
    "num_generations": at_least(2, "a group of one has no peers to compare with; use 8, for example", required=True),
    "num_generations_eval": at_least(1, COUNT),
    "max_completion_length": at_least(1, "write the largest number of tokens of a completion", required=True),
    "max_steps": Limit("-1 or >= 1", lambda n: n == -1 or n >= 1, "-1 trains for `num_train_epochs`"),
    "num_train_epochs": above(0, "with 0 epochs nothing would be trained"),
    "train_size": at_least(1, "write how many questions to train on"),
    "eval_size": at_least(0, "0 evaluates nothing"),
    "eval_every": at_least(0, "0 evaluates only before and after"),
    "student_layers": at_least(1, "write how many layers to keep"),
    "num_processes": at_least(1, "1 trains in this process"),
    # The optimizer: a negative rate would raise the loss, and with a beta of 1 nothing would be learnt.
    "learning_rate": at_least(0, "a negative rate would raise the loss; use 1e-6, for example"),
    "weight_decay": at_least(0, "0 switches it off"),
    "adam_beta1": between(0, 1, "use 0.9, for example", below_high=True),
    "adam_beta2": between(0, 1, "use 0.999, for example", below_high=True),
    "adam_epsilon": at_least(0, "use 1e-8, for example"),
    "max_grad_norm": at_least(0, "0 clips nothing"),
    "warmup_steps": at_least(0, "0 switches it off"),
    "logging_steps": at_least(0, COUNT),
    "save_steps": above(0, "save_strategy: no switches saving off"),
    "save_total_limit": at_least(0, "leave it out to keep all checkpoints"),
    "eval_steps": at_least(0, COUNT),
    "ddp_timeout": at_least(1, "seconds to wait for other processes; 1800 is the default"),
    "dataloader_num_workers": at_least(0, "0 loads in this process"),
    "seed": SEED,
    "data_seed": SEED,
    # Sampling.
    "temperature": above(0, "greedy sampling has no distribution to take a KL of; 1.0 samples the policy itself"),
    "top_p": between(0, 1, "1.0 samples from all tokens", above_low=True),
    "top_k": at_least(0, "0 samples from all tokens"),
    "min_p": between(0, 1, "leave it out to sample from all tokens"),
    "repetition_penalty": above(0, "1.0 switches it off"),
    "vllm_mode": among(("colocate", "server"), "colocate runs vLLM in the training processes"),
    "vllm_model_impl": among(("vllm", "transformers"), "vllm is the default"),
    "vllm_server_port": between(1, 65535, "write a port"),
    "vllm_group_port": between(1, 65535, "write a port"),
    "vllm_server_timeout": at_least(0, "seconds to wait for the server"),
    "vllm_gpu_memory_utilization": between(0, 1, SHARE, above_low=True),
    "vllm_tensor_parallel_size": at_least(1, COUNT),
    "vllm_max_model_length": at_least(1, COUNT),
    # The policy loss.
    "loss_type": among(LOSS_TYPES, "dapo is TRL's default"),
    "importance_sampling_level": among(("token", "sequence"), "token is TRL's default"),
    "scale_rewards": among(("group", "batch", "none", True, False), "none leaves rewards as they are"),
    "multi_objective_aggregation": among(("sum_then_normalize", "normalize_then_sum"), "the first is TRL's default"),
    "vllm_importance_sampling_mode": among(
        ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"), "sequence_mask is TRL's default"
    ),
    "epsilon": at_least(0, "0.2 is TRL's default"),
    "epsilon_high": at_least(0, "leave it out for `epsilon`"),
    "delta": above(1, "a ratio of 1 must pass, or nothing on-policy would be trained; use 4.0, for example"),
    "sapo_temperature_neg": above(0, "1.05 is TRL's default"),
    "sapo_temperature_pos": above(0, "1.0 is TRL's default"),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), at_least(0, "leave it out for TRL's")
    ),
    "vllm_importance_sampling_clip_max": above(0, "3.0 is TRL's default"),
    "vllm_importance_sampling_clip_min": at_least(0, "leave it out for no lower bound"),
    "top_entropy_quantile": between(0, 1, "1.0 trains on all tokens", above_low=True),
    "off_policy_mask_threshold": at_least(0, "leave it out to mask nothing"),
    "ref_model_mixup_alpha": between(0, 1, SHARE),
    "ref_model_sync_steps": at_least(1, COUNT),
    # Adapters.
    "lora_r": at_least(1, COUNT),
    "lora_alpha": above(0, "32 is TRL's default"),
    "lora_dropout": between(0, 1, SHARE, below_high=True),
    # The KL.
    "kl_coef": at_least(0, "a negative β would reward distance from the reference"),
    "kl_target": above(0, "name the KL to hold, or None for a constant β"),
    "kl_memory": at_least(1, "MiB for tiles of logits; 256 is the default"),
    "kl_horizon": at_least(1, "use 50, for example"),
    "kl_top_k": at_least(1, "use 64, for example, or leave it out for the full vocabulary"),
    "rollout_lag": at_least(0, "0 trains on fresh completions"),
}
"""Limits by setting. A setting without one is checked for its type, and for the choices that its field declares."""


def has_choices(name: str) -> bool:
    """Whether the table lists all values of a setting, of any type."""
    return name in LIMITS and LIMITS[name].choices is not None


def complaint(setting: Setting, value: Any) -> Complaint | None:
    """Why a value cannot be used, by its type, its choices or its range; None if it can."""
    limit = LIMITS.get(setting.name)
    if limit is not None and limit.choices is not None:  # they are stricter than the type
        return None if limit.holds(value) else limit.complaint(setting.name, value)
    found = setting.misfit(value)
    if found is not None or limit is None:
        return found or (_unreported(value) if setting.name == "report_to" else None)
    if value is None:
        return limit.complaint(setting.name, value) if limit.required else None
    return None if limit.holds(value) else limit.complaint(setting.name, value)


def _unreported(value: Any) -> Complaint | None:
    """Why `report_to` cannot be used: transformers checks it only when the model is loaded."""
    from transformers.integrations import integration_utils

    known = integration_utils.INTEGRATION_TO_CALLBACK
    wanted = [name for name in ([value] if isinstance(value, str) else value or []) if name not in ("all", "none")]
    for name in wanted:
        if name not in known:
            return f"`report_to` none, all, {', '.join(sorted(known))}", repr(name), "choose one of them"
        is_available = getattr(integration_utils, f"is_{name}_available", None)  # two integrations have other names
        if is_available is not None and not is_available():
            return f"the package of `report_to` {name}", "no such package", "install it, or choose none"
    return None


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
OTHERS = ("rollout_lag_uncorrected", "teacher")
"""Settings of this package whose names do not begin with `kl_`, and that have no range."""
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


def fields(config: "KLConfig") -> None:
    """Check types and ranges of this package's settings, and of those of TRL's that have limits here."""
    for name, setting in settings_of_class(type(config)).items():
        if name not in LIMITS and not name.startswith("kl_") and name not in OTHERS:
            continue
        found = complaint(setting, getattr(config, name))
        if found is not None:
            raise MeaningError(*found)


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
    defaults = {name: setting.default for name, setting in settings_of_class(type(config)).items()}
    return {name: getattr(config, name) for name in names if getattr(config, name) != defaults[name]}


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
