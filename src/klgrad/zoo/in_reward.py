"""Estimators in the reward: the detached value on the score, where policy-gradient training would put it."""

from torch import Tensor

from ..core import credit
from ..core.estimators import k1, k2, k3
from ..core.importance import ImportanceWeighting, sequence_ratio
from ..core.result import reduce
from ..core.rollout import Rollout
from ..core.term import KLTerm, Remedy
from .cell import AFTER_DIVISION, LEAVE_ONE_OUT, in_reward, in_reward_leave_one_out, on_score, token_loss

DISCOUNT = 0.9
"""Discount of the discounted cells."""

STD_EPSILON = 1e-4
"""Added to a group's standard deviation before dividing by it, as GRPO implementations do."""


@token_loss("reverse-kl-sequence", "squared-sequence")
def k1_reward(rollout: Rollout) -> Tensor:
    """k1 summed over the completion, on every token's score: RLHF's classic penalty.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `squared-sequence` off-policy.
    Requires: y ~ π.
    """
    return in_reward(k1, rollout)


@token_loss("reverse-kl-sequence", "unknown")
def k1_reward_to_go(rollout: Rollout) -> Tensor:
    """k1 of this and all later tokens, on the token's score.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return on_score(credit.to_go(rollout.log_ratio, rollout.mask), rollout)


@token_loss("reverse-kl-token", "squared-token")
def k1_advantage(rollout: Rollout) -> Tensor:
    """k1 of this token alone, on its score: on-policy distillation as commonly run (discount 0).

    Estimates: KL(π‖ref).
    Gradient: `reverse-kl-token` on-policy; `squared-token` off-policy.
    Requires: y ~ π.
    """
    return on_score(rollout.log_ratio, rollout)


@token_loss("unknown", "unknown", instead=Remedy(use=("k1-reward", KLTerm())))
def k2_reward(rollout: Rollout) -> Tensor:
    """k2 in the reward.

    Estimates: KL(π‖ref), biased.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return in_reward(k2, rollout)


@token_loss(
    "sum-of-targets",
    "unknown",
    instead=Remedy(use=("k1-reward", KLTerm(estimator="k1_k3")), why="k1_k3 has the low variance of k3"),
)
def k3_reward(rollout: Rollout) -> Tensor:
    """k3 in the reward: reverse minus forward KL for one token, which cancel near ref.

    Estimates: KL(π‖ref) of completions.
    Gradient: `sum-of-targets` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return in_reward(k3, rollout)


@token_loss("reverse-kl-sequence", "sum-of-targets", compares_completions=True)
def k1_reward_leave_one_out(rollout: Rollout) -> Tensor:
    """k1 in the reward, minus the mean of the others in the group (RLOO).

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `sum-of-targets` off-policy.
    Requires: y ~ π; groups of 2 or more.
    """
    return in_reward_leave_one_out(k1, rollout)


@token_loss("sum-of-targets", "unknown", instead=LEAVE_ONE_OUT, compares_completions=True)
def k3_reward_leave_one_out(rollout: Rollout) -> Tensor:
    """k3 in the reward, minus the mean of the others in the group (RLOO).

    Estimates: KL(π‖ref) of completions.
    Gradient: `sum-of-targets` on-policy; `unknown` off-policy.
    Requires: y ~ π; groups of 2 or more.
    """
    return in_reward_leave_one_out(k3, rollout)


@token_loss("reverse-kl-sequence", "sum-of-targets", instead=LEAVE_ONE_OUT, compares_completions=True)
def k1_reward_group_mean(rollout: Rollout) -> Tensor:
    """k1 in the reward, minus the mean of the whole group, itself included.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy, at scale 1 - 1/n; `sum-of-targets` off-policy.
    Requires: y ~ π; groups of 2 or more.
    """
    total = rollout.log_ratio.sum(-1)
    return on_score(minus_group_mean(total, rollout)[:, None], rollout)


@token_loss(
    "unknown",
    "unknown",
    instead=AFTER_DIVISION,
    compares_completions=True,
)
def k1_reward_group_std(rollout: Rollout) -> Tensor:
    """k1 in the reward, centred and divided by the group's standard deviation (GRPO's advantage).

    Estimates: KL(π‖ref) of completions.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π; groups of 2 or more.
    """
    centred = minus_group_mean(rollout.log_ratio.sum(-1), rollout)
    squares, size = credit.group_total(centred.square(), rollout.group)
    deviation = (squares / (size - 1)).sqrt()
    return on_score((centred / (deviation + STD_EPSILON))[:, None], rollout)


@token_loss(
    "unknown",
    "unknown",
    instead=Remedy(use=(KLTerm(discount=0.9),), why="it subtracts nothing per token"),
    couples_groups=True,
)
def k1_token_mean_discounted(rollout: Rollout) -> Tensor:
    """k1 minus the batch's mean per token, then discounted: the subtracted mean pays for length.

    Estimates: KL(π‖ref), discounted.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    mean = reduce(rollout.log_ratio, rollout, "token")
    return on_score(credit.to_go(rollout.log_ratio - mean, rollout.mask, DISCOUNT), rollout)


@token_loss(
    "reverse-kl-sequence",
    "sum-of-targets",
    instead=Remedy(use=(KLTerm(weighting=ImportanceWeighting("prefix", bound=None)),)),
)
def stale_k1_reward(rollout: Rollout) -> Tensor:
    """k1 of the *sampler* against ref, in the reward, under the sequence ratio: frozen at the old policy.

    Estimates: KL(μ‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `sum-of-targets` off-policy.
    Requires: `behavior_logp`.
    """
    frozen = (rollout.sampler_logp - rollout.ref_logp).sum(-1, keepdim=True)
    return on_score(sequence_ratio(rollout) * frozen, rollout)


def minus_group_mean(per_sequence: Tensor, rollout: Rollout) -> Tensor:
    """Values minus their group's mean, themselves included."""
    total, size = credit.group_total(per_sequence, rollout.group)
    return per_sequence - total / size
