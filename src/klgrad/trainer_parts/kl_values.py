"""Values of the KL to the reference that a trainer logs or adapts β by."""

from torch import Tensor

from ..core.estimators import k3
from ..core.importance import ImportanceWeighting, token_ratio
from ..core.rollout import Rollout
from ..core.term import KLTerm


def token_values(rollout: Rollout) -> Tensor:
    """(B, T) what the KL adds to the value of the loss, detached: exact, or k3 weighted by the token's ratio."""
    if rollout.token_reverse_kl is not None:
        return rollout.token_reverse_kl.detach()
    value = k3.value(rollout.log_ratio)
    return value if rollout.behavior_logp is None else value * token_ratio(rollout)


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
