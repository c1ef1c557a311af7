"""The placements of an estimator, as losses per token, (B, T); the cells are made of these."""

from collections.abc import Callable

from torch import Tensor

from ..core import credit
from ..core.estimators import Estimator
from ..core.importance import token_ratio
from ..core.rollout import Rollout


def log_ratio(rollout: Rollout) -> Tensor:
    """l_t with its gradient, for estimators that are differentiated."""
    return rollout.logp - rollout.ref_logp


def as_loss(estimator: Estimator | Callable[[Tensor], Tensor], rollout: Rollout) -> Tensor:
    """The estimator differentiated."""
    return estimator(log_ratio(rollout))


def on_score(coefficient: Tensor, rollout: Rollout) -> Tensor:
    """A detached coefficient on the score of each token, as policy-gradient training puts it there."""
    return coefficient.detach() * rollout.logp


def in_reward(estimator: Estimator, rollout: Rollout) -> Tensor:
    """The estimator's sum over the completion on the score of each of its tokens."""
    return on_score(credit.whole(estimator.value(rollout.log_ratio), rollout.mask), rollout)


def in_reward_leave_one_out(estimator: Estimator, rollout: Rollout) -> Tensor:
    """`in_reward`, minus the mean of the other completions of the group."""
    total = estimator.value(rollout.log_ratio).sum(-1)
    return on_score((total - credit.leave_one_out(total, rollout.group))[:, None], rollout)


def live_ratio(rollout: Rollout) -> Tensor:
    """π/μ of each token with its gradient, as `exp(logp - old_logp)` has in a trainer."""
    ratio = token_ratio(rollout)
    return ratio + ratio * (rollout.logp - rollout.logp.detach())
