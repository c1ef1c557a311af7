"""Values of the KL to the reference that a trainer logs or adapts β by."""

from torch import Tensor

from ..core.estimators import forward_k3, k3
from ..core.importance import ImportanceWeighting, sequence_ratio, token_ratio
from ..core.rollout import Rollout
from ..core.term import KLTerm


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
