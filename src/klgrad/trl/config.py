"""`KLConfig`: its objective, settings that contradict it or change what it means, and a `KLTerm` in their place."""

import math
import re
import warnings
from collections.abc import Iterator
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar

from trl.trainer.grpo_config import GRPOConfig

from .. import zoo
from ..core.families import Formula
from ..core.term import KLTerm
from ..errors import MeaningError
from ..integrations import Facts, Objective, bound_of, bound_text, choice_field, refuse_if
from ..support import Json
from ..zoo import Cell

T = TypeVar("T")

# From the fields of a `KLConfig` to the objective: a `KLTerm` or a loss of the zoo, and where it is placed.


@dataclass(frozen=True, kw_only=True)
class TRLObjective(Objective):
    """The declared KL on TRL, or a loss of the zoo in its place.

    Attributes:
        cell: a whole loss of `klgrad.zoo`, or None.
        top_k: how many of the reference's likeliest entries an exact term sums over; None for all.
        top_k_of: whose likeliest entries: the `teacher`'s, which is the reference, or the `student`'s.
        tail: how the other entries are treated: `sampled`, `lump` or `none`.
        prefix_weight: γ of weights that fall from 1 + γ to 1 along a completion, with |l| of the tokens before.
    """

    cell: Cell | None = None
    top_k: int | None = None
    top_k_of: str = choice_field("teacher", "student")
    tail: str = choice_field("sampled", "lump", "none")
    prefix_weight: float = 0.0

    @property
    def term(self) -> KLTerm | None:
        """The KL term; None for a loss of the zoo."""
        return self.declared_term if self.cell is None else None

    @property
    def is_corrected(self) -> bool:
        """Whether the KL has importance weights, or needs none for old completions."""
        return self.cell is None and super().is_corrected

    @property
    def exact(self) -> bool:
        """Whether the hidden states of both models are needed, for a sum over the vocabulary."""
        return self.term is not None and (self.term.estimator == "exact" or self.term.baseline == "token_kl")

    @property
    def leaves_one_out(self) -> bool:
        return self.term is not None and self.term.baseline == "leave_one_out"

    @property
    def compares_completions(self) -> bool:
        """Whether a loss of the zoo compares the completions of a prompt, and needs all of them."""
        return self.cell is not None and self.cell.compares_completions

    @property
    def needs_groups(self) -> bool:
        """Whether it has to be known which completions share a prompt."""
        return self.leaves_one_out or self.compares_completions

    @property
    def is_weighted(self) -> bool:
        return self.term is not None and self.term.weighting is not None

    @property
    def formula(self) -> Formula | None:
        """The term's gradient in parts; None for a loss of the zoo."""
        if self.term is None:
            return None
        formula, more = self.term.formula, list[str]()
        if self.prefix_weight:
            more.append(f"each token weighted by 1 + {self.prefix_weight:g} times the share of |l| from it on")
        if self.top_k is not None:
            tails = {"sampled": "the rest by the sampled token", "lump": "the rest as one entry, a lower bound"}
            tails["none"] = "without the rest, a lower bound"
            whose = "reference" if self.top_k_of == "teacher" else "policy"
            more.append(f"over the {whose}'s {self.top_k} likeliest entries, {tails[self.tail]}")
        return replace(formula, notes=(*formula.notes, *more))


def objective_of(config: "KLConfig") -> TRLObjective:
    """Check the fields of a `KLConfig` together, and build its objective."""
    check(config)
    settings = {f.name: getattr(config, f"kl_{f.name}") for f in fields(TRLObjective)}
    settings["ratio_bound"] = bound_text(bound_of(config.kl_ratio_bound))  # `truncate:2` is `truncate:2.0`
    if config.kl_cell is not None:
        return TRLObjective(**{**settings, "cell": cell_of(config)})
    objective = TRLObjective(**settings)
    objective = replace(objective, discount=objective.declared_term.discount)  # at token level it is 0
    check_term(config, objective.declared_term)
    return objective


