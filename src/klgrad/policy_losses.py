"""Policy losses as published, by name: for study and for the audit of whole losses.

Each is one short function, written from the published formula, with its source and with the parts that it is made of:
the ratio, its bounds, what becomes of the advantages, and the unit. A test compares them with the audit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .core.credit import group_total
from .errors import UnknownNameError

__all__ = ["POLICY_LOSSES", "PolicyLoss", "PolicyParts", "Weight", "get"]

# What a policy loss is made of, and `PolicyLoss`: a published one with its parts.

Ratio = Literal["none", "token", "prefix", "sequence", "mean", "other"]
"""π/μ of the token, of the tokens so far, of the completion, or its geometric mean over the completion's tokens."""


@dataclass(frozen=True)
class Weight:
    """What a token's score weighs per unit of advantage, as a function of the ratio r.

    Attributes:
        inside: `r`, `1`, or `other` for any other function.
        low, high: the ratios beyond which it is constant, or None.
        below, above: its values there, relative to that at r = 1: 0 for a clip as in PPO and for a mask.
        factor: the weight at r = 1. For advantages of the other sign it is 1.

    Example:
        >>> import torch
        >>> from klgrad.policy_losses import Weight
        >>> truncated = Weight(high=2.0, above=2.0)
        >>> truncated(torch.tensor([0.5, 1.0, 8.0]).log()).tolist()
        [0.5, 1.0, 2.0]
    """

    inside: Literal["r", "1", "other"] = "r"
    low: float | None = None
    below: float = 0.0
    high: float | None = None
    above: float = 0.0
    factor: float = 1.0

    def __call__(self, log_ratio: Tensor) -> Tensor:
        """The weight at log r; it is not known for `other`."""
        value = log_ratio.exp() if self.inside == "r" else torch.ones_like(log_ratio)
        if self.low is not None:
            value = torch.where(log_ratio < math.log(self.low), self.below, value)
        if self.high is not None:
            value = torch.where(log_ratio > math.log(self.high), self.above, value)
        return self.factor * value

    @property
    def is_bounded(self) -> bool:
        """Whether it is constant beyond some ratio."""
        return self.low is not None or self.high is not None


ONE, R = Weight("1"), Weight("r")
"""Without a ratio, and with a ratio that has no bounds."""


