"""The limit of large batches, exactly: a batch that holds every group of completions as often as it is likely.

The gradient of a loss with statistics over the batch, such as a mean over all its tokens, depends on the size of the
batch. If the sampler's probabilities are multiples of one fraction, a finite batch has exactly the proportions of the
distribution. The loss of this batch is the loss in the limit of large batches, without extrapolation.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ProblemError
from .problem import Problem

MAX_ROWS = 100_000
"""Largest batch that is built."""

PROPORTION = 1e-9
"""A probability that is this near to a multiple of the fraction is one; rounding makes it differ by about 1e-15."""


def with_rational_sampler(problem: Problem, parts: int, *, on_policy: bool) -> Problem:
    """Move the sampler to probabilities that are multiples of 1 / `parts` at every prefix.

    Args:
        problem: the policies; its sampler is rounded, and no token gets probability 0.
        parts: the denominator, at least the size of the vocabulary.
        on_policy: move the policy to the same probabilities, so that it is the sampler.

    Returns:
        The problem with its new sampler.

    Example:
        >>> from klgrad.enumeration import autoregressive, with_rational_sampler
        >>> problem = autoregressive(3, 1, ends=False, seed=0, away_from_ref=1.0)
        >>> moved = with_rational_sampler(problem, 4, on_policy=True)
        >>> sorted(moved.probability.tolist())
        [0.25, 0.25, 0.5]
    """
    if parts < problem.space.vocab:
        raise ProblemError(
            f"at least {problem.space.vocab} parts, one for each token of the vocabulary",
            f"parts={parts}",
            "use a larger denominator",
        )
    wanted = torch.softmax(problem.behavior_logits, -1) * parts
    counts = torch.ones_like(wanted)
    for _ in range(parts - problem.space.vocab):  # one part at a time to the token that lacks most
        lacking = (wanted - counts).argmax(-1, keepdim=True)
        counts.scatter_add_(-1, lacking, torch.ones_like(lacking, dtype=counts.dtype))
    logits = (counts / parts).log()
    return replace(problem, behavior_logits=logits, logits=logits if on_policy else problem.logits)


def population(problem: Problem, size: int, parts: int) -> Tensor:
    """List every group of completions as often as it is likely.

    Args:
        problem: with a sampler of `with_rational_sampler`.
        size: completions per group.
        parts: the denominator of the sampler's probabilities.

    Returns:
        (M, size) indices into the completions of the problem; a group of probability p is in p·M of the rows.

    Example:
        >>> from klgrad.enumeration import bandit, population, with_rational_sampler
        >>> problem = with_rational_sampler(bandit(2, seed=0, away_from_ref=1.0), 2, on_policy=True)
        >>> population(problem, 1, parts=2).flatten().tolist()
        [0, 1]
    """
    exact = problem.probability * parts**problem.space.length
    counts = exact.round()
    if bool(((exact - counts).abs() > PROPORTION * exact).any()):
        raise ProblemError(
            f"a sampler whose probabilities are multiples of 1/{parts}",
            "other probabilities",
            "move it there by with_rational_sampler",
        )
    rows = torch.arange(len(counts)).repeat_interleave(counts.long())
    if len(rows) ** size * size > MAX_ROWS:
        raise ProblemError(
            f"at most {MAX_ROWS} rows",
            f"{len(rows)} ^ {size} groups of {size}",
            "use fewer parts or shorter completions",
        )
    return torch.cartesian_prod(*[rows] * size).reshape(-1, size)
