"""Estimators used as a loss and weighted by the ratio π/μ to the sampler."""

from torch import Tensor

from ..core.estimators import exp_capped, k1, k2, k3
from ..core.importance import Truncate, token_ratio
from ..core.rollout import Rollout
from ..core.term import Remedy
from .cell import TOKEN_RATIO, live_ratio, log_ratio, token_loss


@token_loss(
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    instead=Remedy(use=(TOKEN_RATIO,), why="the same gradient without cancellation"),
)
def ratio_k3_loss(rollout: Rollout) -> Tensor:
    """Ratio times k3, both differentiated: the "unbiased" k3 of DeepSeek-V3.2, TRL's default.

    Estimates: KL(π‖ref) on the sampler's prefixes.
    Gradient: `reverse-kl-token` on-policy; `reverse-kl-token-sampler` off-policy.
    Requires: `behavior_logp`. In float32 exp cancels against exp beyond |l| of about 16.
    """
    return live_ratio(rollout) * k3(log_ratio(rollout))


@token_loss(
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    instead=Remedy(use=(TOKEN_RATIO,), why="the same gradient with less variance"),
)
def ratio_k1_loss(rollout: Rollout) -> Tensor:
    """Ratio times k1, both differentiated: coefficient r (l + 1).

    Estimates: KL(π‖ref) on the sampler's prefixes.
    Gradient: `reverse-kl-token` on-policy; `reverse-kl-token-sampler` off-policy.
    Requires: `behavior_logp`.
    """
    return live_ratio(rollout) * k1(log_ratio(rollout))


@token_loss("unknown", "unknown", instead=Remedy("detach the ratio", ("stopped-ratio-k2-loss",)))
def ratio_k2_loss(rollout: Rollout) -> Tensor:
    """Ratio times k2, both differentiated: coefficient r (l + l²/2).

    Estimates: KL(π‖ref), biased.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: `behavior_logp`.
    """
    return live_ratio(rollout) * k2(log_ratio(rollout))


@token_loss("reverse-kl-token", "reverse-kl-token-sampler")
def stopped_ratio_k2_loss(rollout: Rollout) -> Tensor:
    """Detached ratio times k2.

    Estimates: KL(π‖ref), biased.
    Gradient: `reverse-kl-token` on-policy; `reverse-kl-token-sampler` off-policy.
    Requires: `behavior_logp`.
    """
    return token_ratio(rollout) * k2(log_ratio(rollout))


@token_loss("reverse-kl-token", "unknown")
def truncated_ratio_k2_loss(rollout: Rollout) -> Tensor:
    """Detached ratio, truncated at 1.2, times k2.

    Estimates: KL(π‖ref), biased.
    Gradient: `reverse-kl-token` on-policy; `unknown` off-policy.
    Requires: `behavior_logp`; the bound adds bias off-policy.
    """
    return Truncate(1.2)(token_ratio(rollout)) * k2(log_ratio(rollout))


@token_loss(
    "forward-kl-token",
    "forward-kl-token-sampler",
    instead=Remedy(use=("stopped-ratio-k2-loss", TOKEN_RATIO)),
)
def stopped_ratio_k3_loss(rollout: Rollout) -> Tensor:
    """Detached ratio times k3.

    Estimates: KL(π‖ref) on the sampler's prefixes.
    Gradient: `forward-kl-token` on-policy; `forward-kl-token-sampler` off-policy.
    Requires: `behavior_logp`.
    """
    return token_ratio(rollout) * k3(log_ratio(rollout))


@token_loss(
    "unknown",
    "unknown",
    instead=Remedy("weight by the token ratio", (TOKEN_RATIO,)),
)
def mean_ratio_k3_loss(rollout: Rollout) -> Tensor:
    """The completion's geometric-mean ratio (GSPO's), broadcast onto every token's k3, both differentiated.

    Estimates: KL(π‖ref).
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: `behavior_logp`.
    """
    log_mean = (rollout.logp - rollout.sampler_logp).sum(-1, keepdim=True) / rollout.lengths[:, None].clamp(min=1)
    return exp_capped(log_mean) * k3(log_ratio(rollout))
