"""The problems that every audit runs on: random, small, and unlike each other."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from ..exact import Problem, autoregressive, target_gradients


@dataclass(frozen=True, eq=False)
class Case:
    """A problem with the size of the groups drawn on it.

    `shape` is what a loss can see of a batch without looking at its numbers: how many rows and columns,
    and whether lengths vary. A loss may scale with it (a mean does), so a scale is fitted per shape, over
    problems that share it.
    """

    distance: str
    problem: Problem
    group_size: int
    varying: bool

    @property
    def name(self) -> str:
        """In words."""
        lengths = "varying" if self.varying else "fixed"
        vocab = self.problem.space.vocab
        return f"{self.distance}, {lengths} length, vocabulary {vocab}, groups of {self.group_size}"

    @property
    def shape(self) -> tuple[int, int, bool]:
        """(rows, columns, whether lengths vary)."""
        return (self.group_size, self.problem.space.length, self.varying)

    @cached_property
    def targets(self) -> dict[str, Tensor]:
        """The gradient of every target on this problem: on the logits, and 0 on the padding."""
        padding = self.problem.logits.new_zeros(self.problem.space.length)
        return {name: torch.cat([t, padding]) for name, t in target_gradients(self.problem).items()}

    def on_policy(self) -> "Case":
        """The same case with the policy itself as the sampler."""
        return replace(self, problem=self.problem.on_policy())

    def describe(self) -> dict[str, object]:
        """For reports."""
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
    # vocabulary, length, ends, group size, seed: pairs on the larger spaces, triples on the smaller, since
    # with pairs alone a division by the group's standard deviation degenerates to a sign. The seeds are the
    # first whose far problem passes every clamp and bound in common use (`REACH`, `RATIO_REACH`).
    (3, 2, False, 2, 19),
    (3, 3, True, 2, 1),
    (2, 2, False, 3, 75),
    (2, 3, True, 3, 1620),
)

DISTANCES = {"near": (0.2, 0.5), "far": (2.5, 2.0)}
"""Spread of ref's logits, and of the sampler's, around π's. Near, reverse and forward KL almost agree; far,
they do not."""

REACH = (-2.8, 4.6)
"""log π/ref that some tokens of every far problem pass: k3 and k2, clamped at 10, lose their gradient at
-2.61 and at ±4.47."""

RATIO_REACH = (1 / 12, 12.0)
"""π/μ that some tokens of every far problem pass: importance ratios are truncated at 2 to 10."""


@cache
def cases(on_policy: bool) -> tuple[Case, ...]:
    """All problems, built once."""
    if on_policy:
        return tuple(case.on_policy() for case in cases(on_policy=False))
    found = []
    for vocab, length, ends, group_size, seed in SHAPES:
        for distance, (from_ref, off_policy) in DISTANCES.items():
            problem = autoregressive(vocab, length, ends=ends, seed=seed, away_from_ref=from_ref, off_policy=off_policy)
            found.append(Case(distance, problem, group_size, ends))
    return tuple(found)
