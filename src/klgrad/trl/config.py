"""`KLConfig`, the objective that it declares, and how other ways to declare one are read."""

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from trl.trainer.grpo_config import GRPOConfig

from ..core.families import CHOICES, Formula
from ..core.importance import Bound, ImportanceWeighting, Ratio
from ..core.term import KLTerm
from ..errors import MeaningError
from ..integrations import bound_of, written
from ..zoo import Cell
from . import config_checks as checks
from .config_checks import PLACEMENTS, REDUCTIONS, TAILS, TERM_FIELDS, UNITS, changed, changed_among, warn_of

# From the fields of a `KLConfig` to the objective: a `KLTerm` or a loss of the zoo, and where it is placed.


@dataclass(frozen=True)
class Objective:
    """What is trained beside the reward: β times a KL term or a loss of the zoo.

    Attributes:
        term: the KL term, or None.
        cell: a whole loss of `klgrad.zoo`, or None.
        placement: `loss`, `advantage` or `reward`.
        reduction: `policy`, as TRL reduces the policy loss, or `sequence`.
        top_k: how many of the reference's likeliest entries an exact term sums over; None for all.
        tail: how the other entries are treated, `sampled` or `lump`.
        tail_bound: of the sampled tail's ratio.
    """

    term: KLTerm | None
    cell: Cell | None
    placement: str
    reduction: str
    top_k: int | None = None
    tail: str = "sampled"
    tail_bound: Bound | None = None

    @property
    def exact(self) -> bool:
        """Whether the hidden states of both models are needed."""
        return self.term is not None and self.term.estimator == "exact"

    @property
    def leaves_one_out(self) -> bool:
        """Whether the term has a leave-one-out baseline."""
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
        """Whether the term has importance weights."""
        return self.term is not None and self.term.weighting is not None

    @property
    def formula(self) -> Formula | None:
        """The term's gradient in parts; None for a loss of the zoo."""
        if self.term is None:
            return None
        found = self.term.formula
        if self.top_k is None:
            return found
        tail = "the rest by the sampled token" if self.tail == "sampled" else "the rest as one entry, a lower bound"
        entries = f"KL over the reference's {self.top_k} likeliest entries, {tail}"
        return replace(found, notes=(*found.notes, entries))


def objective_of(config: Any) -> Objective:
    """Check the fields of a `KLConfig` together, and build its objective."""
    if config.beta != 0.0:
        raise MeaningError(
            "`beta` = 0, TRL's own KL off", f"beta={config.beta}", "use `kl_coef` instead; two KL terms would add up"
        )
    checks.together(config)
    checks.reference(config)
    checks.truncation(config)
    if config.kl_cell is not None:
        return Objective(None, checks.cell_of(config), "loss", config.kl_reduction)
    term = KLTerm(
        divergence=config.kl_divergence,
        level=config.kl_level,
        estimator=config.kl_estimator,
        discount=config.kl_discount,
        baseline=config.kl_baseline,
        weighting=None
        if config.kl_ratio == "none"
        else ImportanceWeighting(config.kl_ratio, bound_of(config.kl_ratio_bound)),
        influence_bound=config.kl_influence_bound,
    )
    checks.placement(config, term)
    checks.top_k(config)
    top_k, tail, bound = config.kl_top_k, config.kl_tail, bound_of(config.kl_ratio_bound)
    return Objective(term, None, config.kl_placement, config.kl_reduction, top_k, tail, bound)


def fields_of(term: KLTerm) -> dict[str, Any]:
    """The fields of a `KLConfig` that declare a term: the inverse of `objective_of`."""
    weighting = term.weighting
    return {
        "kl_divergence": term.divergence,
        "kl_level": term.level,
        "kl_estimator": term.estimator,
        "kl_discount": term.discount,
        "kl_baseline": term.baseline,
        "kl_influence_bound": term.influence_bound,
        **({} if weighting is None else {"kl_ratio": weighting.ratio, "kl_ratio_bound": written(weighting.bound)}),
    }


