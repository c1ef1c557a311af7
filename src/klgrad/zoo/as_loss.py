"""Estimators used as a loss: differentiated path-wise."""

import torch
from torch import Tensor

from ..core.estimators import Estimator, k1, k2, k3, k_lambda
from ..core.result import reduce
from ..core.rollout import Rollout
from ..core.term import Remedy
from .cell import BOUNDED, K2_OR_TOKEN, SUMMED, TOKEN, as_loss, batch_loss, log_ratio, token_loss

OUTPUT_CLAMP = 10.0
"""verl, SkyRL and OpenRLHF clamp a KL estimate's value to ±10, which also stops its gradient there."""


@token_loss("nothing", "climbs forward-kl-sampler-sequence", instead=K2_OR_TOKEN)
def k1_loss(rollout: Rollout) -> Tensor:
    """k1 differentiated.

    Estimates: KL(π‖ref).
    Gradient: `nothing` on-policy; `climbs forward-kl-sampler-sequence` off-policy.
    Requires: y ~ π.
    """
    return as_loss(k1, rollout)


@token_loss("reverse-kl-token", "squared-token")
def k2_loss(rollout: Rollout) -> Tensor:
    """k2 differentiated, token by token.

    Estimates: KL(π‖ref), biased.
    Gradient: `reverse-kl-token` on-policy; `squared-token` off-policy.
    Requires: y ~ π.
    """
    return as_loss(k2, rollout)


@token_loss("forward-kl-token", "k3-token", instead=K2_OR_TOKEN)
def k3_loss(rollout: Rollout) -> Tensor:
    """k3 differentiated, token by token: GRPO as published, and the default of several trainers.

    Estimates: KL(π‖ref).
    Gradient: `forward-kl-token` on-policy; `k3-token` off-policy.
    Requires: y ~ π.
    """
    return as_loss(k3, rollout)


@token_loss("forward-kl-token", "sum-of-targets", instead=K2_OR_TOKEN)
def k_half_loss(rollout: Rollout) -> Tensor:
    """k_lambda at λ = 1/2 differentiated: half the strength for the same value.

    Estimates: KL(π‖ref).
    Gradient: `forward-kl-token` on-policy, at scale 1/2; `sum-of-targets` off-policy.
    Requires: y ~ π.
    """
    return as_loss(k_lambda(0.5), rollout)


@token_loss("unknown", "unknown", instead=K2_OR_TOKEN)
def abs_loss(rollout: Rollout) -> Tensor:
    """|l| differentiated.

    Estimates: E|l|, a bound on the reverse KL.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return as_loss(torch.abs, rollout)


@token_loss("unknown", "unknown", instead=BOUNDED)
def k3_loss_clamped(rollout: Rollout) -> Tensor:
    """k3 with its value clamped at 10, differentiated: no gradient where log π/ref is below -2.61.

    Estimates: KL(π‖ref), cut off.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return as_loss(lambda x: k3(x).clamp(-OUTPUT_CLAMP, OUTPUT_CLAMP), rollout)


@token_loss("unknown", "unknown", instead=BOUNDED)
def k2_loss_clamped(rollout: Rollout) -> Tensor:
    """k2 with its value clamped at 10, differentiated: no gradient where |l| > 4.47.

    Estimates: KL(π‖ref), cut off.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return as_loss(lambda x: k2(x).clamp(-OUTPUT_CLAMP, OUTPUT_CLAMP), rollout)


@token_loss("nothing", "nothing", instead=Remedy("differentiate it", ("k2-loss", TOKEN)))
def k3_no_grad(rollout: Rollout) -> Tensor:
    """k3 computed without gradient and added to the loss: logged, and nothing else.

    Estimates: KL(π‖ref).
    Gradient: `nothing` on-policy; `nothing` off-policy.
    Requires: y ~ π.
    """
    return as_loss(k3, rollout).detach()


@token_loss("reverse-kl-token", "squared-token")
def k3_straight_through(rollout: Rollout) -> Tensor:
    """The value of k3 with the slope of k2 (verl's `k3+`).

    Estimates: KL(π‖ref).
    Gradient: `reverse-kl-token` on-policy; `squared-token` off-policy.
    Requires: y ~ π.
    """
    return as_loss(Estimator(k3.value, k2.slope), rollout)


@batch_loss("unknown", "unknown", instead=SUMMED)
def k2_loss_length_mean(rollout: Rollout) -> Tensor:
    """k2 differentiated and divided by each completion's own length.

    Estimates: KL(π‖ref) per token, completion by completion.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    share = 1 / rollout.lengths.clamp(min=1)
    return reduce(share[:, None] * k2(log_ratio(rollout)), rollout, "sequence")


@batch_loss("reverse-kl-token", "squared-token", instead=SUMMED, couples_groups=True)
def k2_loss_token_mean(rollout: Rollout) -> Tensor:
    """k2 differentiated and averaged over all tokens of the batch.

    Estimates: KL(π‖ref) per token.
    Gradient: `reverse-kl-token` on-policy (in large batches); `squared-token` off-policy.
    Requires: y ~ π.
    """
    return reduce(k2(log_ratio(rollout)), rollout, "token")


@batch_loss("forward-kl-sequence", "unknown")
def k3_sequence_loss(rollout: Rollout) -> Tensor:
    """k3 of the whole completion's log-ratio, differentiated.

    Estimates: KL(π‖ref) of completions.
    Gradient: `forward-kl-sequence` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return k3(log_ratio(rollout).sum(-1)).mean()