@dataclass(frozen=True)
class PolicyParts:
    """What a policy loss is made of: its update of a token is its advantage times its weight, divided as `unit` says.

    Attributes:
        ratio: what the weight is a function of.
        positive, negative: the weight where the advantage is positive, and where it is negative.
        baseline: what is subtracted from the advantages: `none`, `group-mean`, `leave-one-out` (the mean of the others
            of the group), `batch-mean`, `batch-leave-one-out`, or `other` where the advantages enter in another way.
        divided: by whose standard deviation they are divided: `none`, `group` or `batch`.
        unit: `sum` over the completion, `completion-mean`, `token-mean` over the batch, `fixed-length`, or `other`.
        centred_score: whether the mean score of the sampler at each prefix is subtracted from the score.
        depends_on: what else the weight depends on: `probability`, where it is a function of π itself too;
            `several ratios`; `vocabulary`; empty if nothing or something else.

    Example:
        >>> from klgrad import policy_losses
        >>> policy_losses.get("dapo").parts.positive.high
        1.28
    """

    ratio: Ratio = "none"
    positive: Weight = ONE
    negative: Weight = ONE
    baseline: str = "none"
    divided: str = "none"
    unit: str = "sum"
    centred_score: bool = False
    depends_on: str = ""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss as published.

    Attributes:
        name: the name that `klgrad.policy_losses.get` takes.
        loss: the function; its parameters are named as the tensors of `klgrad.audit`, and it returns a scalar.
        source: where it was published.
        parts: what it is made of.

    Example:
        >>> import torch
        >>> from klgrad import policy_losses
        >>> entry = policy_losses.get("reinforce")
        >>> logp, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> entry.loss(logp=logp, mask=mask, advantages=torch.full((1, 2), 0.5))
        tensor(1.5000)
    """

    name: str
    loss: Callable[..., Tensor]
    source: str
    parts: PolicyParts

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (self.loss.__doc__ or "").split("\n")[0]


def policy_loss(source: str, parts: PolicyParts) -> Callable[[Callable[..., Tensor]], PolicyLoss]:
    """Make a `PolicyLoss` of a function.

    Args:
        source: where the loss was published.
        parts: what it is made of.

    Returns:
        A decorator. The entry is named as the function, with `-` for `_`.
    """
    return lambda function: PolicyLoss(function.__name__.replace("_", "-"), function, source, parts)


# The means over tokens and completions, and the advantages within a group, that the published losses use.

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""


def sum_per_completion(per_token: Tensor, mask: Tensor) -> Tensor:
    """The sum over the tokens of each completion, averaged over completions."""
    return torch.where(mask, per_token, 0).sum(-1).mean()


def mean_per_completion(per_token: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens of each completion, averaged over completions; 0 for one without tokens."""
    return (torch.where(mask, per_token, 0).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def mean_over_tokens(per_token: Tensor, mask: Tensor) -> Tensor:
    """The mean over all tokens of the batch."""
    return torch.where(mask, per_token, 0).sum() / mask.sum().clamp(min=1)


def token_ratio(logp: Tensor, sampled_logp: Tensor) -> Tensor:
    """(B, T) π/μ of each token; a padded token may have any value."""
    return (logp - sampled_logp).exp()


def sequence_ratio(logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) π/μ of each completion."""
    return torch.where(mask, logp - sampled_logp, 0).sum(-1, keepdim=True).exp()


def geometric_ratio(logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) the geometric mean of π/μ over the tokens of each completion; 1 for one without tokens."""
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return (torch.where(mask, logp - sampled_logp, 0).sum(-1, keepdim=True) / length).exp()


def centred(rewards: Tensor, group: Tensor) -> Tensor:
    """(B, 1) the rewards minus the mean of their group."""
    total, size = group_total(rewards, group)
    return (rewards - total / size)[:, None]


def minus_the_others(rewards: Tensor, group: Tensor) -> Tensor:
    """(B, 1) the rewards minus the mean of the others of their group."""
    size = group_total(rewards, group)[1][:, None]
    return centred(rewards, group) * size / (size - 1)


def normalised(rewards: Tensor, group: Tensor) -> Tensor:
    """(B, 1) the rewards minus the mean of their group, divided by the standard deviation of the group."""
    advantages = centred(rewards, group)
    squares, size = group_total(advantages**2, group)
    return advantages / ((squares / (size - 1)).sqrt() + EPSILON)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's pessimistic objective, as a loss: -min(r A, clip(r, 1 - low, 1 + high) A)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


# Policy losses of papers, with the constants that they recommend.

PPO, HIGHER = (Weight(high=1.2), Weight(low=0.8)), (Weight(high=1.28), Weight(low=0.8))
"""PPO's clip, which is on one side for each sign of the advantage, and that of DAPO."""


def both(weight: Weight) -> tuple[Weight, Weight]:
    """One weight for advantages of either sign."""
    return weight, weight


@policy_loss("Williams 1992, doi 10.1007/BF00992696", PolicyParts())
def reinforce(logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """The advantage times the log-prob, without a ratio."""
    return sum_per_completion(-advantages * logp, mask)


@policy_loss("arXiv 1707.06347", PolicyParts("token", *PPO, unit="token-mean"))
def ppo_clip(logp: Tensor, old_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """PPO's clipped ratio (0.2), averaged over the tokens of the batch."""
    return mean_over_tokens(clipped(token_ratio(logp, old_logp), advantages, 0.2, 0.2), mask)


@policy_loss("arXiv 2402.03300", PolicyParts("token", *PPO, "group-mean", "group", "completion-mean"))
def grpo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """PPO's clipped ratio; rewards centred and divided within groups; mean per completion."""
    return mean_per_completion(clipped(token_ratio(logp, old_logp), normalised(rewards, group), 0.2, 0.2), mask)


@policy_loss("arXiv 2503.14476", PolicyParts("token", *HIGHER, "group-mean", "group", "token-mean"))
def dapo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """GRPO with a higher upper clip (0.28) and a mean over the tokens of the batch."""
    return mean_over_tokens(clipped(token_ratio(logp, old_logp), normalised(rewards, group), 0.2, 0.28), mask)


@policy_loss("arXiv 2503.20783", PolicyParts("token", *PPO, "group-mean"))
def dr_grpo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """GRPO without the division by the deviation and by the length."""
    return sum_per_completion(clipped(token_ratio(logp, old_logp), centred(rewards, group), 0.2, 0.2), mask)


@policy_loss("arXiv 2402.14740", PolicyParts(baseline="leave-one-out"))
def rloo(logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """REINFORCE with the mean reward of the other completions of the group as the baseline."""
    return sum_per_completion(-minus_the_others(rewards, group) * logp, mask)


@policy_loss(
    "arXiv 2507.18071",
    PolicyParts("mean", Weight(high=1.0004), Weight(low=0.9997), "group-mean", "group", "completion-mean"),
)
def gspo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """The geometric mean of the ratios of a completion, clipped at 3e-4 and 4e-4; rewards as in GRPO."""
    ratio = geometric_ratio(logp, old_logp, mask)
    return clipped(ratio, normalised(rewards, group), 3e-4, 4e-4).mean()


@policy_loss(
    "arXiv 2506.13585, bound of 5 as in arXiv 2510.13786",
    PolicyParts("token", *both(Weight(high=5.0, above=5.0)), "group-mean", "group", "token-mean"),
)
def cispo(logp: Tensor, old_logp: Tensor, mask: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    """The ratio truncated at 5, held fixed, times the log-prob; rewards as in GRPO; mean over tokens."""
    ratio = token_ratio(logp, old_logp).clamp(max=5.0).detach()
    return mean_over_tokens(-ratio * normalised(rewards, group) * logp, mask)


@policy_loss("arXiv 2602.04879", PolicyParts("token", *both(R), unit="token-mean", depends_on="probability"))
def dppo(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """The ratio, without the tokens whose probability moved by over 0.2 in the direction of the update."""
    moved = (logp.exp() - behavior_logp.exp()).detach()
    keep = torch.where(advantages > 0, moved <= 0.2, moved >= -0.2)
    return mean_over_tokens(-token_ratio(logp, behavior_logp) * advantages * keep, mask)


# Corrections for samples of another policy, on given advantages.
#
# In each, the policy at the start of the update is π itself, as in training that uses every batch once. The ratio is
# then π/μ, where μ is the policy that sampled, such as an inference engine with other numerics or older weights.


def _weighted(weight: Tensor, logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    return sum_per_completion(-weight.detach() * advantages * logp, mask)


@policy_loss("verl 0.9.1 and SkyRL 0.3.0, without a bound", PolicyParts("token", *both(R)))
def token_is(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Importance sampling by the ratio of each token."""
    return _weighted(token_ratio(logp, behavior_logp), logp, mask, advantages)


@policy_loss("verl 0.9.1 and SkyRL 0.3.0, without a bound", PolicyParts("sequence", *both(R)))
def sequence_is(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Importance sampling by the ratio of the completion."""
    return _weighted(sequence_ratio(logp, behavior_logp, mask), logp, mask, advantages)


@policy_loss(
    "fengyao.notion.site/off-policy-rl; verl 0.9.1 and SkyRL 0.3.0 (bound 2)",
    PolicyParts("token", *both(Weight(high=2.0, above=2.0))),
)
def token_tis(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Truncated importance sampling: the ratio of each token, at most 2."""
    return _weighted(token_ratio(logp, behavior_logp).clamp(max=2.0), logp, mask, advantages)


@policy_loss("verl 0.9.1 (bound 2)", PolicyParts("sequence", *both(Weight(high=2.0, above=2.0))))
def sequence_tis(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Truncated importance sampling: the ratio of the completion, at most 2."""
    return _weighted(sequence_ratio(logp, behavior_logp, mask).clamp(max=2.0), logp, mask, advantages)


@policy_loss("TRL 1.16.0, token_mask (bound 3)", PolicyParts("token", *both(Weight(high=3.0))))
def token_mis(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Masked importance sampling: the ratio of each token, without the tokens where it exceeds 3."""
    ratio = token_ratio(logp, behavior_logp)
    return _weighted(ratio * (ratio <= 3.0), logp, mask, advantages)


@policy_loss("TRL 1.16.0, sequence_mask, its default (bound 3)", PolicyParts("sequence", *both(Weight(high=3.0))))
def sequence_mis(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Masked importance sampling: the ratio of the completion, without the completions where it exceeds 3."""
    ratio = sequence_ratio(logp, behavior_logp, mask)
    return _weighted(ratio * (ratio <= 3.0), logp, mask, advantages)


@policy_loss("arXiv 2510.18855; verl 0.9.1", PolicyParts("token", *both(Weight(low=0.5, high=5.0))))
def icepop(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """The ratio of each token, without the tokens where it is outside 0.5 to 5."""
    ratio = token_ratio(logp, behavior_logp)
    return _weighted(ratio * (ratio >= 0.5) * (ratio <= 5.0), logp, mask, advantages)


@policy_loss("SkyRL 0.3.0, product mask (0.5 to 2)", PolicyParts("sequence", *both(Weight("1", low=0.5, high=2.0))))
def product_mask(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """No ratio, without the completions whose ratio is outside 0.5 to 2."""
    ratio = sequence_ratio(logp, behavior_logp, mask)
    return _weighted(((ratio >= 0.5) & (ratio <= 2.0)).to(logp), logp, mask, advantages)


@policy_loss(
    "verl 0.9.1 (seq_mean_k1) and SkyRL 0.3.0 (geometric), 0.99 to 1.01",
    PolicyParts("mean", *both(Weight("1", low=0.99, high=1.01))),
)
def geometric_mask(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """No ratio, without the completions whose geometric mean of ratios is outside 0.99 to 1.01."""
    ratio = geometric_ratio(logp, behavior_logp, mask)
    return _weighted(((ratio >= 0.99) & (ratio <= 1.01)).to(logp), logp, mask, advantages)


@policy_loss("arXiv 2609.20807", PolicyParts(centred_score=True))
def score_centering(logp: Tensor, logits: Tensor, behavior_logits: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """No ratio; the mean score of the sampler at each prefix is subtracted from the score."""
    expected = (behavior_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return sum_per_completion(-advantages * (logp - expected), mask)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    entry.name: entry for entry in list(globals().values()) if isinstance(entry, PolicyLoss)
}
"""All entries by name, in the order of this file."""


def get(name: str) -> PolicyLoss:
    """Look up a policy loss.

    Args:
        name: its name, such as `grpo`.

    Returns:
        The entry.

    Raises:
        UnknownNameError: with near matches.

    Example:
        >>> from klgrad import policy_losses
        >>> policy_losses.get("rloo").source
        'arXiv 2402.14740'
    """
    if name not in POLICY_LOSSES:
        raise UnknownNameError("policy loss", name, POLICY_LOSSES)
    return POLICY_LOSSES[name]
