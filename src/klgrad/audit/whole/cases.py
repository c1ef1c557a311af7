"""The cases of the audit of a whole loss, with one advantage per completion.

They are those of the limit of large batches; and those of small batches, which are wider, with all groups in one call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from ...enumeration import every_group, population
from ..batch import Batch, from_problem
from ..large_batches import limit_cases
from ..problems import Case, cases

LEAST, MOST = -1.3, 1.7
"""The least and the largest advantage. They are not symmetric, so that no advantage and no mean of all is zero."""


@dataclass(frozen=True, eq=False)
class WholeCase(Case):
    """A case whose scale and whose targets may be its own.

    Attributes:
        number: each case has a scale of its own, because the mean length of the completions differs.
        more: the gradients of targets that depend on the advantages; if there are any, they are the only targets.
    """

    number: int = 0
    more: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def shape(self) -> tuple[int, int, bool, int | None]:
        """Unique for each case."""
        return (self.number, self.problem.space.length, self.varying, self.parts)

    @cached_property
    def targets(self) -> Mapping[str, Tensor]:
        """The gradients of the divergences, or of the targets that depend on the advantages."""
        return self.more or super().targets

    @cached_property
    def members(self) -> Tensor:
        """(M, G) every group: in the limit as often as it is likely, else once."""
        return self._groups[0]

    @cached_property
    def row_weights(self) -> Tensor:
        """(B,) by what the gradient of each row is multiplied, so that the sum is an expectation."""
        members, probability = self._groups
        return (probability * len(members)).repeat_interleave(members.shape[1])

    @cached_property
    def _groups(self) -> tuple[Tensor, Tensor]:
        if self.parts is None:
            return every_group(self.problem, self.group_size)
        members = population(self.problem, self.group_size, self.parts)
        return members, torch.full((len(members),), 1 / len(members), dtype=torch.float64)

    @cached_property
    def _without(self) -> Batch:
        return from_problem(self.problem, self.members, self.constant(0.0))

    def batch(self, advantage: Tensor) -> Batch:
        """The batch of the limit, with one advantage per completion, (N,)."""
        rewards = advantage[self.members.flatten()]
        advantages = rewards[:, None].expand(-1, self.problem.space.length).clone()
        return replace(self._without, advantages=advantages, rewards=rewards).fresh()

    def constant(self, advantage: float) -> Tensor:
        """(N,) the same advantage for every completion."""
        return torch.full((len(self.problem.space),), advantage, dtype=torch.float64)

    def different(self, draw: int) -> Tensor:
        """(N,) advantages in nearly equal steps and random order, so that no two are close and none is the mean."""
        n = len(self.problem.space)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(draw))
        share = torch.linspace(0, 1, n, dtype=torch.float64)
        return (LEAST + (MOST - LEAST) * (0.9 * share + 0.1 * share**2))[order]


@cache
def whole_cases(*, on_policy: bool, most_rows: int | None = None) -> tuple[WholeCase, ...]:
    """All cases; built once.

    Args:
        on_policy: whether the policy itself is the sampler.
        most_rows: leave out the cases with larger batches.
    """
    every = _numbered(limit_cases(on_policy))
    return tuple(case for case in every if most_rows is None or case.members.numel() <= most_rows)


@cache
def wider_cases(*, on_policy: bool) -> tuple[WholeCase, ...]:
    """The problems of small batches. They have probabilities and ratios that the limit's lack.

    One call has every group once, so they are meant for a loss whose groups do not influence each other.
    """
    return _numbered(cases(on_policy))


def _numbered(found: tuple[Case, ...]) -> tuple[WholeCase, ...]:
    return tuple(
        WholeCase(**{f.name: getattr(case, f.name) for f in fields(case)}, number=i) for i, case in enumerate(found)
    )
