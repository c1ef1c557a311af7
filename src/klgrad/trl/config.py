"""`KLConfig`, the objective that it declares, and how other ways to declare one are read."""

from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from ..core.families import Formula
from ..core.term import KLTerm
from ..errors import MeaningError
from ..integrations import Objective, bound_of, bound_text, check_own, choice_field
from ..support import Json
from ..zoo import Cell
from . import config_checks as checks
from .config_checks import TERM_FIELDS, changed_among, warn_of

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
        formula = self.term.formula
        if self.prefix_weight:
            weights = f"each token weighted by 1 + {self.prefix_weight:g} times the share of |l| from it on"
            formula = replace(formula, notes=(*formula.notes, weights))
        if self.top_k is None:
            return formula
        tails = {"sampled": "the rest by the sampled token", "lump": "the rest as one entry, a lower bound"}
        tails["none"] = "without the rest, a lower bound"
        whose = "reference" if self.top_k_of == "teacher" else "policy"
        entries = f"over the {whose}'s {self.top_k} likeliest entries, {tails[self.tail]}"
        return replace(formula, notes=(*formula.notes, entries))


def objective_of(config: "KLConfig") -> TRLObjective:
    """Check the fields of a `KLConfig` together, and build its objective."""
    checks.check(config)
    settings = {f.name: getattr(config, f"kl_{f.name}") for f in fields(TRLObjective)}
    settings["ratio_bound"] = bound_text(bound_of(config.kl_ratio_bound))  # `truncate:2` is `truncate:2.0`
    if config.kl_cell is not None:
        return TRLObjective(**{**settings, "cell": checks.cell_of(config)})
    objective = TRLObjective(**settings)
    objective = replace(objective, discount=objective.declared_term.discount)  # at token level it is 0
    checks.check_term(config, objective.declared_term)
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


# `KLConfig`: TRL's `GRPOConfig`, with fields that declare the KL.


def declared_field(name: str, text: str) -> Any:
    """A field of `KLConfig` with the default and the choices that the objective has."""
    described = TRLObjective.__dataclass_fields__[name]
    return field(default=described.default, metadata={"help": text, **described.metadata})


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
    kl_memory: int = field(
        default=256,
        metadata={"help": "MiB for tiles of logits with `exact`. More is slightly faster, up to all logits."},
    )
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
    kl_cell: str | None = field(
        default=None,
        metadata={"help": "Train with a loss of klgrad.zoo by name, sound or not, instead of a declared KL."},
    )
    kl_target: float | None = declared_field(
        "target", "Adapt β so that KL(π‖ref) stays near this value, in `kl_target_unit`."
    )
    kl_target_unit: str = declared_field("target_unit", "Unit of `kl_target`: nats per completion, or per token.")
    kl_horizon: int = declared_field(
        "horizon", "Updates over which β changes by a factor of e if the relative error is 1."
    )
    rollout_lag: int = field(
        default=0,
        metadata={
            "help": "Train on completions that are this many updates old, as asynchronous training does. The first "
            "updates train on different batches of the policy that the run starts from."
        },
    )
    rollout_lag_repeats: bool = field(
        default=False,
        metadata={
            "help": "Repeat the first batch until others are `rollout_lag` updates old, in place of different batches."
        },
    )
    rollout_lag_uncorrected: bool = field(
        default=False, metadata={"help": "Allow `rollout_lag` without importance weights on the KL, for study."}
    )
    teacher: str | None = field(
        default=None,
        metadata={
            "help": "Distil from this model: it is the reference, and rewards are optional. Several are separated by "
            "commas, and may have names: math=PATH,code=PATH."
        },
    )
    teacher_weights: list[float] | None = field(
        default=None,
        metadata={"help": "Weight of each teacher's divergence, with kl_estimator `exact`. Default: equal, of sum 1."},
    )
    teacher_column: str | None = field(
        default=None, metadata={"help": "Column of the dataset with the name of each prompt's teacher, one of several."}
    )
    teacher_prompt: str | None = field(
        default=None,
        metadata={
            "help": "Column of the dataset with the prompt that the teacher sees in the place of `prompt`, such as one "
            "with the solution: self-distillation, if the teacher is the model as it starts."
        },
    )

    def __post_init__(self) -> None:
        check_own(self)
        super().__post_init__()
        self.declare(stacklevel=4)  # where the configuration is written

    def declare(self, stacklevel: int) -> None:
        """Build the objective from the fields, and warn of settings that change its meaning."""
        self.objective: TRLObjective = objective_of(self)
        checks.check_staleness(self)
        warn_of(self, stacklevel)

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


def resolve_config(args: Any, kl: KLTerm | None) -> KLConfig:
    """The configuration that a trainer is built with: `args`, or the defaults, with the KL term if one is given.

    The fields of `args` that declare a term are then at their defaults, or agree with it. It is written into a copy.
    """
    args = KLConfig("klgrad-run") if args is None else args
    _check_class(args)
    if kl is None:
        return args
    _check_term(kl, args)
    config = copy(args)
    for name, value in fields_of(kl).items():
        setattr(config, name, value)
    config.declare(stacklevel=4)
    return config


def _check_class(args: object) -> None:
    """Refuse anything but a `KLConfig`; for TRL's configuration, say what its β is there."""
    if isinstance(args, KLConfig):
        return
    remedy = "write KLConfig(...), from klgrad.trl, with the same fields: it declares which KL is meant"
    if beta := getattr(args, "beta", None):
        remedy += f"; for the KL of beta={beta}, token by token, write kl_coef={beta}, kl_level='token'"
    raise MeaningError("a KLConfig", f"a {type(args).__name__}", remedy)


def _check_term(kl: object, args: KLConfig) -> None:
    if not isinstance(kl, KLTerm):
        raise MeaningError("`kl` as a KLTerm", f"a {type(kl).__name__}", "write kl=KLTerm(...), from klgrad")
    if kl.reduction != "sequence":
        raise MeaningError(
            "`kl` with reduction='sequence'",
            f"reduction={kl.reduction!r}",
            "leave it out: `kl_reduction` of the KLConfig sets how the trainer reduces the term",
        )
    declared = fields_of(kl)
    changed_fields = changed_among(args, (*TERM_FIELDS, "kl_ratio_bound", "kl_cell"))
    if "kl_ratio_bound" in changed_fields and "kl_ratio_bound" in declared:  # `truncate:2` is `truncate:2.0`
        changed_fields["kl_ratio_bound"] = bound_text(bound_of(changed_fields["kl_ratio_bound"]))
    other = {name: value for name, value in changed_fields.items() if value != declared.get(name)}
    if other:
        fields = ", ".join(f"{name}={value!r}" for name, value in other.items())
        raise MeaningError(
            "one KL, declared by `kl` or by fields of the KLConfig; fields beside `kl` must agree with it",
            f"kl={kl.name} and {fields}",
            f"drop `kl`, or leave out {', '.join(f'`{name}`' for name in other)}",
        )
