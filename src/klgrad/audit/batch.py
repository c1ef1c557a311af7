"""The tensors that the audit gives to a loss."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.divergences import Divergence
from ..core.rollout import Rollout
from ..enumeration import Problem

PADDING_LOGP, PADDING_REF_LOGP = -1.25, (-2.5, -0.25)
"""The log-probs where the mask is 0: plausible and unequal, so that a loss that ignores the mask is detected. The two
of ref take turns between tokens and between completions, so that no clamp or filter of one sign hides it.

The logits there are those of the first prefix, in which π and ref differ too.
"""

Advantages = Literal["zero", "random"]
"""The advantages that a loss receives: 0 for every completion, or random numbers."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch of completions: (B, T) tensors, `rewards` and `group` (B,), and logits (B, T, V).

    `logp`, the two KLs and `logits` are autograd leaves. They are independent of each other: the gradient of a loss is
    the sum of what reaches each of them. `tokens` are the sampled ids, 0 where masked.
    """

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    behavior_logp: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor
    group: Tensor
    token_reverse_kl: Tensor
    token_forward_kl: Tensor
    logits: Tensor
    ref_logits: Tensor
    behavior_logits: Tensor
    tokens: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors that a loss may be differentiated by."""
        return self.logp, self.token_reverse_kl, self.token_forward_kl, self.logits

    @property
    def group_size(self) -> int:
        """Completions per group, the same for all groups of a batch."""
        return int((self.group == self.group[0]).sum())

    def fresh(self) -> "Batch":
        """The same values in new leaf tensors."""
        names = ("logp", "token_reverse_kl", "token_forward_kl", "logits")
        return replace(self, **{name: getattr(self, name).detach().clone().requires_grad_() for name in names})

    def copy(self) -> "Batch":
        """Copies of the tensors, through which gradients flow back to the leaves of this batch."""
        return Batch(**{f.name: getattr(self, f.name).clone() for f in fields(self)})

    def part(self, rows: slice) -> "Batch":
        """Some of the rows, with new leaves."""
        return Batch(**{f.name: getattr(self, f.name)[rows] for f in fields(self)}).fresh()

    def groups(self) -> Iterator["Batch"]:
        """A copy of each group as a separate batch, through which gradients flow back to the leaves of this one."""
        # One copy of each tensor, in which no two groups share a number. Unlike views by `split`, those by
        # `unsafe_split` may be modified in place, as a loss may do.
        alike = replace(self, group=torch.zeros_like(self.group))
        parts = {f.name: torch.unsafe_split(getattr(alike, f.name).clone(), self.group_size) for f in fields(self)}
        for part in zip(*parts.values(), strict=True):
            yield Batch(*part)

    def at_reference(self) -> "Batch":
        """The same batch with the reference set to the policy, so that every KL is zero."""
        none = torch.zeros_like(self.logp)
        same = {"ref_logp": self.logp.detach(), "ref_logits": self.logits.detach()}
        return replace(self, **same, token_reverse_kl=none, token_forward_kl=none)

    def divergence(self, generator: Divergence) -> Tensor:
        """(B, T) a divergence over the vocabulary, by the logits."""
        return generator.over(self.logits.log_softmax(-1), self.ref_logits.log_softmax(-1))

    def rollout(self, generator: Divergence | None = None) -> Rollout:
        """The batch as the input of a `KLTerm` or a `Cell`, with one more divergence over the vocabulary if asked."""
        return Rollout(
            self.logp,
            self.ref_logp,
            self.mask,
            behavior_logp=self.behavior_logp,
            group=self.group,
            token_reverse_kl=self.token_reverse_kl,
            token_forward_kl=self.token_forward_kl,
            token_divergence=None if generator is None else self.divergence(generator),
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
    turn = (torch.arange(len(mask))[:, None] + torch.arange(mask.shape[1])) % 2
    behavior = padded(problem.behavior_logp, PADDING_LOGP)
    return Batch(
        logp=padded(problem.logp, PADDING_LOGP),
        ref_logp=padded(problem.ref_logp, torch.tensor(PADDING_REF_LOGP, dtype=torch.float64)[turn]),
        old_logp=behavior,
        behavior_logp=behavior,
        mask=mask[rows],
        advantages=advantage[rows, None].expand(-1, mask.shape[1]).clone(),
        rewards=advantage[rows],
        group=torch.arange(len(members)).repeat_interleave(members.shape[1]),
        token_reverse_kl=problem.at_tokens(problem.prefix_kl())[rows],
        token_forward_kl=problem.at_tokens(problem.prefix_forward_kl())[rows],
        logits=problem.logits[problem.space.prefix][rows],
        ref_logits=problem.ref_logits[problem.space.prefix][rows],
        behavior_logits=problem.behavior_logits[problem.space.prefix][rows],
        tokens=problem.space.tokens[rows],
    ).fresh()