# `KLConfig`: TRL's `GRPOConfig`, with fields that declare the KL.


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

    kl_coef: float = field(
        default=0.05, metadata={"help": "β: the weight of the KL. With `kl_target`, its starting value."}
    )
    kl_placement: str = field(
        default="loss",
        metadata={
            "help": "Where the KL is added. `loss`: to the policy loss. `advantage`: subtracted from the advantages "
            "after they are normalised. `reward`: subtracted from the reward, where TRL may divide it, and so β, by a "
            "standard deviation.",
            "choices": list(PLACEMENTS),
        },
    )
    kl_divergence: str = field(
        default="reverse",
        metadata={"help": "`reverse` is KL(π‖ref), `forward` is KL(ref‖π).", "choices": list(CHOICES["divergence"])},
    )
    kl_level: str = field(
        default="sequence",
        metadata={
            "help": "`sequence`: the gradient of the divergence between distributions over completions. `token`: the "
            "gradient of each token's divergence, with the prefixes held fixed.",
            "choices": list(CHOICES["level"]),
        },
    )
    kl_estimator: str = field(
        default="k1",
        metadata={
            "help": "`k1`; `k1_k3`, which estimates the later tokens by k3; `k3`, for the forward KL; or `exact`, "
            "which sums over the whole vocabulary.",
            "choices": list(CHOICES["estimator"]),
        },
    )
    kl_top_k: int | None = field(
        default=None,
        metadata={
            "help": "With `exact`: sum over this many of the reference's likeliest entries only, and treat the others "
            "by `kl_tail`. For a teacher of which only the likeliest entries are known."
        },
    )
    kl_tail: str = field(
        default="sampled",
        metadata={
            "help": "How `kl_top_k` treats the other entries. `sampled`: by the sampled token, unbiased unless "
            "`kl_ratio_bound` changes its ratio. `lump`: as one entry, a lower bound without noise.",
            "choices": list(TAILS),
        },
    )
    kl_memory: int = field(
        default=256,
        metadata={"help": "MiB for tiles of logits with `exact`. More is slightly faster, up to all logits."},
    )
    kl_discount: float = field(
        default=1.0,
        metadata={"help": "Between 0 and 1: weight of the later tokens in a token's gradient, at sequence level."},
    )
    kl_baseline: str = field(
        default="none",
        metadata={
            "help": "`leave_one_out`: subtract the mean over the other completions of the prompt in the micro-batch of "
            "all processes, which should hold whole groups: a multiple of num_generations on each process.",
            "choices": list(CHOICES["baseline"]),
        },
    )
    kl_ratio: str = field(
        default="none",
        metadata={
            "help": "Importance ratio of the KL, between the policy and what sampled the completions: `token`, "
            "`prefix`, `sequence`, or `none`.",
            "choices": ["none", *get_args(Ratio)],
        },
    )
    kl_ratio_bound: str = field(
        default="truncate:2",
        metadata={"help": "Bound of `kl_ratio`: `truncate:MAX`, `clip:LOW:HIGH`, `mask:LOW:HIGH`, or `none`."},
    )
    kl_influence_bound: float | None = field(
        default=None, metadata={"help": "c > 0 clips each token's own part of the gradient's coefficient to [-c, c]."}
    )
    kl_reduction: str = field(
        default="policy",
        metadata={
            "help": "`policy`: reduced as `loss_type` reduces the policy loss, so that β compares with TRL's. "
            "`sequence`: summed over each completion, averaged over completions.",
            "choices": list(REDUCTIONS),
        },
    )
    kl_cell: str | None = field(
        default=None,
        metadata={"help": "Train with a loss of klgrad.zoo by name, sound or not, instead of a declared KL."},
    )
    kl_target: float | None = field(
        default=None, metadata={"help": "Adapt β so that KL(π‖ref) stays near this value, in `kl_target_unit`."}
    )
    kl_target_unit: str = field(
        default="sequence",
        metadata={"help": "Unit of `kl_target`: nats per completion, or per token.", "choices": list(UNITS)},
    )
    kl_horizon: int = field(
        default=50, metadata={"help": "Updates over which β changes by a factor of e if the relative error is 1."}
    )
    rollout_lag: int = field(
        default=0,
        metadata={
            "help": "Train on completions that are this many updates old, as asynchronous training does. The first "
            "ones are repeated until some are that old."
        },
    )
    rollout_lag_uncorrected: bool = field(
        default=False, metadata={"help": "Allow `rollout_lag` without importance weights on the KL, for study."}
    )
    teacher: str | None = field(
        default=None, metadata={"help": "Distil from this model: it is the reference, and rewards are optional."}
    )

    def __post_init__(self) -> None:
        checks.check_own(self, checks.own_settings(KLConfig))
        super().__post_init__()
        self.declare(stacklevel=4)  # where the configuration is written

    def declare(self, stacklevel: int) -> None:
        """Build the objective from the fields, and warn of settings that change its meaning."""
        self.objective: Objective = objective_of(self)
        checks.staleness(self)
        warn_of(self, stacklevel)

    def to_dict(self) -> dict[str, Any]:
        """The fields, without the objective, which follows from them."""
        return {name: value for name, value in super().to_dict().items() if name != "objective"}


