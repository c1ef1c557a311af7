"""Settings of a `KLConfig` that could not mean what they say, refused before anything is loaded."""

from typing import Any

from ..core.term import KLTerm
from ..errors import MeaningError
from .field_limits import LIMITS, complaint
from .field_types import settings_of_class

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
"""Keys of `generation_kwargs` that change the distribution which is sampled, of transformers' and of vLLM's."""
OTHERS = ("rollout_lag_uncorrected", "teacher")
"""Settings of this package whose names do not begin with `kl_`, and that have no range."""
TERM_DEFAULTS: dict[str, Any] = {
    "kl_divergence": "reverse",
    "kl_level": "sequence",
    "kl_estimator": "k1",
    "kl_discount": 1.0,
    "kl_baseline": "none",
    "kl_ratio": "none",
    "kl_ratio_bound": "truncate:2",
    "kl_influence_bound": None,
    "kl_cell": None,
}
"""Fields that describe the term, with their defaults: a `KLTerm` given to the trainer takes their place."""
NOT_WITH_A_CELL = (
    "kl_divergence",
    "kl_level",
    "kl_estimator",
    "kl_discount",
    "kl_baseline",
    "kl_ratio",
    "kl_influence_bound",
    "kl_top_k",
    "kl_reduction",
)
"""Fields that have no meaning beside `kl_cell`, which is a whole loss."""


def fields(config: Any) -> None:
    """Types and ranges: of this package's settings, and of those of TRL's that the table of limits names."""
    for name, setting in settings_of_class(type(config)).items():
        if name not in LIMITS and not name.startswith("kl_") and name not in OTHERS:
            continue
        found = complaint(setting, getattr(config, name))
        if found is not None:
            raise MeaningError(*found)


def together(config: Any) -> None:
    """Two settings that leave each other no meaning."""
    if config.kl_target is not None and not config.kl_coef > 0:
        raise MeaningError("`kl_coef` > 0 with `kl_target`", "0", "β is adapted by factors, and 0 has none")


def reference(config: Any) -> None:
    """A teacher stays what it is."""
    if config.teacher is not None and config.sync_ref_model:
        raise MeaningError(
            "a frozen teacher", "sync_ref_model=True", "it would be overwritten by the student: drop one of the two"
        )


def cell(config: Any) -> None:
    """A cell is a whole loss."""
    if config.kl_placement != "loss":
        raise MeaningError("`kl_placement`='loss' for a cell", repr(config.kl_placement), "a cell is a whole loss")
    for name in NOT_WITH_A_CELL:
        if getattr(config, name) != type(config).__dataclass_fields__[name].default:
            raise MeaningError(
                f"no `{name}` beside `kl_cell`", f"{name}={getattr(config, name)!r}", "a cell is a whole loss: drop one"
            )


def placement(config: Any, term: KLTerm) -> None:
    """TRL's way with advantages and rewards must leave the term its meaning."""
    if config.kl_placement == "loss":
        return
    if term.weighting is not None:
        raise MeaningError(
            f"no `kl_ratio` with kl_placement={config.kl_placement!r}",
            f"kl_ratio={config.kl_ratio!r}",
            "TRL multiplies advantages by a ratio of its own; kl_placement='loss' weighs the KL once",
        )
    if config.kl_reduction != "policy":
        raise MeaningError(
            f"`kl_reduction`='policy' with kl_placement={config.kl_placement!r}",
            repr(config.kl_reduction),
            "advantages are reduced as the policy loss is; kl_placement='loss' can be summed",
        )
    _masks(config)
    if config.kl_placement == "advantage":
        _advantage(config)
    else:
        _reward(term)


def truncation(config: Any) -> None:
    """Completions that are cut off are samples like any other; without them no expectation is the policy's."""
    if config.mask_truncated_completions and config.kl_coef > 0:
        raise MeaningError(
            "the KL of all completions",
            "mask_truncated_completions=True",
            "set it to False: without the completions that reach max_completion_length, what is descended is the "
            "gradient of no divergence; or kl_coef=0 for no KL",
        )


def _advantage(config: Any) -> None:
    if config.importance_sampling_level != "token":
        raise MeaningError(
            "`importance_sampling_level`='token' with kl_placement='advantage'",
            repr(config.importance_sampling_level),
            "one ratio per completion spreads every token's coefficient over all of them; use kl_placement='loss'",
        )


def _masks(config: Any) -> None:
    """What TRL masks of the policy loss, it masks of a KL that is inside."""
    if config.off_policy_mask_threshold is not None:
        raise MeaningError(
            f"no `off_policy_mask_threshold` with kl_placement={config.kl_placement!r}",
            f"{config.off_policy_mask_threshold}",
            "the KL would decide which tokens are masked, and be masked with them; use kl_placement='loss'",
        )
    if config.top_entropy_quantile < 1.0:
        raise MeaningError(
            f"`top_entropy_quantile`=1 with kl_placement={config.kl_placement!r}",
            f"{config.top_entropy_quantile}",
            "the KL of all other tokens would be dropped; use kl_placement='loss'",
        )


def _reward(term: KLTerm) -> None:
    if (term.divergence, term.level, term.estimator) != ("reverse", "sequence", "k1"):
        raise MeaningError(
            "reverse KL, sequence level, k1 for kl_placement='reward'",
            f"{term.name}",
            "a reward carries one number per completion; any other term belongs in the loss or the advantage",
        )
    if term.discount != 1 or term.baseline != "none" or term.influence_bound:
        raise MeaningError(
            "no discount, baseline or influence bound with kl_placement='reward'",
            f"{term.name}",
            "the group's mean is the baseline there; use kl_placement='advantage' for the rest",
        )


def stale(config: Any) -> str | None:
    """What lets completions be older than the policy that is trained on them, as far as the settings tell."""
    if config.rollout_lag:
        return f"rollout_lag={config.rollout_lag}"
    if config.num_iterations > 1:
        return f"num_iterations={config.num_iterations}"
    if config.gradient_accumulation_steps % config.steps_per_generation:
        return f"steps_per_generation={config.steps_per_generation}"
    return "use_vllm=True" if config.use_vllm else None


def staleness(config: Any) -> None:
    """Completions that are late by request need weights, or a word that they are to have none."""
    if config.rollout_lag and not config.rollout_lag_uncorrected and not is_weighed(config):
        raise MeaningError(
            "`kl_ratio` with `rollout_lag`",
            "none",
            "the completions' sampler is no longer the policy: kl_placement='loss' with kl_ratio='prefix' corrects for "
            "it; rollout_lag_uncorrected=True studies what happens if nothing does",
        )


def is_weighed(config: Any) -> bool:
    """Whether the KL has weights for old completions, or needs none."""
    term = config.objective.term
    return term is not None and (term.weighting is not None or needs_no_weights(term))


def needs_no_weights(term: KLTerm) -> bool:
    """On old completions: summed over the vocabulary, a token's KL is that at their prefixes, whoever sampled them."""
    return term.weighting is None and term.descends.off_policy != "unknown"


def top_k(config: Any) -> None:
    """It is about a sum over the vocabulary."""
    if config.kl_top_k is None:
        return
    if config.kl_estimator != "exact":
        raise MeaningError(
            "`kl_estimator`='exact' with `kl_top_k`",
            f"kl_estimator={config.kl_estimator!r}",
            "a sampled estimator looks at the sampled token alone; drop one of the two",
        )
