"""Every ordered group of completions that a sampler may draw, with its probability."""

import torch
from torch import Tensor

from .problem import Problem


def every_group(problem: Problem, size: int) -> tuple[Tensor, Tensor]:
    """(M, size) completion indices of all N^size groups drawn independently, and (M,) their probabilities."""
    single = torch.arange(len(problem.space))
    members = torch.cartesian_prod(*[single] * size).reshape(-1, size)
    return members, problem.probability[members].prod(-1)
