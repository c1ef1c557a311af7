"""Settings of a `KLConfig` that contradict each other, refused before anything is loaded."""

from typing import TYPE_CHECKING, Any

from .. import zoo
from ..core.term import KLTerm
from ..errors import MeaningError
from ..zoo import Cell
from .field_limits import LIMITS, complaint
from .field_types import settings_of_class

if TYPE_CHECKING:
    from .config import KLConfig

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
