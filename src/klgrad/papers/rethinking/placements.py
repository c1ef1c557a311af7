"""The paper's four placements as losses of single outcomes, and the expected gradient of each.

The zoo has the same placements as losses of a batch: one number, averaged over completions. Here each outcome keeps its
own loss, because it is weighted by its probability, and off-policy by a ratio.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.estimators import k1, k2, k3
from ...enumeration import Problem

Loss = Callable[[Tensor, Tensor], Tensor]
"""From log π, which is differentiated, and log ref of each outcome to its loss."""

PLACEMENTS: dict[str, Loss] = {
    "k1-reward": lambda logp, ref_logp: k1.value(logp - ref_logp).detach() * logp,
    "k2-loss": lambda logp, ref_logp: k2(logp - ref_logp),
    "k1-loss": lambda logp, ref_logp: k1(logp - ref_logp),
    "k3-loss": lambda logp, ref_logp: k3(logp - ref_logp),
}


def expected_gradient(problem: Problem, loss: Loss) -> Tensor:
    """The mean over samples of the gradient that back-propagation through a sampled loss computes.

    Args:
        problem: its sampler draws the outcomes; sampling is not differentiated.
        loss: of each outcome, from log-probs (N, 1) to (N, 1).

    Returns:
        The gradient by the logits, flat.
    """
    logits = problem.logits.detach().clone().requires_grad_()
    mean = (problem.probability[:, None] * loss(problem.log_probs(logits), problem.ref_logp)).sum()
    return torch.autograd.grad(mean, logits)[0].flatten()


def relative_gap(found: Tensor, target: Tensor) -> float:
    """The distance of a gradient from its target, relative to the norm of the target."""
    return ((found - target).norm() / target.norm()).item()
