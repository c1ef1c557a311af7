"""Every group of completions that a sampler can draw, with its probability."""

import math

import torch
from torch import Tensor

from .problem import Problem


def every_group(problem: Problem, size: int, *, ordered: bool = True) -> tuple[Tensor, Tensor]:
    """List all groups of independently drawn completions.

    Args:
        problem: its sampler draws the completions.
        size: completions per group.
        ordered: list all N^size groups. Otherwise list one order of each group, with the probability of all orders.

    Returns:
        (M, size) indices into the completions of the problem, and (M,) probabilities, which sum to 1.

    Example:
        >>> from klgrad.enumeration import bandit, every_group
        >>> members, probability = every_group(bandit(3, seed=0, away_from_ref=1.0), 2)
        >>> members.shape, round(float(probability.sum()), 9)
        (torch.Size([9, 2]), 1.0)
    """
    single = torch.arange(len(problem.space))
    if ordered:
        members = torch.cartesian_prod(*[single] * size).reshape(-1, size)
        return members, problem.probability[members].prod(-1)
    members = torch.combinations(single, size, with_replacement=True)
    alike = (members[:, :, None] == members[:, None, :]).tril().sum(-1).prod(-1)  # Π of factorials of multiplicities
    return members, problem.probability[members].prod(-1) * math.factorial(size) / alike
