"""Settings of TRL that contradict the KL of a `KLConfig`, and notes on those that change what it means."""

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, fields as dataclass_fields
from typing import TYPE_CHECKING, Any

from .. import zoo
from ..core.term import KLTerm
from ..errors import MeaningError
from ..integrations import Facts, needs_no_weights as needs_no_weights, refuse_if
from ..support import Json
from ..zoo import Cell

if TYPE_CHECKING:
    from .config import KLConfig


def changed(config: Any) -> Json:
    """The fields of a dataclass instance that differ from their defaults."""
    init = [f for f in dataclass_fields(config) if f.init]
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in init}
    return {name: value for name in defaults if (value := getattr(config, name)) != defaults[name]}


# Settings of a `KLConfig` that contradict each other, refused before anything is loaded.

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


def teachers_of(text: str | None) -> dict[str, str]:
    """The teachers by name: `a` is a teacher of the name a, and `math=a,code=b` are two.

    Example:
        >>> teachers_of("math=runs/a,runs/lr=3")
        {'math': 'runs/a', 'runs/lr=3': 'runs/lr=3'}
    """
    teachers: dict[str, str] = {}
    for part in (text or "").split(","):
        name, path = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", part.strip()).groups()  # pyright: ignore[reportOptionalMemberAccess]
        if path:
            teachers[name or path] = path
    return teachers


def check(config: "KLConfig") -> None:
    """Refuse settings that contradict each other, whatever the term."""
    refuse_if(
        config.beta != 0.0,
        "`beta` = 0, TRL's own KL off",
        f"beta={config.beta}",
        "use `kl_coef` instead; two KL terms would add up",
    )
    refuse_if(
        config.mask_truncated_completions and config.kl_coef > 0,
        "the KL of all completions",
        "mask_truncated_completions=True",
        "set it to False: without the completions that reach max_completion_length, the gradient is that of no "
        "divergence; or set kl_coef=0 for no KL",
    )
    refuse_if(
        config.teacher is not None and config.sync_ref_model,
        "a frozen teacher",
        "sync_ref_model=True",
        "drop one of the two: the student would overwrite the teacher",
    )
    count, weights = len(teachers_of(config.teacher)), config.teacher_weights
    refuse_if(
        weights is not None and (len(weights) != count or not all(0 < weight < math.inf for weight in weights)),
        f"{count} `teacher_weights` > 0, one for each teacher",
        f"{weights}",
        "give one for each in `teacher`",
    )
    refuse_if(
        weights is not None and config.teacher_column is not None,
        "`teacher_weights` or `teacher_column`",
        "both",
        "drop one: a column gives each prompt one teacher",
    )
    uses = {"several teachers": count > 1, "teacher_prompt": config.teacher_prompt is not None}
    refuse_if(
        any(uses.values()) and config.kl_placement == "reward",
        f"`kl_placement`='loss' or 'advantage' with {' and '.join(name for name in uses if uses[name])}",
        "'reward'",
        "put the KL in the loss",
    )
    refuse_if(
        count > 1 and config.kl_top_k is not None,
        "one teacher with `kl_top_k`",
        f"{count}",
        "drop `kl_top_k`, or all teachers but one",
    )
    refuse_if(
        count > 1 and config.teacher_column is None and config.kl_estimator != "exact",
        "`kl_estimator`='exact' with several teachers of each prompt",
        f"kl_estimator={config.kl_estimator!r}",
        "write kl_estimator='exact'; or name each prompt's teacher by `teacher_column`",
    )


