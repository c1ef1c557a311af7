"""What a KL term gives back, and the one place where coefficients become a loss."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .rollout import Rollout
from .statistics import Estimate, ratio_of_means

Reduction = Literal["sequence", "token"]
"""`sequence`: summed over each completion's tokens, averaged over completions. `token`: summed over all
live tokens of the batch, divided by their number; when lengths vary this is another objective."""


@dataclass(frozen=True, eq=False)
class KLResult:
    r"""A KL term evaluated on one batch.

    `loss` and (`coefficient`, `pathwise`) are two shapes of one gradient:
    ∇loss = ∇(reduce(coefficient · logp) + pathwise), sample by sample.

    Attributes:
        loss: scalar; its value is the KL estimate `value.mean`, its gradient what the term declares.
        coefficient: (B, T), detached, on the score of each sampled token. Subtract β x it from per-token
            advantages *after* their normalisation, and let the trainer reduce.
        pathwise: scalar; the full-vocabulary part of an `exact` term, to be added (times β) to the loss
            beside the coefficient. Zero, without gradient, for sampled terms.
        per_token: (B, T), 0 in value; whatever weights it is summed with, the gradient is that of the term with
            those weights on its tokens. For trainers that reduce in a way of their own.
        value: the KL estimate with its standard error, in the unit of the reduction.
        diagnostics: detached scalars, by name.
    """

    loss: Tensor
    coefficient: Tensor
    pathwise: Tensor
    per_token: Tensor
    value: Estimate
    diagnostics: dict[str, Tensor]


def reduce(per_token: Tensor, rollout: Rollout, reduction: Reduction) -> Tensor:
    """(B, T) to a scalar, by the declared reduction; masked positions count for nothing."""
    total = torch.where(rollout.mask, per_token, 0).sum()
    return total / _count(rollout, reduction).sum().clamp(min=1)


def assemble(
    rollout: Rollout,
    reduction: Reduction,
    *,
    coefficient: Tensor,
    pathwise: Tensor | None,
    value_per_sequence: Tensor,
    diagnostics: dict[str, Tensor],
) -> KLResult:
    """Build the result: the loss carries the estimate as its value and the coefficients as its gradient."""
    coefficient = torch.where(rollout.mask, coefficient, 0).detach()
    value = ratio_of_means(value_per_sequence, _count(rollout, reduction), rollout.group)
    full = torch.zeros_like(value.mean) if pathwise is None else reduce(pathwise, rollout, reduction)
    # Differences of the kind x - x.detach() are 0 with a gradient: the value is the estimate's alone.
    per_token = coefficient * (rollout.logp - rollout.logp.detach())
    if pathwise is not None:
        per_token = per_token + torch.where(rollout.mask, pathwise - pathwise.detach(), 0)
    loss = value.mean + reduce(per_token, rollout, reduction)
    return KLResult(loss, coefficient, full, per_token, value, diagnostics)


def _count(rollout: Rollout, reduction: Reduction) -> Tensor:
    return rollout.lengths if reduction == "token" else torch.ones_like(rollout.lengths)