def fields_of(term: KLTerm) -> Json:
    """The fields of a `KLConfig` that declare a term: the inverse of `objective_of`."""
    weighting = term.weighting
    return {
        "kl_divergence": term.divergence,
        "kl_level": term.level,
        "kl_estimator": term.estimator,
        "kl_discount": term.discount,
        "kl_baseline": term.baseline,
        "kl_influence_bound": term.influence_bound,
        **({} if weighting is None else {"kl_ratio": weighting.ratio, "kl_ratio_bound": bound_text(weighting.bound)}),
    }


def changed(config: Any) -> Json:
    """The fields of a dataclass instance that differ from their defaults."""
    init = [f for f in fields(config) if f.init]
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
    "kl_divergence", "kl_level", "kl_estimator", "kl_discount", "kl_baseline", "kl_ratio", "kl_influence_bound",
)  # fmt: skip
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
    refuse_if(config.rollout_lag < 0, "`rollout_lag` >= 0", f"{config.rollout_lag}", "0 trains on fresh completions")
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
    for name, neutral in (("off_policy_mask_threshold", None), ("top_entropy_quantile", 1.0)):
        refuse_if(
            getattr(config, name) != neutral,
            f"`{name}`={neutral} with kl_placement={config.kl_placement!r}",
            f"{getattr(config, name)}",
            "use kl_placement='loss': the KL in the advantages of masked tokens would be dropped",
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
        term != KLTerm(),
        "the reverse KL at sequence level by k1, without discount, baseline or bound, for kl_placement='reward'",
        term.name,
        "a reward carries one number per completion, with the group's mean as its baseline; put any other term in the "
        "loss or the advantage",
    )


def cell_of(config: "KLConfig") -> Cell:
    """The loss of the zoo that is named; fields that have no meaning beside a whole loss are refused."""
    refuse_if(
        config.kl_placement != "loss",
        "`kl_placement`='loss' with `kl_cell`",
        repr(config.kl_placement),
        "leave it out: `kl_cell` is a whole loss",
    )
    for name, value in changed_among(config, *TERM_FIELDS, "kl_top_k", "kl_prefix_weight").items():
        raise MeaningError(f"no `{name}` beside `kl_cell`", f"{name}={value!r}", "`kl_cell` is a whole loss: drop one")
    cell = zoo.get(str(config.kl_cell))
    refuse_if(
        cell.per_token is None and config.kl_reduction != "sequence",
        f"`kl_reduction`='sequence' with kl_cell={cell.name!r}, whose own reduction is part of the loss",
        f"kl_reduction={config.kl_reduction!r}, which reduces a loss per token as `loss_type` says",
        "write kl_reduction='sequence'; `kl_coef` then multiplies the loss as it stands",
    )
    return cell


def changed_among(config: "KLConfig", *names: str) -> Json:
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


# Settings that change the meaning of the declared KL without being an error: each gives a warning.

PER_COMPLETION_MEANS = ("grpo", "sapo")
"""Values of `loss_type` that average over the tokens of each completion."""


class MeaningWarning(UserWarning):
    """A setting that changes which completions the declared KL is averaged over, or how it is weighted."""


def notes(config: "KLConfig") -> list[str]:
    """One sentence for each such setting."""
    uncorrected = config.rollout_lag or config.kl_placement == "reward"  # refused or allowed by name; scored when new
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    filters = [f"{name}={getattr(config, name)}" for name, value in neutral.items() if getattr(config, name) != value]
    options = config.generation_kwargs if isinstance(config.generation_kwargs, dict) else {}
    filters += [f"generation_kwargs {name}={options[name]}" for name in SAMPLERS if name in options]
    if config.vllm_structured_outputs_regex:
        filters.append("vllm_structured_outputs_regex")
    facts = Facts(
        "TRL",
        stale=None if uncorrected else stale(config),
        filters=filters,
        entropy=f"entropy_coef={config.entropy_coef:g}" if config.entropy_coef or config.use_adaptive_entropy else None,
        mean=f"loss_type={config.loss_type!r}" if config.loss_type in PER_COMPLETION_MEANS else None,
        sums=_other_reductions(config),
    )
    return [*config.objective.notes(facts), *_notes_on_trl(config)]