def check_term(config: "KLConfig", term: KLTerm) -> None:
    """Refuse settings that contradict the declared term."""
    refuse_if(
        config.kl_top_k is not None and term.estimator != "exact",
        "`kl_estimator`='exact' with `kl_top_k`",
        f"kl_estimator={config.kl_estimator!r}",
        "drop one of the two: a sampled estimator uses the sampled token alone",
    )
    refuse_if(
        config.kl_prefix_weight
        and (term.estimator != "exact" or term.level != "token" or config.kl_placement != "loss"),
        "kl_estimator='exact', kl_level='token' and kl_placement='loss' with `kl_prefix_weight`",
        f"{term.name} in the {config.kl_placement}",
        "write these: the weights look at the sampled token, which an exact gradient does not depend on",
    )
    if config.kl_placement == "loss":
        return
    refuse_if(
        term.weighting is not None,
        f"no `kl_ratio` with kl_placement={config.kl_placement!r}",
        f"kl_ratio={config.kl_ratio!r}",
        "TRL multiplies advantages by a ratio of its own; kl_placement='loss' weights the KL once",
    )
    refuse_if(
        config.off_policy_mask_threshold is not None,
        f"no `off_policy_mask_threshold` with kl_placement={config.kl_placement!r}",
        f"{config.off_policy_mask_threshold}",
        "use kl_placement='loss': the KL would change which tokens are masked, and be masked with them",
    )
    refuse_if(
        config.top_entropy_quantile < 1.0,
        f"`top_entropy_quantile`=1 with kl_placement={config.kl_placement!r}",
        f"{config.top_entropy_quantile}",
        "use kl_placement='loss': the KL of all other tokens would be dropped",
    )
    if config.kl_placement == "advantage":
        refuse_if(
            config.importance_sampling_level != "token",
            "`importance_sampling_level`='token' with kl_placement='advantage'",
            repr(config.importance_sampling_level),
            "use kl_placement='loss': one ratio per completion would mix the coefficients of its tokens",
        )
        return
    refuse_if(
        (term.divergence, term.level, term.estimator) != ("reverse", "sequence", "k1"),
        "reverse KL, sequence level, k1 for kl_placement='reward'",
        f"{term.name}",
        "a reward carries one number per completion; put any other term in the loss or the advantage",
    )
    refuse_if(
        term.discount != 1 or term.baseline != "none" or term.influence_bound,
        "no discount, baseline or influence bound with kl_placement='reward'",
        f"{term.name}",
        "the group's mean is the baseline there; use kl_placement='advantage' with them",
    )


def cell_of(config: "KLConfig") -> Cell:
    """The loss of the zoo that is named; fields that have no meaning beside a whole loss are refused."""
    refuse_if(
        config.kl_placement != "loss",
        "`kl_placement`='loss' with `kl_cell`",
        repr(config.kl_placement),
        "leave it out: `kl_cell` is a whole loss",
    )
    for name, value in changed_among(config, (*TERM_FIELDS, "kl_top_k", "kl_prefix_weight")).items():
        raise MeaningError(f"no `{name}` beside `kl_cell`", f"{name}={value!r}", "`kl_cell` is a whole loss: drop one")
    cell = zoo.get(str(config.kl_cell))
    refuse_if(
        cell.per_token is None and config.kl_reduction != "sequence",
        f"`kl_reduction`='sequence' with kl_cell={cell.name!r}, whose own reduction is part of the loss",
        f"kl_reduction={config.kl_reduction!r}, which reduces a loss per token as `loss_type` says",
        "write kl_reduction='sequence'; `kl_coef` then multiplies the loss as it stands",
    )
    return cell


def changed_among(config: "KLConfig", names: tuple[str, ...]) -> Json:
    """Those of the named fields that are not at their defaults."""
    return {name: value for name, value in changed(config).items() if name in names}


def stale(config: "KLConfig") -> str | None:
    """The setting by which completions are older than the policy that is trained on them; None if there is none."""
    if config.rollout_lag:
        return f"rollout_lag={config.rollout_lag}"
    if config.num_iterations > 1:
        return f"num_iterations={config.num_iterations}"
    if config.gradient_accumulation_steps % (config.steps_per_generation or 1):
        return f"steps_per_generation={config.steps_per_generation}"
    return "use_vllm=True" if config.use_vllm else None


