"""The problems of every audit: random, small, and different from each other."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from ..enumeration import Problem, autoregressive, target_gradients


@dataclass(frozen=True, eq=False)
class Case:
    """A problem with the size of the groups drawn on it.

    A batch is one group, and the audit sums over all groups. With `parts` it is the limit of large batches instead: one
    batch holds every group as often as it is likely (`klgrad.enumeration.population`).
    """

    distance: str
    problem: Problem
    group_size: int
    varying: bool
    parts: int | None = None

    @property
    def name(self) -> str:
        """A description that is unique among the problems."""
        lengths = "varying" if self.varying else "fixed"
        vocab = self.problem.space.vocab
        groups = f"groups of {self.group_size}" + (" in one large batch" if self.parts else "")
        return f"{self.distance}, {lengths} length, vocabulary {vocab}, {groups}"

    @cached_property
    def targets(self) -> Mapping[str, Tensor]:
        """The gradient of every target on this problem: on the logits, and 0 on the padding."""
        padding = self.problem.logits.new_zeros(self.problem.space.length)
        return {name: torch.cat([t, padding]) for name, t in target_gradients(self.problem).items()}

    def on_policy(self) -> "Case":
        """The same case with the policy itself as the sampler."""
        return replace(self, problem=self.problem.on_policy())

    def describe(self) -> dict[str, object]:
        """Plain data for JSON."""
        space = self.problem.space
        return {
            "name": self.name,
            "distance_to_reference": self.distance,
            "vocabulary": space.vocab,
            "length": space.length,
            "lengths_vary": self.varying,
            "completions": len(space),
            "group_size": self.group_size,
            "groups": len(space) ** self.group_size,
        }


SHAPES = (
    # Vocabulary, length, ends, group size, seed. Pairs on the larger spaces, triples on the smaller: of a pair, a
    # division by the standard deviation of the group keeps only the sign. Each seed is the first whose far problem
    # exceeds every common clamp and bound (`REACH`, `RATIO_REACH`).
    (3, 2, False, 2, 19),
    (3, 3, True, 2, 1),
    (2, 2, False, 3, 75),
    (2, 3, True, 3, 1620),
)

DISTANCES = {"near": (0.2, 0.5), "far": (2.5, 2.0)}
"""Standard deviation of the logits of ref, and of the sampler, from those of π. Near ref, reverse and forward KL almost
agree; far from it they do not."""

REACH = (-2.8, 4.6)
"""log π/ref that some tokens of every far problem exceed: k3 and k2, clamped at 10, have no gradient beyond -2.61 and
±4.47."""

RATIO_REACH = (1 / 12, 12.0)
"""π/μ that some tokens of every far problem exceed: importance ratios are commonly truncated at 2 to 10."""


@cache
def cases(on_policy: bool = True) -> tuple[Case, ...]:
    """All problems. They are built once.

    Args:
        on_policy: whether the policy itself is the sampler.
    """
    if on_policy:
        return tuple(case.on_policy() for case in cases(False))
    return tuple(
        Case(
            distance,
            autoregressive(vocab, length, ends=ends, seed=seed, away_from_ref=from_ref, off_policy=off_policy),
            group_size,
            ends,
        )
        for vocab, length, ends, group_size, seed in SHAPES
        for distance, (from_ref, off_policy) in DISTANCES.items()
    )
