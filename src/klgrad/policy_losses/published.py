"""Policy losses of papers, with the constants that they recommend."""

import torch
from torch import Tensor

from .entry import Does, policy_loss
from .reductions import (
    apart_from_others,
    centred,
    clipped,
    geometric_ratio,
    mean_over_tokens,
    mean_per_completion,
    normalised,
    sum_per_completion,
    token_ratio,
)

DISTILS = Does("forward-kl-sampler-sequence", "climbs forward-kl-sampler-sequence", "policy-gradient-uncorrected")
"""No ratio at all: the sampler is distilled where the advantage is positive, and avoided where it is negative."""

IN_PART = Does("unknown", "unknown", "unknown")
"""A bounded ratio: part of the drift is left, and the update is that of no known objective."""

CENTRED_IN_PART = Does("nothing", "nothing", "unknown")
"""As `IN_PART`, with advantages that are centred within groups, so that a constant advantage has no effect."""


@policy_loss("Williams 1992, doi 10.1007/BF00992696", off_policy=DISTILS)
def reinforce(logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """The advantage times the log-prob, without a ratio."""
    return sum_per_completion(-advantages * logp, mask)


@policy_loss("arXiv 1707.06347", off_policy=IN_PART)
def ppo_clip(logp: Tensor, old_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """PPO's clipped ratio (0.2), averaged over the tokens of the batch."""
    return mean_over_tokens(clipped(token_ratio(logp, old_logp), advantages, 0.2, 0.2), mask)


@policy_loss("arXiv 2402.03300", off_policy=CENTRED_IN_PART)
def grpo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """PPO's clipped ratio; rewards centred and divided within groups; mean per completion."""
    return mean_per_completion(clipped(token_ratio(logp, old_logp), normalised(rewards, group), 0.2, 0.2), mask)


@policy_loss("arXiv 2503.14476", off_policy=CENTRED_IN_PART)
def dapo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """GRPO with a higher upper clip (0.28) and a mean over the tokens of the batch."""
    return mean_over_tokens(clipped(token_ratio(logp, old_logp), normalised(rewards, group), 0.2, 0.28), mask)


@policy_loss("arXiv 2503.20783", off_policy=CENTRED_IN_PART)
def dr_grpo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """GRPO without the division by the deviation and by the length."""
    return sum_per_completion(clipped(token_ratio(logp, old_logp), centred(rewards, group), 0.2, 0.2), mask)


@policy_loss("arXiv 2402.14740", off_policy=Does("nothing", "nothing", "policy-gradient-uncorrected"))
def rloo(logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """REINFORCE with the mean reward of the other completions of the group as the baseline."""
    return sum_per_completion(-apart_from_others(rewards, group) * logp, mask)


@policy_loss("arXiv 2507.18071", off_policy=CENTRED_IN_PART)
def gspo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """The geometric mean of the ratios of a completion, clipped at 3e-4 and 4e-4; rewards as in GRPO."""
    ratio = geometric_ratio(logp, old_logp, mask)
    return clipped(ratio, normalised(rewards, group), 3e-4, 4e-4).mean()


@policy_loss("arXiv 2506.13585, bound of 5 as in arXiv 2510.13786", off_policy=CENTRED_IN_PART)
def cispo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """The ratio truncated at 5, held fixed, times the log-prob; rewards as in GRPO; mean over tokens."""
    ratio = token_ratio(logp, old_logp).clamp(max=5.0).detach()
    return mean_over_tokens(-ratio * normalised(rewards, group) * logp, mask)


@policy_loss("arXiv 2602.04879", off_policy=IN_PART)
def dppo(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """The ratio, without the tokens whose probability moved by over 0.2 in the direction of the update."""
    moved = (logp.exp() - behavior_logp.exp()).detach()
    keep = torch.where(advantages > 0, moved <= 0.2, moved >= -0.2)
    return mean_over_tokens(-token_ratio(logp, behavior_logp) * advantages * keep, mask)
