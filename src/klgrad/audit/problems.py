"""The problems of every audit: random, small, and different from each other."""

import math
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

    `shape` is what batches of one size and one mean length share. The scale of a loss may depend on
    it, as that of a mean does, so one scale is fitted per shape, over the problems that share it.

    `wider` names what a problem has that the standard ones lack; it is empty for a standard problem. A verdict must
    hold on all problems. Bias, cosine and variance are averages over the standard ones, so that they do not change
    when a wider problem is added.
    """

    distance: str
    problem: Problem
    group_size: int
    varying: bool
    wider: str = ""
    parts: int | None = None

    @property
    def name(self) -> str:
        """A description that is unique among the problems."""
        lengths = "varying" if self.varying else "fixed"
        vocab = self.problem.space.vocab
        what = f"{self.distance}, {self.wider}" if self.wider else self.distance
        groups = f"groups of {self.group_size}" + (" in one large batch" if self.parts else "")
        return f"{what}, {lengths} length, vocabulary {vocab}" + ("" if groups == self.wider else f", {groups}")

    @property
    def shape(self) -> tuple[int, int, bool, int | None]:
        """(rows, columns, whether lengths vary, parts): batches that share it have the same number of completions."""
        return (self.group_size, self.problem.space.length, self.varying, self.parts)

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
            "wider": self.wider,
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

WIDE = 12.0
"""|log π/ref| that one token of each of the two problems with large log-ratios exceeds."""

WIDE_RATIO = 3000.0
"""π/μ of the first token of the problem with large importance ratios, beyond the bounds in use."""

LONG, MANY = 5, 4
"""Tokens in the longest completions, and rows in the largest groups."""

MIDDLE = (1.0, 0.5)
"""As in `DISTANCES`, for the problems with longer completions or larger groups. Their seed is the first that gives
log-ratios beyond ±0.6 on all of them."""

WIDER_SHAPES = ((f"completions of {LONG} tokens", 2, LONG, True, 2), (f"groups of {MANY}", 2, 2, True, MANY))
"""What is wider, vocabulary, length, ends, group size. An end token limits the number of groups to 81."""


def _standard() -> list[Case]:
    found = []
    for vocab, length, ends, group_size, seed in SHAPES:
        for distance, (from_ref, off_policy) in DISTANCES.items():
            problem = autoregressive(vocab, length, ends=ends, seed=seed, away_from_ref=from_ref, off_policy=off_policy)
            found.append(Case(distance, problem, group_size, ends))
    return found


def _wider() -> list[Case]:
    found = [_wide(WIDE), _wide(-WIDE), _stale(WIDE_RATIO)]
    for wider, vocab, length, ends, group_size in WIDER_SHAPES:
        from_ref, off_policy = MIDDLE
        problem = autoregressive(vocab, length, ends=ends, seed=5, away_from_ref=from_ref, off_policy=off_policy)
        found.append(Case("middle", problem, group_size, ends, wider))
    return found


def _wide(reach: float) -> Case:
    """Two tokens over a vocabulary of two; the first token can have a log-ratio beyond `reach`.

    With a large negative log-ratio the token has probability exp(-12). At the other tokens π is near ref, so that their
    gradients do not exceed that of this token by too much. The sampler is near π, since large importance ratios would
    hide the KL.
    """
    problem = autoregressive(2, 2, ends=False, seed=2, away_from_ref=0.3, off_policy=0.5)
    ref_logits, logits, behavior_logits = (
        x.clone() for x in (problem.ref_logits, problem.logits, problem.behavior_logits)
    )
    # A little more than `reach`, since the noise of the logits may reduce it.
    unlikely = [ref_logits] if reach > 0 else [logits, behavior_logits]
    for table in unlikely:
        table[0, 1] -= abs(reach) + 0.5
    # The other policy is rather sure of that token, so that its KL is beyond the bounds in use too.
    sure = [logits, behavior_logits] if reach > 0 else [ref_logits]
    for table in sure:
        table[0, 1] += 2.0
    moved = replace(problem, logits=logits, ref_logits=ref_logits, behavior_logits=behavior_logits)
    return Case("beyond", moved, 2, False, f"log-ratios of {reach:+g}")


def _stale(ratio: float) -> Case:
    """Two tokens over a vocabulary of two; the sampler nearly excludes a first token that π draws often."""
    problem = autoregressive(2, 2, ends=False, seed=2, away_from_ref=0.5, off_policy=0.5)
    behavior_logits = problem.behavior_logits.clone()
    behavior_logits[0, 1] -= math.log(ratio) + 0.5
    moved = replace(problem, behavior_logits=behavior_logits)
    return Case("middle", moved, 2, False, f"importance ratios of {ratio:g}")


@cache
def cases(on_policy: bool = True) -> tuple[Case, ...]:
    """All problems, the standard ones first. They are built once.

    Args:
        on_policy: whether the policy itself is the sampler.
    """
    if on_policy:
        return tuple(case.on_policy() for case in cases(False))
    return (*_standard(), *_wider())
