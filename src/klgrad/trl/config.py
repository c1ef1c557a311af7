"""`KLConfig`: TRL's `GRPOConfig`, with the KL declared by what it means."""

from dataclasses import dataclass, field
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from . import config_checks as checks
from .config_checks import PLACEMENTS, REDUCTIONS, TAILS, UNITS
from .meaning_notes import warn_of
from .objective import Objective, objective_of


@dataclass
class KLConfig(GRPOConfig):
    """Everything of `GRPOConfig`; its own `beta` stays 0, and the KL is told by the fields named `kl_...`."""

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS

    kl_coef: float = field(
        default=0.05, metadata={"help": "β: the weight of the KL. With `kl_target`, where it starts."}
    )
    kl_placement: str = field(
        default="loss",
        metadata={
            "help": "`loss`: beside the policy loss. `advantage`: subtracted from the advantages after their "
            "normalisation. `reward`: in the reward, where a standard deviation rescales β.",
            "choices": list(PLACEMENTS),
        },
    )
    kl_divergence: str = field(
        default="reverse",
        metadata={"help": "`reverse` is KL(π‖ref), `forward` is KL(ref‖π).", "choices": ["reverse", "forward"]},
    )
    kl_level: str = field(
        default="sequence",
        metadata={
            "help": "`sequence`: the gradient of the divergence between distributions over completions. `token`: "
            "visited prefixes held fixed.",
            "choices": ["sequence", "token"],
        },
    )
    kl_estimator: str = field(
        default="k1",
        metadata={
            "help": "`k1`, `k1_k3` (the future by k3), `k3` (forward KL), or `exact` (the full vocabulary).",
            "choices": ["k1", "k1_k3", "k3", "exact"],
        },
    )
    kl_top_k: int | None = field(
        default=None,
        metadata={
            "help": "With `exact`: sum over this many of the reference's likeliest entries only, and treat the rest by "
            "`kl_tail`; what a teacher that is stored or served can tell."
        },
    )
    kl_tail: str = field(
        default="sampled",
        metadata={
            "help": "What `kl_top_k` leaves out: `sampled`, by the sampled token, unbiased unless `kl_ratio_bound` "
            "bites; `lump`, as one entry, a "
            "lower bound without noise.",
            "choices": list(TAILS),
        },
    )
    kl_memory: int = field(
        default=256,
        metadata={"help": "MiB for tiles of logits with `exact`; more is a little faster, up to all logits of both."},
    )
    kl_discount: float = field(default=1.0, metadata={"help": "g in [0, 1] on the future, at sequence level."})
    kl_baseline: str = field(
        default="none",
        metadata={
            "help": "`leave_one_out`: of the completions of a prompt in one micro-batch of all processes, which should "
            "hold whole groups.",
            "choices": ["none", "leave_one_out"],
        },
    )
    kl_ratio: str = field(
        default="none",
        metadata={
            "help": "Importance ratio on the KL, to what really sampled: `token`, `prefix`, `sequence`, or `none`.",
            "choices": ["none", "token", "prefix", "sequence"],
        },
    )
    kl_ratio_bound: str = field(
        default="truncate:2",
        metadata={"help": "`truncate:MAX`, `clip:LOW:HIGH`, `mask:LOW:HIGH`, or `none`."},
    )
    kl_influence_bound: float | None = field(
        default=None, metadata={"help": "c > 0 clips each token's own part to [-c, c], without a dead zone."}
    )
    kl_reduction: str = field(
        default="policy",
        metadata={
            "help": "`policy`: as `loss_type` reduces the policy loss, so that β compares with TRL's. `sequence`: "
            "summed over the completion, averaged over completions.",
            "choices": list(REDUCTIONS),
        },
    )
    kl_cell: str | None = field(
        default=None,
        metadata={"help": "Instead of all this, a loss of klgrad.zoo by name, sound or not, for study."},
    )
    kl_target: float | None = field(
        default=None, metadata={"help": "Adapt β so that KL(π‖ref) stays near this, in the unit of `kl_target_unit`."}
    )
    kl_target_unit: str = field(
        default="sequence",
        metadata={"help": "Nats per completion, or per token.", "choices": list(UNITS)},
    )
    kl_horizon: int = field(
        default=50, metadata={"help": "Updates over which β moves by a factor of e for an error of the target's size."}
    )
    rollout_lag: int = field(
        default=0,
        metadata={
            "help": "Train on completions that are this many updates old, as asynchronous training does; the first "
            "are repeated until there are some that old."
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
        self.objective: Objective = objective_of(self)
        checks.staleness(self)
        warn_of(self, stacklevel=3)  # where the configuration is written

    def to_dict(self) -> dict[str, Any]:
        """Without the objective, which the other fields tell."""
        return {name: value for name, value in super().to_dict().items() if name != "objective"}
