"""`KLResult`, what a KL term returns, and the one place where coefficients become a loss."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .rollout import Rollout
from .statistics import Estimate, ratio_of_means

Reduction = Literal["sequence", "token"]
"""`sequence`: summed over each completion's tokens, averaged over completions. `token`: summed over all
live tokens of the batch, divided by their number; when lengths vary this is another objective. A mean
of such means over micro-batches is no token mean of all of them, for which there is `KLResult.per_token`."""


@dataclass(frozen=True, eq=False)
class KLResult:
    r"""A KL term evaluated on one batch. Parts are computed when they are first used.

    `loss` and (`coefficient`, `pathwise`) are two shapes of one gradient:
    ∇loss = ∇(reduce(coefficient · logp) + pathwise), sample by sample.

    Attributes:
        loss: scalar; its value is the KL estimate `value.mean`, its gradient is the one that the term declares.
        coefficient: (B, T), detached, on the score of each sampled token. Subtract β x it from per-token
            advantages *after* their normalisation, and let the trainer reduce.
        pathwise: scalar; the full-vocabulary part of an `exact` term, to be added (times β) to the loss
            when the coefficient goes into the advantages. Zero, without gradient, for sampled terms.
        per_token: (B, T), 0 in value. Its weighted sum has the gradient of the term with those weights on its tokens,
            for trainers with a reduction of their own, and for a token mean over micro-batches: `per_token.sum() / n`
            with n the live tokens of the whole batch.
        value: the KL estimate with its standard error, in the unit of the reduction.
        diagnostics: detached scalars, by name.

    Examples:
        >>> import torch
        >>> from klgrad import KLTerm, Rollout
        >>> logp = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], requires_grad=True)
        >>> result = KLTerm()(Rollout(logp, ref_logp=logp.detach() - 0.5, mask=torch.ones(2, 2)))
        >>> print(result.value)
        1 ± 0
        >>> result.coefficient
        tensor([[1.0000, 0.5000],
                [1.0000, 0.5000]])
        >>> torch.autograd.grad(result.loss, logp)  # the mean over two completions
        (tensor([[0.5000, 0.2500],
                [0.5000, 0.2500]]),)
    """

    coefficient: Tensor
    per_token: Tensor
    _rollout: Rollout = field(repr=False)
    _reduction: Reduction = field(repr=False)
    _pathwise: Tensor | None = field(repr=False)
    _value_per_sequence: Tensor = field(repr=False)
    _diagnose: Callable[[], dict[str, Tensor]] = field(repr=False)

    @cached_property
    def loss(self) -> Tensor:
        """The estimate, with the gradient that the term declares."""
        with torch.enable_grad():  # so that a first access under no_grad() still builds the graph
            return self.value.mean + reduce(self.per_token, self._rollout, self._reduction)

    @cached_property
    def pathwise(self) -> Tensor:
        """The full-vocabulary part of the loss; 0 for sampled terms."""
        if self._pathwise is None:
            return self._value_per_sequence.new_zeros(())
        with torch.enable_grad():
            return reduce(self._pathwise, self._rollout, self._reduction)

    @cached_property
    def value(self) -> Estimate:
        """The KL estimate with its standard error, in the unit of the reduction."""
        return ratio_of_means(self._value_per_sequence, _count(self._rollout, self._reduction), self._rollout.group)

    @cached_property
    def diagnostics(self) -> dict[str, Tensor]:
        """Detached scalars, by name."""
        return self._diagnose()


def reduce(per_token: Tensor, rollout: Rollout, reduction: Reduction) -> Tensor:
    """Reduce (B, T) to a scalar by the declared reduction; masked positions are ignored.

    Args:
        per_token: (B, T) one number per token.
        rollout: the batch, for its mask.
        reduction: `sequence` sums over each completion and averages over completions, `token` averages over all
            live tokens.

    Returns:
        A scalar.
    """
    total = torch.where(rollout.mask, per_token, 0).sum()
    return total / _count(rollout, reduction).sum().clamp(min=1)


def assemble(
    rollout: Rollout,
    reduction: Reduction,
    *,
    coefficient: Tensor,
    pathwise: Tensor | None,
    value_per_sequence: Tensor,
    diagnose: Callable[[], dict[str, Tensor]],
) -> KLResult:
    """Build the result, whose loss has the estimate as its value and the coefficients as its gradient.

    Args:
        rollout: the batch.
        reduction: how tokens become one number.
        coefficient: (B, T) on the score of each token.
        pathwise: (B, T) full-vocabulary part, which is differentiated; None for sampled terms.
        value_per_sequence: (B,) the estimate of each completion.
        diagnose: computes the diagnostics when they are first used.

    Returns:
        The result.
    """
    coefficient = torch.where(rollout.mask, coefficient, 0).detach()
    # x - x.detach() is 0 and has the gradient of x: it adds nothing to the value of the estimate.
    per_token = coefficient * (rollout.logp - rollout.logp.detach())
    if pathwise is not None:
        per_token = per_token + torch.where(rollout.mask, pathwise - pathwise.detach(), 0)
    return KLResult(coefficient, per_token, rollout, reduction, pathwise, value_per_sequence, diagnose)


def _count(rollout: Rollout, reduction: Reduction) -> Tensor:
    return rollout.lengths if reduction == "token" else torch.ones_like(rollout.lengths)
