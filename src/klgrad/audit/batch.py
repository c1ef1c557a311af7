"""The tensors that the audit gives to a loss."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.rollout import Rollout
from ..enumeration import Problem

PADDING_LOGP, PADDING_REF_LOGP = -1.25, -2.5
"""The log-probs where the mask is 0: plausible and unequal, so that a loss that ignores the mask is detected."""

Advantages = Literal["zero", "random"]
"""The advantages that a loss receives: 0 for every completion, or random numbers."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch of completions, all (B, T) except `group` (B,). `logp` and the two KLs are autograd leaves."""

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    behavior_logp: Tensor
    mask: Tensor
    advantages: Tensor
    group: Tensor
    token_reverse_kl: Tensor
    token_forward_kl: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that a loss may be differentiated by."""
        return self.logp, self.token_reverse_kl, self.token_forward_kl

    @property
    def group_size(self) -> int:
        """Completions per group, the same for all groups of a batch."""
        return int((self.group == self.group[0]).sum())

    def fresh(self) -> "Batch":
        """The same values in new leaf tensors."""
        names = ("logp", "token_reverse_kl", "token_forward_kl")
        return replace(self, **{name: getattr(self, name).detach().clone().requires_grad_() for name in names})

    def copy(self) -> "Batch":
        """Copies of the tensors, through which gradients flow back to the leaves of this batch."""
        return Batch(**{f.name: getattr(self, f.name).clone() for f in fields(self)})

    def groups(self) -> Iterator["Batch"]:
        """Each group as a separate batch."""
        size = self.group_size
        parts = [getattr(self, f.name).detach().split(size) for f in fields(self) if f.name != "group"]
        for logp, ref_logp, old_logp, behavior_logp, mask, advantages, kl, forward_kl in zip(*parts, strict=True):
            alone = torch.zeros(size, dtype=torch.long)
            yield Batch(logp, ref_logp, old_logp, behavior_logp, mask, advantages, alone, kl, forward_kl).fresh()

    def at_reference(self) -> "Batch":
        """The same batch with the reference set to the policy, so that every KL is zero."""
        none = torch.zeros_like(self.logp)
        return replace(self, ref_logp=self.logp.detach(), token_reverse_kl=none, token_forward_kl=none)

    def rollout(self) -> Rollout:
        """The batch as the input of a `KLTerm` or a `Cell`."""
        return Rollout(
            self.logp,
            self.ref_logp,
            self.mask,
            behavior_logp=self.behavior_logp,
            group=self.group,
            token_reverse_kl=self.token_reverse_kl,
            token_forward_kl=self.token_forward_kl,
        )


def advantage_of(problem: Problem, kind: Advantages) -> Tensor:
    """(N,) an advantage for each completion of a problem."""
    n = len(problem.space)
    if kind == "zero":
        return torch.zeros(n, dtype=torch.float64)
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def from_problem(problem: Problem, members: Tensor, advantage: Tensor) -> Batch:
    """(M, G) groups of completion indices, stacked to M·G rows; `advantage` is (N,), one per completion."""
    rows = members.flatten()
    mask = problem.space.mask
    padded = lambda x, fill: torch.where(mask, x, fill)[rows]
    behavior = padded(problem.behavior_logp, PADDING_LOGP)
    return Batch(
        logp=padded(problem.logp, PADDING_LOGP),
        ref_logp=padded(problem.ref_logp, PADDING_REF_LOGP),
        old_logp=behavior,
        behavior_logp=behavior,
        mask=mask[rows],
        advantages=advantage[rows, None].expand(-1, mask.shape[1]).clone(),
        group=torch.arange(len(members)).repeat_interleave(members.shape[1]),
        token_reverse_kl=problem.at_tokens(problem.prefix_kl())[rows],
        token_forward_kl=problem.at_tokens(problem.prefix_forward_kl())[rows],
    ).fresh()
