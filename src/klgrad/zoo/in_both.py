"""Estimators in both places: in the reward and as a loss."""

from torch import Tensor

from ..core.estimators import k1, k3
from ..core.rollout import Rollout
from .cell import as_loss, in_reward, in_reward_leave_one_out, on_score, token_loss


@token_loss("reverse-kl-sequence", "sum-of-targets")
def k1_both(rollout: Rollout) -> Tensor:
    """k1 in the reward and as loss: the loss adds noise of mean zero.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `sum-of-targets` off-policy.
    Requires: y ~ π.
    """
    return in_reward(k1, rollout) + as_loss(k1, rollout)


@token_loss("reverse-kl-sequence", "unknown")
def k3_both(rollout: Rollout) -> Tensor:
    """k3 in the reward and as loss, full weight each.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return in_reward(k3, rollout) + as_loss(k3, rollout)


@token_loss("reverse-kl-sequence", "unknown")
def k3_both_half(rollout: Rollout) -> Tensor:
    """k3 in the reward and as loss, half weight each: half the strength.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy, at scale 1/2; `unknown` off-policy.
    Requires: y ~ π.
    """
    return (in_reward(k3, rollout) + as_loss(k3, rollout)) / 2


@token_loss("reverse-kl-token", "squared-token")
def k3_both_token(rollout: Rollout) -> Tensor:
    """k3 of this token alone on its score, and as loss: coefficient l, with exp cancelling exp.

    Estimates: KL(π‖ref).
    Gradient: `reverse-kl-token` on-policy; `squared-token` off-policy.
    Requires: y ~ π.
    """
    return on_score(k3.value(rollout.log_ratio), rollout) + as_loss(k3, rollout)


@token_loss("reverse-kl-sequence", "unknown", compares_completions=True)
def k3_both_leave_one_out(rollout: Rollout) -> Tensor:
    """k3 in the reward, minus the mean of the others in the group (RLOO), and as loss.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `unknown` off-policy.
    Requires: y ~ π; groups of 2 or more.
    """
    return in_reward_leave_one_out(k3, rollout) + as_loss(k3, rollout)
