"""`KLConfig`: TRL's `GRPOConfig`, with fields that declare the KL."""

from dataclasses import dataclass, field
from typing import Any, get_args

from trl.trainer.grpo_config import GRPOConfig

from ..core.families.choices import CHOICES
from ..core.importance import Ratio
from . import config_checks as checks
from .config_checks import PLACEMENTS, REDUCTIONS, TAILS, UNITS
from .meaning_notes import warn_of
from .objective import Objective, objective_of


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
        checks.fields(self)
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