# The arguments of a `KLTrainer` that declare its KL: a `KLConfig`, or a `KLConfig` and a `KLTerm`.

DERIVED = (
    "steps_per_generation",
    "generation_batch_size",
    "eval_steps",
    "report_to",
    "accelerator_config",
    "debug",
    "pad_to_multiple_of",
    "dataloader_pin_memory",
)
"""Fields that TRL and transformers fill in themselves."""


def declared(args: Any, kl: KLTerm | None) -> KLConfig:
    """The configuration that a trainer is built with.

    Args:
        args: a `KLConfig`, or None for its defaults.
        kl: the KL term, or None if the fields of `args` declare it. Those fields are at their defaults beside a
            term, or agree with it. The term is written into a copy of `args`.

    Returns:
        A `KLConfig` whose objective is the declared one.
    """
    args = KLConfig("klgrad-run") if args is None else args
    _check_class(args)
    if kl is None:
        return args
    _check_term(kl, args)
    found = copy(args)
    for name, value in fields_of(kl).items():
        setattr(found, name, value)
    found.declare(stacklevel=4)
    return found


def _check_class(args: Any) -> None:
    """Refuse anything but a `KLConfig`; for another configuration of TRL's, show what to write instead."""
    if isinstance(args, KLConfig):
        return
    name, known = type(args).__name__, KLConfig.__dataclass_fields__
    given = changed(args) if hasattr(type(args), "__dataclass_fields__") else dict(args) if _is_dict(args) else {}
    beta = given.pop("beta", None)
    kept = {k: v for k, v in given.items() if k in known and k not in DERIVED}
    same = {"kl_coef": beta, "kl_level": "token"} if beta else {}
    written = [f"{k}={_written(v)}" for k, v in same.items()]
    written += [f"{k}={_written(v)}" for k, v in kept.items()]
    remedy = f"write KLConfig({', '.join(written)}), from klgrad.trl: it declares which KL is meant"
    if beta:
        remedy += (
            "; `kl_coef` is TRL's `beta`, whose KL is token by token; kl_level='sequence', the default, is the KL "
        )
        remedy += "between completions"
    raise MeaningError("a KLConfig", f"a {name}", remedy)


def _is_dict(args: Any) -> bool:
    return isinstance(args, dict) and all(isinstance(name, str) for name in args)


def _check_term(kl: Any, args: KLConfig) -> None:
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
    other = {name: value for name, value in changed_fields.items() if not _agree(name, value, declared.get(name))}
    if other:
        fields = ", ".join(f"{name}={value!r}" for name, value in other.items())
        raise MeaningError(
            "one KL, declared by `kl` or by fields of the KLConfig; fields beside `kl` must agree with it",
            f"kl={kl.name} and {fields}",
            f"drop `kl`, or leave out {', '.join(f'`{name}`' for name in other)}",
        )


def _agree(name: str, value: Any, declared: Any) -> bool:
    if name == "kl_ratio_bound" and declared is not None:
        return bound_of(value) == bound_of(declared)  # `truncate:2` is `truncate:2.0`
    return bool(value == declared)


def _written(value: Any) -> str:
    return repr(getattr(value, "value", value))