def _notes_on_trl(config: "KLConfig") -> Iterator[str]:
    """Notes on settings that verl does not have."""
    if config.sync_ref_model:
        yield (
            f"sync_ref_model moves the reference towards the policy every {config.ref_model_sync_steps} updates: the "
            "KL is to a reference that moves, and no longer to the model as it started"
        )
    bound = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.loss_type == "cispo" and bound < 1:
        yield (
            f"loss_type='cispo' limits the ratio to epsilon_high={bound:g}, below 1: on-policy all advantages are "
            "multiplied by it, with a KL in them, and a KL in the loss is not; set epsilon_high to 5, for example"
        )
    if config.use_vllm and config.vllm_importance_sampling_correction and config.kl_placement != "loss":
        yield (
            f"vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r} weights the KL in the "
            f"{config.kl_placement} like the policy loss, and drops or truncates it with the policy loss"
        )
    rows = config.per_device_train_batch_size
    together = rows * config.gradient_accumulation_steps * config.world_size
    if config.loss_type == "bnpo" and config.objective.reduction == "policy" and config.kl_coef and rows != together:
        yield (
            f"loss_type='bnpo' divides the KL by the tokens of one forward pass, of {rows} "
            f"completion{'s' * (rows != 1)} on each process, and not by those of the update, of {together}: a token "
            "counts more beside short completions, and with one completion a pass the gradient is that of no "
            f"divergence; {_other_reductions(config)} keeps the declared KL"
        )
    scaled = config.scale_rewards not in (False, "none") or config.multi_objective_aggregation == "normalize_then_sum"
    if config.kl_placement == "reward" and config.kl_coef and scaled:
        unit = "batch" if config.scale_rewards == "batch" else "prompt"
        yield (
            f"kl_placement='reward' with scale_rewards={config.scale_rewards!r} and multi_objective_aggregation="
            f"{config.multi_objective_aggregation!r}: a standard deviation divides the KL too, so that β differs from "
            f"{unit} to {unit}; kl_placement='advantage', or 'none' with 'sum_then_normalize', keeps the declared KL"
        )


def _other_reductions(config: "KLConfig") -> str:
    """What keeps the declared KL; in the advantage and the reward, the KL is always reduced like the policy loss."""
    first = "kl_reduction='sequence', " if config.kl_placement == "loss" else ""
    return f"{first}loss_type='dapo' or loss_type='dr_grpo'"


# `KLConfig`: TRL's `GRPOConfig`, with fields that declare the KL.


def setting(default: T, text: str, **more: object) -> T:
    """A field with its help."""
    return field(default=default, metadata={"help": text, **more})


def declared_field(name: str, text: str) -> Any:
    """A field of `KLConfig` with the default and the choices that the objective has."""
    described = TRLObjective.__dataclass_fields__[name]
    return setting(described.default, text, **described.metadata)


