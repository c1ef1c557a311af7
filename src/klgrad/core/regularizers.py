"""Regularizers that are no KL term of a policy gradient, and the optima of regularised rewards."""

import math

import torch
from torch import Tensor

from ..errors import MeaningError, RolloutError
from .credit import group_total
from .divergences import bisect, check_beta
from .result import KLResult, assemble
from .rollout import Rollout, check_tensors

# Regularisers for stale data that need no importance weights.
#
# `consistency_loss` contains the reward, and its optimum is π* ∝ ref exp(r/β) under any sampler. `squared_sequence`
# pulls π towards ref alone, and its optimum without a reward is ref. Together with a reward its optimum is π* only if
# the reward and the log-ratio are centred together, as its docstring explains.


def squared_sequence(rollout: Rollout) -> KLResult:
    r"""Half the squared log-ratio of whole completions, (Σ_t l_t)² / 2, under any sampler.

    Estimates:
        E_μ[(Σ_t l_t)² / 2]; near ref it is close to the reverse KL of completions.
    Gradient:
        `reverse-kl-sequence` on-policy; `squared-sequence` off-policy, with μ held fixed.
    Requires:
        nothing of the sampler: no ratio, no `behavior_logp`. Off-policy the mean score E_μ[Σ_t s_t] is not zero, so
        that a baseline changes the expected gradient. Added to an unweighted policy gradient E_μ[(r - v) Σ_t s_t], the
        sum is zero at π* ∝ ref exp(r/β) only if v = E_μ[r - β Σ_t l_t], the mean of both terms, or
        v = β log E_ref[exp(r/β)]. With the mean reward as v, or added to the gradient of E_π[r], it converges
        elsewhere: 0.008 to 0.78 and 0.11 to 0.70 nats from π* on four small problems with β = 0.5.
        `consistency_loss` is the centred form.

    Args:
        rollout: the batch.

    Returns:
        The loss, the coefficients and the value; see `KLResult`.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout, squared_sequence
        >>> logp = torch.tensor([[-1.0, -2.0]])
        >>> result = squared_sequence(Rollout(logp, logp - 0.5, torch.ones(1, 2)))
        >>> result.loss, result.coefficient
        (tensor(0.5000), tensor([[1., 1.]]))

    References:
        Tang, Cohen, Zhang, Valko and Munos, RL-finetuning LLMs from on- and off-policy data with a single algorithm,
        2025, arXiv:2503.19612 (AGRO, of which this is the part without the reward).
    """
    total = rollout.log_ratio.sum(-1)
    return assemble(
        rollout,
        "sequence",
        coefficient=total[:, None].expand_as(rollout.logp),
        pathwise=None,
        value_per_sequence=total.square() / 2,
        diagnose=lambda: {"length/mean": rollout.lengths.mean(), "log_ratio/abs_max": total.abs().amax()},
    )


def consistency_loss(rollout: Rollout, reward: Tensor, beta: float) -> Tensor:
    r"""Half the variance, within each group, of r(y) - β log π(y)/ref(y); averaged over groups.

    Estimates:
        ½ Var_μ[r - β log(π/ref)], unbiased (n - 1 in the denominator), 0 at the optimum and only there
        where μ has support.
    Gradient:
        ∇ ½ Var_μ[r - β log(π/ref)], with μ held fixed; its root is π* ∝ ref exp(r/β), whatever μ is.
    Requires:
        completions of one prompt sampled independently by one policy μ, 2 or more to a group. No ratio.

    Args:
        rollout: the batch, with `group`.
        reward: (B,), one per completion.
        beta: strength of the KL regularisation, > 0.

    Returns:
        A scalar, differentiable by `logp`.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout, consistency_loss
        >>> logp = torch.tensor([[-1.0], [-2.0]])
        >>> rollout = Rollout(logp, torch.tensor([[-1.5], [-1.5]]), torch.ones(2, 1), group=[0, 0])
        >>> consistency_loss(rollout, torch.tensor([1.0, 0.0]), beta=1.0)  # r - β log(π/ref) is 0.5 for both
        tensor(0.)

    References:
        Tang, Cohen, Zhang, Valko and Munos, RL-finetuning LLMs from on- and off-policy data with a single algorithm,
        2025, arXiv:2503.19612.
    """
    if not beta > 0:
        raise MeaningError("beta > 0", f"{beta:g}", "pass a positive beta; the optimum ref exp(r / beta) needs one")
    check_tensors({"logp": rollout.logp, "reward": reward})
    if reward.shape != rollout.logp.shape[:1] or reward.is_complex():
        raise RolloutError(
            f"a `reward` of shape ({len(rollout.logp)},) and real numbers",
            f"shape {tuple(reward.shape)}, {reward.dtype}",
            "pass one per completion",
        )
    if not bool(reward.isfinite().all()):
        raise RolloutError(
            "a finite `reward` of every completion",
            f"{reward[~reward.isfinite()][0].item():g}",
            "drop completions that were not scored, with their group if it has fewer than 2 others",
        )
    gap = reward.detach().to(rollout.logp.dtype) - beta * (rollout.logp - rollout.ref_logp).sum(-1)
    total, size = group_total(gap, rollout.group)
    # Each completion's share of its group's unbiased variance, averaged so that every group counts once.
    share = (gap - total / size).square() / (size - 1)
    return share.sum() / (1 / size).sum() / 2


