"""Means with standard errors that know what was sampled independently of what."""

from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """A mean and its standard error, as 0-dimensional tensors (nan where one sample has no error)."""

    mean: Tensor
    standard_error: Tensor

    def __str__(self) -> str:
        return f"{self.mean.item():.4g} ± {self.standard_error.item():.2g}"


def ratio_of_means(total: Tensor, count: Tensor, group: Tensor | None = None) -> Estimate:
    r"""Σ total / Σ count over B completions, with the standard error of that ratio.

    With `count` = 1 it is the mean per sequence; with `count` = length it is the mean per token, whose
    error must not treat the tokens of one completion as independent. Completions of one prompt are not
    independent draws of the data either: with several groups the error is clustered by group.
    """
    total, count = total.detach(), count.detach()
    whole = count.sum().clamp(min=torch.finfo(count.dtype).tiny)
    mean = total.sum() / whole
    residual = _sum_by_group(total - mean * count, group)
    n = len(residual)
    # Dividing by the largest first keeps the squares finite, and `whole` before the size comes back in.
    size = residual.abs().amax().clamp(min=torch.finfo(residual.dtype).tiny)
    error = ((residual / size).square().sum() * n / max(n - 1, 1)).sqrt() * (size / whole)
    return Estimate(mean, error if n > 1 else torch.full_like(mean, float("nan")))


def _sum_by_group(x: Tensor, group: Tensor | None) -> Tensor:
    if group is None:
        return x
    values, index = torch.unique(group, return_inverse=True)
    if len(values) < 2:
        return x
    return torch.zeros(len(values), dtype=x.dtype, device=x.device).index_add_(0, index, x)