@dataclass
class KLConfig(GRPOConfig):
    """All fields of `GRPOConfig`, and fields named `kl_...` that declare the KL; TRL's own `beta` stays 0.

    Settings that contradict each other raise `MeaningError`. Settings that change what the declared KL means give a
    `MeaningWarning`.

    Attributes:
        objective: what the fields declare.

    Example:
        >>> from klgrad.trl import KLConfig
        >>> args = KLConfig("runs/mine", kl_estimator="k1_k3", kl_coef=0.02, bf16=False)
        >>> args.objective.term.name
        'reverse-sequence-k1-k3'
    """

    kl_coef: float = declared_field("coef", "β: the weight of the KL. With `kl_target`, its starting value.")
    kl_placement: str = declared_field(
        "placement",
        "Where the KL is added. `loss`: to the policy loss. `advantage`: subtracted from the advantages "
        "after they are normalised. `reward`: subtracted from the reward, where TRL may divide it, and so β, by a "
        "standard deviation.",
    )
    kl_divergence: str = declared_field(
        "divergence",
        "`reverse` is KL(π‖ref), `forward` is KL(ref‖π). Others are `jensen-shannon`, `jensen-shannon(0.1)` with its "
        "beta, `alpha(0.3)`, `hellinger`, `chi-square`, `total-variation` and `huber(2)`, with kl_estimator `exact` or "
        "`sampled`; and sums such as `0.3 forward + 0.7 reverse`.",
    )
    kl_level: str = declared_field(
        "level",
        "`sequence`: the gradient of the divergence between distributions over completions. `token`: the "
        "gradient of each token's divergence, with the prefixes held fixed. `future`: that of the sum of the tokens' "
        "divergences, in which a token also counts for later prefixes; for the reverse KL it is `sequence`.",
    )
    kl_estimator: str = declared_field(
        "estimator",
        "`k1`; `k1_k3`, which estimates the later tokens by k3; `k3`, for the forward KL; `sampled`, for other "
        "divergences; or `exact`, which sums over the whole vocabulary.",
    )
    kl_top_k: int | None = declared_field(
        "top_k",
        "With `exact`: sum over this many of the likeliest entries only, and treat the others by `kl_tail`. For a "
        "teacher of which only the likeliest entries are known.",
    )
    kl_top_k_of: str = declared_field(
        "top_k_of", "Whose likeliest entries: the `teacher`'s (the reference's), or the `student`'s."
    )
    kl_tail: str = declared_field(
        "tail",
        "How `kl_top_k` treats the other entries. `sampled`: by the sampled token, unbiased unless "
        "`kl_ratio_bound` changes its ratio. `lump`: as one entry, a lower bound without noise. `none`: not at all, a "
        "lower bound that leaves them as they are.",
    )
    kl_prefix_weight: float = declared_field(
        "prefix_weight",
        "With `exact` at token level: γ of weights that fall from 1 + γ to 1 along a completion, with the |log-ratio| "
        "of the tokens before. 0 for none.",
    )
    kl_memory: int = setting(256, "MiB for tiles of logits with `exact`. More is slightly faster, up to all logits.")
    kl_discount: float = declared_field(
        "discount", "Between 0 and 1: weight of the later tokens in a token's gradient."
    )
    kl_baseline: str = declared_field(
        "baseline",
        "`token_kl`: subtract the exact KL of the token, with kl_estimator `k1`. `leave_one_out`: subtract the mean "
        "over the other completions of the prompt in the micro-batch of "
        "all processes, which should hold whole groups: a multiple of num_generations on each process.",
    )
    kl_ratio: str = declared_field(
        "ratio",
        "Importance ratio of the KL, between the policy and what sampled the completions: `token`, "
        "`prefix`, `sequence`, or `none`.",
    )
    kl_ratio_bound: str = declared_field(
        "ratio_bound", "Bound of `kl_ratio`: `truncate:MAX`, `clip:LOW:HIGH`, `mask:LOW:HIGH`, or `none`."
    )
    kl_influence_bound: float | None = declared_field(
        "influence_bound", "c > 0 clips each token's own part of the gradient's coefficient to [-c, c]."
    )
    kl_reduction: str = declared_field(
        "reduction",
        "`policy`: reduced as `loss_type` reduces the policy loss, so that β compares with TRL's. "
        "`sequence`: summed over each completion, averaged over completions.",
    )
    kl_cell: str | None = setting(
        None, "Train with a loss of klgrad.zoo by name, sound or not, instead of a declared KL."
    )
    kl_target: float | None = declared_field(
        "target", "Adapt β so that KL(π‖ref) stays near this value, in `kl_target_unit`."
    )
    kl_target_unit: str = declared_field("target_unit", "Unit of `kl_target`: nats per completion, or per token.")
    kl_horizon: int = declared_field(
        "horizon", "Updates over which β changes by a factor of e if the relative error is 1."
    )
    rollout_lag: int = setting(
        0,
        "Train on completions that are this many updates old, as asynchronous training does. The first updates train "
        "on different batches of the policy that the run starts from.",
    )
    rollout_lag_repeats: bool = setting(
        False, "Repeat the first batch until others are `rollout_lag` updates old, in place of different batches."
    )
    rollout_lag_uncorrected: bool = setting(
        False, "Allow `rollout_lag` without importance weights on the KL, for study."
    )
    teacher: str | None = setting(
        None,
        "Distil from this model: it is the reference, and rewards are optional. Several are separated by commas, and "
        "may have names: math=PATH,code=PATH.",
    )
    teacher_weights: list[float] | None = field(
        default=None,
        metadata={"help": "Weight of each teacher's divergence, with kl_estimator `exact`. Default: equal, of sum 1."},
    )
    teacher_column: str | None = setting(
        None, "Column of the dataset with the name of each prompt's teacher, one of several."
    )
    teacher_prompt: str | None = setting(
        None,
        "Column of the dataset with the prompt that the teacher sees in the place of `prompt`, such as one with the "
        "solution: self-distillation, if the teacher is the model as it starts.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.declare(stacklevel=4)  # where the configuration is written

    def declare(self, stacklevel: int) -> None:
        """Build the objective from the fields, and warn of settings that change its meaning."""
        self.objective: TRLObjective = objective_of(self)
        refuse_if(
            self.rollout_lag and not self.rollout_lag_uncorrected and not self.objective.is_corrected,
            "`kl_ratio` with `rollout_lag`",
            "none",
            "set kl_ratio='prefix' with kl_placement='loss', because the sampler is no longer the policy; or set "
            "rollout_lag_uncorrected=True to study what happens without a correction",
        )
        for sentence in notes(self):
            warnings.warn(sentence, MeaningWarning, stacklevel=stacklevel)

    def to_dict(self) -> Json:
        """The fields as plain data."""
        return super().to_dict() | {"kl_divergence": self._divergence_name}

    def __getstate__(self) -> Json:
        """The fields, for `training_args.bin`: functions in a file of the user cannot be pickled."""
        fields = {name: value for name, value in vars(self).items() if name != "objective"}
        return fields | {"kl_divergence": self._divergence_name}

    @property
    def _divergence_name(self) -> str:
        return str(getattr(self.kl_divergence, "name", self.kl_divergence))


# The arguments of a `KLTrainer` that declare its KL: a `KLConfig`, or a `KLConfig` and a `KLTerm`.


def resolve_config(args: KLConfig | None, kl: KLTerm | None) -> KLConfig:
    """The configuration that a trainer is built with: `args`, or the defaults, with the KL term if one is given.

    The fields of `args` that declare a term are then at their defaults, or agree with it. It is written into a copy.
    """
    args = KLConfig("klgrad-run") if args is None else args
    beta: object = getattr(args, "beta", None)
    refuse_if(
        not isinstance(args, KLConfig),
        "a KLConfig",
        f"a {type(args).__name__}",
        "write KLConfig(...), from klgrad.trl, with the same fields: it declares which KL is meant"
        + (f"; for the KL of beta={beta}, token by token, write kl_coef={beta}, kl_level='token'" if beta else ""),
    )
    if kl is None:
        return args
    if not isinstance(kl, KLTerm):
        raise MeaningError("`kl` as a KLTerm", f"a {type(kl).__name__}", "write kl=KLTerm(...), from klgrad")
    refuse_if(
        kl.reduction != "sequence",
        "`kl` with reduction='sequence'",
        f"reduction={kl.reduction!r}",
        "leave it out: `kl_reduction` of the KLConfig sets how the trainer reduces the term",
    )
    declared, given = fields_of(kl), changed_among(args, *TERM_FIELDS, "kl_ratio_bound", "kl_cell")
    if "kl_ratio_bound" in given:  # `truncate:2` is `truncate:2.0`
        given["kl_ratio_bound"] = bound_text(bound_of(given["kl_ratio_bound"]))
    other = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != declared.get(name))
    refuse_if(
        other,
        "one KL, declared by `kl` or by fields of the KLConfig; fields beside `kl` must agree with it",
        f"kl={kl.name} and {other}",
        "drop `kl`, or leave these fields out",
    )
    config = copy(args)
    for name, value in declared.items():
        setattr(config, name, value)
    config.declare(stacklevel=4)
    return config
