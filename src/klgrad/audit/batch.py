"""The tensors that a loss under audit is called with."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..core.rollout import Rollout
from ..enumeration import Problem

PADDING_LOGP, PADDING_REF_LOGP = -1.25, -2.5
"""What stands in the log-probs where the mask is 0: plausible and unequal, so that a loss which forgets
the mask is seen to do so."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch of completions, (B, T) but for `group` (B,). `logp` and the two KLs are autograd leaves."""

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
        """What a loss may put a gradient on."""
        return self.logp, self.token_reverse_kl, self.token_forward_kl

    @property
    def group_size(self) -> int:
        """Completions to a group; all groups of a batch are alike."""
        return int((self.group == self.group[0]).sum())

    def fresh(self) -> "Batch":
        """The same numbers on new leaves."""
        names = ("logp", "token_reverse_kl", "token_forward_kl")
        return replace(self, **{name: getattr(self, name).detach().clone().requires_grad_() for name in names})

    def copy(self) -> "Batch":
        """Copies that carry gradient back to this batch's leaves."""
        return Batch(**{f.name: getattr(self, f.name).clone() for f in fields(self)})

    def groups(self) -> Iterator["Batch"]:
        """Each group as a batch of its own."""
        size = self.group_size
        parts = [getattr(self, f.name).detach().split(size) for f in fields(self) if f.name != "group"]
        for logp, ref_logp, old_logp, behavior_logp, mask, advantages, kl, forward_kl in zip(*parts, strict=True):
            alone = torch.zeros(size, dtype=torch.long)
            yield Batch(logp, ref_logp, old_logp, behavior_logp, mask, advantages, alone, kl, forward_kl).fresh()

    def at_reference(self) -> "Batch":
        """The same batch with the reference moved onto the policy: what is left has no KL in it."""
        none = torch.zeros_like(self.logp)
        return replace(self, ref_logp=self.logp.detach(), token_reverse_kl=none, token_forward_kl=none)

    def rollout(self) -> Rollout:
        """The batch as this package's own terms take it."""
        return Rollout(
            self.logp,
            self.ref_logp,
            self.mask,
            behavior_logp=self.behavior_logp,
            group=self.group,
            token_reverse_kl=self.token_reverse_kl,
            token_forward_kl=self.token_forward_kl,
        )


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