def check_staleness(config: "KLConfig") -> None:
    refuse_if(
        config.rollout_lag and not config.rollout_lag_uncorrected and not config.objective.is_corrected,
        "`kl_ratio` with `rollout_lag`",
        "none",
        "set kl_ratio='prefix' with kl_placement='loss', because the sampler is no longer the policy; or set "
        "rollout_lag_uncorrected=True to study what happens without a correction",
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
    return [*config.objective.notes(facts_of(config)), *_notes_on_trl(config)]


def warn_of(config: "KLConfig", stacklevel: int) -> None:
    """Give each of the `notes` as a `MeaningWarning`."""
    for sentence in notes(config):
        warnings.warn(sentence, MeaningWarning, stacklevel=stacklevel + 1)


def facts_of(config: "KLConfig") -> Facts:
    """What TRL's settings say of the completions and of the loss."""
    uncorrected = config.rollout_lag or config.kl_placement == "reward"  # refused or allowed by name; scored when new
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    filters = [f"{name}={getattr(config, name)}" for name, value in neutral.items() if getattr(config, name) != value]
    options = config.generation_kwargs if isinstance(config.generation_kwargs, dict) else {}
    filters += [f"generation_kwargs {name}={options[name]}" for name in SAMPLERS if name in options]
    if config.vllm_structured_outputs_regex:
        filters.append("vllm_structured_outputs_regex")
    return Facts(
        "TRL",
        stale=None if uncorrected else stale(config),
        filters=filters,
        entropy=f"entropy_coef={config.entropy_coef:g}" if config.entropy_coef or config.use_adaptive_entropy else None,
        mean=f"loss_type={config.loss_type!r}" if config.loss_type in PER_COMPLETION_MEANS else None,
        sums=_other_reductions(config),
    )


def _notes_on_trl(config: "KLConfig") -> Iterator[str]:
    """Notes on settings that verl does not have."""
    placement, is_in_loss = config.kl_placement, config.kl_placement == "loss"
    if config.sync_ref_model:
        yield (
            f"sync_ref_model moves the reference towards the policy every {config.ref_model_sync_steps} updates: the "
            "KL is to a reference that moves, and no longer to the model as it started"
        )
    bound = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.loss_type == "cispo" and bound < 1:
        share = "and a KL in the loss is not" if is_in_loss else "and the KL with them"
        yield (
            f"loss_type='cispo' limits the ratio to epsilon_high={bound:g}, below 1: on-policy all advantages are "
            f"multiplied by it, {share}; set epsilon_high to 5, for example"
        )
    if config.use_vllm and config.vllm_importance_sampling_correction and not is_in_loss:
        yield (
            f"vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r} weights the KL in the "
            f"{placement} like the policy loss, and drops or truncates it with the policy loss"
        )
    rows = config.per_device_train_batch_size
    together = rows * config.gradient_accumulation_steps * config.world_size
    if config.loss_type == "bnpo" and config.objective.reduction == "policy" and config.kl_coef and rows != together:
        # A mean over the tokens of each forward pass: the size of the update does not help.
        effect = "a token counts more beside short completions, and the gradient is that of the declared KL only as "
        effect += "the completions of a pass become many"
        if rows == 1:
            effect = "that is a mean over the tokens of each completion, the gradient of no divergence"
        yield (
            f"loss_type='bnpo' divides the KL by the tokens of one forward pass, of {rows} "
            f"completion{'s' * (rows != 1)} on each process, and not by those of the update, of {together}: {effect}; "
            f"{_other_reductions(config)} keeps the declared KL"
        )
    aggregation = config.multi_objective_aggregation
    cause = None if config.scale_rewards in (False, "none") else f"scale_rewards={config.scale_rewards!r}"
    other = "scale_rewards='none'"
    if aggregation != "sum_then_normalize":  # where TRL does not read scale_rewards
        cause = f"multi_objective_aggregation={aggregation!r}"
        other = f"multi_objective_aggregation='sum_then_normalize' with {other}"
    if placement == "reward" and config.kl_coef and cause is not None:
        unit = "batch" if cause == "scale_rewards='batch'" else "prompt"
        yield (
            f"kl_placement='reward' with {cause}: a standard deviation divides the KL too, so that β differs from "
            f"{unit} to {unit}; kl_placement='advantage', or {other}, keeps the declared KL"
        )
    if config.neftune_noise_alpha:
        yield (
            f"neftune_noise_alpha={config.neftune_noise_alpha:g} adds noise to the policy's embeddings and not to the "
            "reference's, and the KL includes the difference"
        )


def _other_reductions(config: "KLConfig") -> str:
    """What keeps the declared KL; in the advantage and the reward, the KL is always reduced like the policy loss."""
    first = "kl_reduction='sequence', " if config.kl_placement == "loss" else ""
    return f"{first}loss_type='dapo' or loss_type='dr_grpo'"
