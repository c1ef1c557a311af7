"""Policy losses as published, by name: for study and for the audit of whole losses.

Each is one short function, written from the published formula, with its source and with what it does on samples of π
and on samples of another policy. A test compares these verdicts with the audit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .core.credit import number_groups
from .errors import UnknownNameError
from .targets import Verdict

__all__ = ["POLICY_LOSSES", "Does", "PolicyGradientName", "PolicyLoss", "WholeVerdict", "get"]

# `PolicyLoss`, a published policy loss, and the decorator that makes one of a function.

PolicyGradientName = Literal["policy-gradient", "policy-gradient-sampler-prefixes", "policy-gradient-uncorrected"]
"""The policy gradients that a loss may have: see `klgrad.audit.whole` for what they mean."""

WholeVerdict = (
    Verdict
    | PolicyGradientName
    | Literal[
        "climbs policy-gradient",
        "climbs policy-gradient-sampler-prefixes",
        "climbs policy-gradient-uncorrected",
    ]
)
"""A verdict on one part of the update of a whole loss."""


class Does(NamedTuple):
    """What the advantages do in a loss.

    Attributes:
        drift_positive: under the advantage 1 for all completions.
        drift_negative: under the advantage -1 for all completions.
        policy_gradient: under advantages that differ.

    Example:
        >>> from klgrad import policy_losses
        >>> policy_losses.get("rloo").off_policy.policy_gradient
        'policy-gradient-uncorrected'
    """

    drift_positive: WholeVerdict
    drift_negative: WholeVerdict
    policy_gradient: WholeVerdict


RIGHT = Does("nothing", "nothing", "policy-gradient")
"""A policy gradient without drift, which is right."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss as published.

    Attributes:
        name: the name that `klgrad.policy_losses.get` takes.
        loss: the function; its parameters are named as the tensors of `klgrad.audit`, and it returns a scalar.
        source: where it was published.
        on_policy: what it does with samples of π.
        off_policy: what it does with samples of another policy.

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
    on_policy: Does
    off_policy: Does

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (self.loss.__doc__ or "").split("\n")[0]


def policy_loss(
    source: str, *, off_policy: Does, on_policy: Does = RIGHT
) -> Callable[[Callable[..., Tensor]], PolicyLoss]:
    """Make a `PolicyLoss` of a function.

    Args:
        source: where the loss was published.
        off_policy: what it does with samples of another policy.
        on_policy: what it does with samples of π.

    Returns:
        A decorator. The entry is named as the function, with `-` for `_`.
    """
    return lambda function: PolicyLoss(function.__name__.replace("_", "-"), function, source, on_policy, off_policy)


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
    number, sizes = number_groups(group)
    mean = torch.zeros(len(sizes), dtype=rewards.dtype).index_add(0, number, rewards) / sizes
    return (rewards - mean[number])[:, None]


def apart_from_others(rewards: Tensor, group: Tensor) -> Tensor:
    """(B, 1) the rewards minus the mean of the others of their group."""
    number, sizes = number_groups(group)
    size = sizes[number, None]
    return centred(rewards, group) * size / (size - 1)


def normalised(rewards: Tensor, group: Tensor) -> Tensor:
    """(B, 1) the rewards minus the mean of their group, divided by the standard deviation of the group."""
    number, sizes = number_groups(group)
    apart = centred(rewards, group)
    squares = torch.zeros(len(sizes), dtype=rewards.dtype).index_add(0, number, apart[:, 0] ** 2)
    return apart / ((squares / (sizes - 1)).sqrt()[number, None] + EPSILON)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's pessimistic objective, as a loss: -min(r A, clip(r, 1 - low, 1 + high) A)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


# Policy losses of papers, with the constants that they recommend.

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


# Corrections for samples of another policy, on given advantages.
#
# In each, the policy at the start of the update is π itself, as in training that uses every batch once. The ratio is
# then π/μ, where μ is the policy that sampled, such as an inference engine with other numerics or older weights.

PREFIXES = Does("nothing", "nothing", "policy-gradient-sampler-prefixes")
"""Token ratios: no drift, and the prefixes are still those of the sampler."""


def _weighted(weight: Tensor, logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    return sum_per_completion(-weight.detach() * advantages * logp, mask)


@policy_loss("verl 0.9.1 and SkyRL 0.3.0, without a bound", off_policy=PREFIXES)
def token_is(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Importance sampling by the ratio of each token."""
    return _weighted(token_ratio(logp, behavior_logp), logp, mask, advantages)


@policy_loss("verl 0.9.1 and SkyRL 0.3.0, without a bound", off_policy=RIGHT)
def sequence_is(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Importance sampling by the ratio of the completion."""
    return _weighted(sequence_ratio(logp, behavior_logp, mask), logp, mask, advantages)


@policy_loss("fengyao.notion.site/off-policy-rl; verl 0.9.1 and SkyRL 0.3.0 (bound 2)", off_policy=IN_PART)
def token_tis(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Truncated importance sampling: the ratio of each token, at most 2."""
    return _weighted(token_ratio(logp, behavior_logp).clamp(max=2.0), logp, mask, advantages)


@policy_loss("verl 0.9.1 (bound 2)", off_policy=IN_PART)
def sequence_tis(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Truncated importance sampling: the ratio of the completion, at most 2."""
    return _weighted(sequence_ratio(logp, behavior_logp, mask).clamp(max=2.0), logp, mask, advantages)


@policy_loss("TRL 1.16.0, token_mask (bound 3)", off_policy=IN_PART)
def token_mis(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Masked importance sampling: the ratio of each token, without the tokens where it exceeds 3."""
    ratio = token_ratio(logp, behavior_logp)
    return _weighted(ratio * (ratio <= 3.0), logp, mask, advantages)


@policy_loss("TRL 1.16.0, sequence_mask, its default (bound 3)", off_policy=IN_PART)
def sequence_mis(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Masked importance sampling: the ratio of the completion, without the completions where it exceeds 3."""
    ratio = sequence_ratio(logp, behavior_logp, mask)
    return _weighted(ratio * (ratio <= 3.0), logp, mask, advantages)


@policy_loss("arXiv 2510.18855; verl 0.9.1", off_policy=IN_PART)
def icepop(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """The ratio of each token, without the tokens where it is outside 0.5 to 5."""
    ratio = token_ratio(logp, behavior_logp)
    return _weighted(ratio * (ratio >= 0.5) * (ratio <= 5.0), logp, mask, advantages)


@policy_loss("SkyRL 0.3.0, product mask (0.5 to 2)", off_policy=IN_PART)
def product_mask(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """No ratio, without the completions whose ratio is outside 0.5 to 2."""
    ratio = sequence_ratio(logp, behavior_logp, mask)
    return _weighted(((ratio >= 0.5) & (ratio <= 2.0)).to(logp), logp, mask, advantages)


@policy_loss("verl 0.9.1 (seq_mean_k1) and SkyRL 0.3.0 (geometric), 0.99 to 1.01", off_policy=IN_PART)
def geometric_mask(logp: Tensor, behavior_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """No ratio, without the completions whose geometric mean of ratios is outside 0.99 to 1.01."""
    ratio = geometric_ratio(logp, behavior_logp, mask)
    return _weighted(((ratio >= 0.99) & (ratio <= 1.01)).to(logp), logp, mask, advantages)


@policy_loss("arXiv 2609.20807", off_policy=Does("nothing", "nothing", "unknown"))
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
