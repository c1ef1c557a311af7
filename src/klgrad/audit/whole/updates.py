"""The update of a loss on one case, as a function of the advantages."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..gradient import Gradient, Parts, evaluate
from ..large_batches import sum_over_rows
from ..subject import Subject
from ..verdict import MATCH
from .cases import WholeCase


@dataclass(frozen=True, eq=False)
class Updates:
    """The updates of one loss on one case.

    Attributes:
        subject: the loss.
        case: the problem and its batch.
    """

    subject: Subject
    case: WholeCase

    @cached_property
    def at_zero(self) -> Parts:
        """G(0): the derivatives of the loss by the tensors of the batch, without advantages."""
        return self._update(self.case.constant(0.0))

    def effect(self, advantage: Tensor) -> Parts:
        """G(A) - G(0), for one advantage per completion, (N,)."""
        return Parts(*(a - b for a, b in zip(self._update(advantage), self.at_zero, strict=True)))

    def as_sampler(self, advantage: Tensor) -> Tensor:
        """(B, T) what the loss adds to the log-prob of each token where π is the sampler: no ratio has an effect.

        The loss is called with `logp` set to `behavior_logp`. What it does without advantages is subtracted, and the
        sign is reversed: REINFORCE gives the advantage divided by the number of rows. It is 0 where masked.
        """
        mask = self.case.problem.space.mask[self.case.members.flatten()]
        if torch.equal(self.case.problem.logp, self.case.problem.behavior_logp):
            return torch.where(mask, -self.effect(advantage)[0], 0)
        return torch.where(mask, self._zero_as_sampler - self._as_sampler(advantage), 0)

    @cached_property
    def _zero_as_sampler(self) -> Tensor:
        return self._as_sampler(self.case.constant(0.0))

    def _as_sampler(self, advantage: Tensor) -> Tensor:
        batch = self.case.batch(advantage)
        return evaluate(self.subject, replace(batch, logp=batch.behavior_logp.clone().requires_grad_()))[1][0]

    def _update(self, advantage: Tensor) -> Parts:
        return evaluate(self.subject, self.case.batch(advantage))[1]

    @cached_property
    def is_of_single_groups(self) -> bool:
        """Whether a batch is a mean over its groups: the first, a middle and the last group alone give the same."""
        advantage, size = self.case.different(0), self.case.group_size
        batch, together = self.case.batch(advantage), self._update(advantage)
        groups = len(self.case.members)
        for i in (0, groups // 2, groups - 1):
            rows = slice(i * size, (i + 1) * size)
            alone = evaluate(self.subject, batch.part(rows))[1]
            for a, b in zip(alone, together, strict=True):
                if not torch.allclose(a, groups * b[rows], rtol=MATCH, atol=MATCH * float(a.abs().max())):
                    return False
        return True


def gradient(case: WholeCase, parts: Parts) -> Gradient:
    """The gradient on the parameters."""
    weighted = (case.row_weights.reshape(-1, *[1] * (part.dim() - 1)) * part for part in parts)
    return sum_over_rows(case.problem, case.members, Parts(*weighted))


def on_scores(case: WholeCase, weight: Tensor) -> Tensor:
    """The gradient of the loss that puts these (B, T) weights on the scores of π: minus their sum."""
    others = case.batch(case.constant(0.0)).leaves[1:]
    return gradient(case, Parts(-weight, *(torch.zeros_like(x) for x in others))).mean