# The optima of max_π E_π[r] - β KL, in closed form, for distributions small enough to write down.


def reverse_optimum(ref_logp: Tensor, reward: Tensor, beta: float) -> Tensor:
    r"""The optimum of E_π[r] - β KL(π‖ref), as log-probs: π*(y) ∝ ref(y) exp(r(y)/β).

    Args:
        ref_logp: (..., Y) log-probs of ref over all outcomes.
        reward: (..., Y) reward of each outcome.
        beta: strength of the regularisation, > 0.

    Returns:
        (..., Y) log π*.

    Raises:
        MeaningError: if beta is not positive and finite.

    Examples:
        >>> import torch
        >>> from klgrad import reverse_optimum
        >>> reverse_optimum(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]), beta=1.0).exp()
        tensor([0.7311, 0.2689])
    """
    check_beta(beta)
    return torch.log_softmax(ref_logp + reward / beta, dim=-1)


def forward_optimum(ref_logp: Tensor, reward: Tensor, beta: float) -> Tensor:
    r"""The optimum of E_π[r] - β KL(ref‖π), as log-probs: π(y) = β ref(y) / (λ* - r(y)).

    λ* > max r is found by bisection. A policy trained with k3 as a loss converges to this optimum instead of
    `reverse_optimum`.

    Args:
        ref_logp: (..., Y) log-probs of ref over all outcomes, all finite.
        reward: (..., Y) reward of each outcome.
        beta: strength of the regularisation, > 0.

    Returns:
        (..., Y) log-probs of the optimum.

    Raises:
        MeaningError: if beta is not positive and finite, or ref gives an outcome no probability.

    Examples:
        >>> import torch
        >>> from klgrad import forward_optimum
        >>> forward_optimum(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]), beta=1.0).exp()
        tensor([0.7071, 0.2929])

    References:
        Grill, Altché, Tang, Hubert, Valko, Antonoglou and Munos, Monte-Carlo tree search as regularized policy
        optimization, ICML 2020, arXiv:2007.12509 (the closed form and its bisection).
    """
    check_beta(beta)
    if not bool(torch.isfinite(ref_logp).all()):
        raise MeaningError("a ref that gives every outcome some probability", "-inf or NaN", "remove such outcomes")
    gap = reward.amax(-1, keepdim=True) - reward  # >= 0, so that λ - r = slack + gap does not cancel
    scaled = math.log(beta) + ref_logp
    # The masses β ref / (slack + gap) sum to at most 1 at slack = β; at slack = β ref(best) the best alone has 1.
    high = torch.full_like(gap[..., :1], math.log(beta))
    low = torch.where(gap == 0, scaled, -math.inf).amax(-1, keepdim=True)

    def log_masses(slack: Tensor) -> Tensor:
        return scaled - torch.logaddexp(slack, gap.log())

    low, high = bisect(lambda slack: log_masses(slack).logsumexp(-1, keepdim=True) > 0, low, high, high)
    return torch.log_softmax(log_masses((low + high) / 2), dim=-1)
