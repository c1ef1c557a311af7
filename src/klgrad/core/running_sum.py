"""Cumulative sums along completions, deterministic if torch is set to be."""

import torch
from torch import Tensor


def running_sum(x: Tensor) -> Tensor:
    """The cumulative sum x_1 + ... + x_t along the last dimension."""
    if not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1)
    span = 1  # CUDA has no deterministic cumsum; doubling spans takes log2(T) steps
    while span < x.shape[-1]:
        x = torch.cat([x[..., :span], x[..., span:] + x[..., :-span]], -1)
        span *= 2
    return x
