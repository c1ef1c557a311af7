"""The settings under `klgrad` in verl's configuration: their names, types and defaults."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from ..core.families.choices import CHOICES
from ..core.importance import Ratio
from ..errors import MeaningError, UnknownNameError

NODE = "klgrad"
"""The name of the node in verl's configuration."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field per setting; `docs/verl.md` explains each.

    Attributes:
        coef: β, the weight of the KL. With `target`, its starting value.
        placement: `loss` adds the term to the policy loss in the workers; `advantage` subtracts its coefficient from
            the advantages after verl has normalised them.
        divergence: `reverse` is KL(π‖ref), `forward` is KL(ref‖π).
        level: `sequence` or `token`.
        estimator: `k1`, `k1_k3`, or `k3` for the forward KL.
        discount: g in [0, 1] on the later tokens, at sequence level.
        baseline: `none` or `leave_one_out`, over the completions of a prompt.
        ratio: importance ratio to the sampler: `none`, `token`, `prefix` or `sequence`.
        ratio_bound: `truncate:MAX`, `clip:LOW:HIGH`, `mask:LOW:HIGH` or `none`.
        sampler: whose log-probs the ratio divides by: `rollout`, the rollout engine, or `old`, the policy before the
            update as the trainer computes it.
        influence_bound: c > 0 clips each token's own part to [-c, c].
        reduction: `policy`, as `loss_agg_mode` reduces the policy loss, or `sequence`: summed over each completion,
            averaged over completions.
        reference: `ref`, verl's reference model, or `teacher`, the teacher of verl's distillation.
        target: adapt β so that KL(π‖ref) stays near this value; None for a constant β.
        target_unit: nats per `sequence` or per `token`.
        horizon: steps over which β changes by a factor of e if the relative error is 1.
    """

    coef: float = 0.05
    placement: str = "loss"
    divergence: str = "reverse"
    level: str = "sequence"
    estimator: str = "k1"
    discount: float = 1.0
    baseline: str = "none"
    ratio: str = "none"
    ratio_bound: str = "truncate:2"
    sampler: str = "rollout"
    influence_bound: float | None = None
    reduction: str = "policy"
    reference: str = "ref"
    target: float | None = None
    target_unit: str = "sequence"
    horizon: int = 50

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise MeaningError(
                    f"`{NODE}.{name}` in {allowed}", repr(getattr(self, name)), f"write {NODE}.{name}={allowed[0]}"
                )
        for name in ("coef", "discount", "influence_bound", "target", "horizon"):
            value = getattr(self, name)
            if not _is_number(value) and not (value is None and name in OPTIONAL):
                raise MeaningError(f"`{NODE}.{name}` as a finite number", repr(value), f"write {NODE}.{name}=1")
        if self.coef < 0:
            raise MeaningError(f"`{NODE}.coef` of 0 or more", f"{self.coef:g}", "write 0 for no KL")
        if (self.target is not None and self.target <= 0) or self.horizon <= 0:
            raise MeaningError(
                f"`{NODE}.target` and `{NODE}.horizon` above 0", f"{self.target} and {self.horizon}", "drop `target`"
            )


ALLOWED: dict[str, tuple[str, ...]] = {
    "placement": ("loss", "advantage"),
    "divergence": tuple(CHOICES["divergence"]),
    "level": tuple(CHOICES["level"]),
    "estimator": tuple(CHOICES["estimator"]),
    "baseline": tuple(CHOICES["baseline"]),
    "ratio": ("none", *get_args(Ratio)),
    "sampler": ("rollout", "old"),
    "reduction": ("policy", "sequence"),
    "reference": ("ref", "teacher"),
    "target_unit": ("sequence", "token"),
}
"""The values of the settings that are words."""

OPTIONAL = ("influence_bound", "target")
"""The settings that are numbers or None."""


def settings_of(node: Mapping[str, Any]) -> Settings:
    """Read the node.

    Raises:
        UnknownNameError: for a setting that does not exist, with near matches.
        MeaningError: for a value that is not allowed.
    """
    known = [f.name for f in fields(Settings)]
    for name in node:
        if name not in known:
            raise UnknownNameError(f"setting of `{NODE}`", str(name), known)
    return Settings(**{str(name): value for name, value in node.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
