"""What the integrations into TRL and verl share: the coefficient β, bounds as text, and KL values to report."""

import math
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from .core.estimators import forward_k3, k3
from .core.importance import Bound, Clip, ImportanceWeighting, Mask, Truncate, sequence_ratio, token_ratio
from .core.rollout import Rollout
from .core.term import KLTerm
from .errors import MeaningError

# β: constant, or adapted so that the KL stays near a target.

LARGEST_ERROR = 0.2
"""The relative error is clipped to ±20%, as Ziegler et al. (2019) do, so that one batch changes β little."""


@dataclass
class AdaptiveCoefficient:
    """β grows while the KL is above its target and shrinks while it is below.

    Attributes:
        value: the present β.
        target: the KL to hold, or None for a constant β.
        horizon: updates over which β changes by a factor of e while the relative error is 1.

    Reference:
        Ziegler et al., Fine-Tuning Language Models from Human Preferences (2019), section 2.2.
    """

    value: float
    target: float | None
    horizon: int

    def update(self, kl: float | None) -> None:
        """Adapt β after one optimizer step.

        Args:
            kl: an unbiased estimate of the KL in the unit of the target; None if the step had no live token.
        """
        if self.target is None or kl is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= math.exp(error / self.horizon)

    def state_dict(self) -> dict[str, Any]:
        """The present β."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with an adapted β. A constant β is a setting, which a resumed run may change."""
        if self.target is not None:
            self.value = state["value"]


# Bounds of importance ratios as the text of a setting.


def bound_of(text: str, setting: str = "kl_ratio_bound") -> Bound | None:
    """Parse `truncate:2`, `clip:0.5:2`, `mask:0.5:2` or `none`.

    Args:
        text: the bound.
        setting: the name of the setting, for the error.
    """
    kind, *numbers = text.split(":")
    kinds = {"truncate": (Truncate, 1), "clip": (Clip, 2), "mask": (Mask, 2)}
    if text == "none":
        return None
    try:
        make, count = kinds[kind]
        values = [float(x) for x in numbers]
        if len(values) != count:
            raise ValueError
    except (KeyError, ValueError):
        raise MeaningError(
            f"`{setting}` as truncate:MAX, clip:LOW:HIGH, mask:LOW:HIGH or none",
            repr(text),
            "write truncate:2, for example",
        ) from None
    return make(*values)


def written(bound: Bound | None) -> str:
    """The text that `bound_of` reads as this bound."""
    if bound is None:
        return "none"
    return ":".join([type(bound).__name__.lower(), *(repr(getattr(bound, f.name)) for f in fields(bound))])


# Values of the KL to the reference that a trainer logs or adapts β by.


def token_values(term: KLTerm, rollout: Rollout) -> Tensor:
    """(B, T) what the term adds to the value of the loss, detached: an estimate of its divergence, in its direction.

    It is exact, or k3 weighted by the token's ratio. Between completions the forward KL is no sum of its tokens': the
    estimate of a completion is spread evenly over its tokens.
    """
    if term.estimator == "exact":
        return term.family.full_kl(rollout).detach()
    if term.divergence == "reverse":
        return weighted_k3(rollout)
    if term.level == "token":
        return token_ratio(rollout) * forward_k3.value(rollout.log_ratio)
    total = sequence_ratio(rollout) * forward_k3.value(rollout.log_ratio.sum(-1, keepdim=True))
    return rollout.mask * total / rollout.lengths.clamp(min=1)[:, None]


def weighted_k3(rollout: Rollout) -> Tensor:
    """(B, T) k3 of each token, weighted by its ratio to the sampler; TRL logs its mean as `kl`."""
    return token_ratio(rollout) * k3.value(rollout.log_ratio)


def total_reverse_kl(rollout: Rollout, weighting: ImportanceWeighting | None, *, exact: bool) -> Tensor:
    """KL(π‖ref) summed over the completions, unbiased unless a bound is active.

    Args:
        rollout: the batch.
        weighting: the declared importance weights; None for on-policy.
        exact: sum over the vocabulary by `Rollout.token_reverse_kl`, instead of estimating by k3.
    """
    if weighting is not None and weighting.ratio == "token":  # on the sampler's prefixes, like the term itself
        ratio = token_ratio(rollout)
        return ((ratio if weighting.bound is None else weighting.bound(ratio)) * k3.value(rollout.log_ratio)).sum()
    term = KLTerm(estimator="exact" if exact else "k1_k3", weighting=weighting)
    return term(rollout).value.mean * len(rollout.mask)
