"""Corrections for samples of another policy, on given advantages.

In each, the policy at the start of the update is π itself, as in training that uses every batch once. The ratio is then
π/μ, where μ is the policy that sampled, such as an inference engine with other numerics or older weights.
"""

from torch import Tensor

from .entry import RIGHT, Does, policy_loss
from .published import IN_PART
from .reductions import geometric_ratio, sequence_ratio, sum_per_completion, token_ratio

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
