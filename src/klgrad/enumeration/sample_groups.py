"""Every group of completions that a sampler may draw, with its probability."""

import math

import torch
from torch import Tensor

from .problem import Problem


def every_group(problem: Problem, size: int, *, ordered: bool = True) -> tuple[Tensor, Tensor]:
    """(M, size) completion indices of all groups drawn independently, and (M,) their probabilities.

    Args:
        problem: whose sampler draws.
        size: of a group.
        ordered: all N^size; otherwise a group stands for every order of its members.
    """
    single = torch.arange(len(problem.space))
    if ordered:
        members = torch.cartesian_prod(*[single] * size).reshape(-1, size)
        return members, problem.probability[members].prod(-1)
    members = torch.combinations(single, size, with_replacement=True)
    alike = (members[:, :, None] == members[:, None, :]).tril().sum(-1).prod(-1)  # Π of factorials of multiplicities
    return members, problem.probability[members].prod(-1) * math.factorial(size) / alike
