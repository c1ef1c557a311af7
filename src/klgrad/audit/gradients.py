"""The expected gradient of a loss on a problem, in small batches and in the limit of large ones."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..enumeration import Problem, every_group
from .batch import Batch, from_problem
from .subject import Subject


@dataclass(frozen=True, eq=False)
class Gradient:
    """Moments of the gradient of one call of the loss, on one group drawn by the sampler.

    Attributes:
        mean: (P·V + T,) the expected gradient: on the logits, then on the masked positions of each column,
            where every target has zero.
        deviation: sqrt(E‖g - mean‖² times the size of the group): that of one completion, in a mean over completions.
            It is a root because squares overflow float64 from 1e155 on.
        typical: sqrt(E‖g‖²), the size to compare a zero mean with.
    """

    mean: Tensor
    deviation: float
    typical: float


class Parts(NamedTuple):
    """∂loss/∂ of each leaf of a batch: (B, T), and (B, T, V) for the logits."""

    logp: Tensor
    token_reverse_kl: Tensor
    token_forward_kl: Tensor
    logits: Tensor


def evaluate(subject: Subject, batch: Batch) -> tuple[Tensor, Parts]:
    """The loss, and its derivatives by each leaf of the batch."""
    with torch.enable_grad():
        # The loss gets copies, which are not leaves, so that it may modify them in place as it may a model's outputs.
        loss = subject(batch.copy())
        slopes: tuple[Tensor | None, ...] = (None,) * len(batch.leaves)
        if loss.requires_grad:  # a loss without gradient has the verdict `nothing`; it is no error
            with subject.named_errors(batch):
                slopes = torch.autograd.grad(loss, batch.leaves, allow_unused=True)
    pairs = zip(batch.leaves, slopes, strict=True)
    return loss.detach(), Parts(*(torch.zeros_like(x) if slope is None else slope for x, slope in pairs))


def expected_gradient(subject: Subject, problem: Problem, size: int, advantage: Tensor) -> Gradient:
    """Sum over every group of `size` completions; with advantages, sum what the reference adds to the gradient."""
    members, probability = every_group(problem, size, ordered=not subject.exchangeable)
    per_group = every_gradient(subject, problem, members, advantage)
    unit = unit_of(per_group)
    mean = probability @ (per_group / unit)
    second = float(probability @ (per_group / unit).square().sum(-1))
    spread = float(probability @ (per_group / unit - mean).square().sum(-1))
    return Gradient(mean * unit, math.sqrt(spread * size) * unit, math.sqrt(second) * unit)


def unit_of(x: Tensor) -> float:
    """The power of two below the largest entry; 1 if all entries are zero.

    Divided by it, squares neither overflow nor underflow, and a division by a power of two is exact.
    """
    largest = float(x.abs().max())
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if math.isfinite(largest) and largest > 0 else 1.0


def every_gradient(subject: Subject, problem: Problem, members: Tensor, advantage: Tensor) -> Tensor:
    """(M, P·V + T) the gradient of the loss on each of M groups."""
    if subject.stacks:
        parts = of_reference(subject, from_problem(problem, members, advantage))
        # A stacked call is a mean over all rows: multiply by the number of groups for the mean over one group.
        found = [Parts(*(part * len(members) for part in parts))]
    else:
        found = [of_reference(subject, from_problem(problem, group[None], advantage)) for group in members]
    parts = (torch.cat(part) for part in zip(*found, strict=True))
    return on_parameters(problem, members, Parts(*(part.reshape(*members.shape, *part.shape[1:]) for part in parts)))


def of_reference(subject: Subject, batch: Batch) -> Parts:
    """The derivatives of the loss; with advantages, what the reference adds to them."""
    parts = evaluate(subject, batch)[1]
    if not bool(batch.advantages.any()):
        return parts
    without = evaluate(subject, batch.at_reference().fresh())[1]
    return Parts(*(a - b for a, b in zip(parts, without, strict=True)))


def on_parameters(problem: Problem, members: Tensor, parts: Parts) -> Tensor:
    """From derivatives (M, G, T) or (M, G, T, V) by the tensors of a batch to those (M, P·V + T) by the parameters."""
    mask = problem.space.mask[members]
    padding = torch.where(mask, 0, parts.logp + _one_number(parts.logits)).sum(1)
    jacobians = (problem.scores, problem.kl_gradients, problem.forward_kl_gradients)
    per_group = torch.zeros(len(members), problem.logits.numel(), dtype=problem.logits.dtype)
    for part, jacobian in zip(parts[:3], jacobians, strict=True):
        if bool((part != 0).any()):
            per_group += torch.einsum("mgt,mgtp->mp", torch.where(mask, part, 0), jacobian[members])
    if bool((parts.logits != 0).any()):
        per_group += _at_own_prefix(problem, members, torch.where(mask[..., None], parts.logits, 0))
    return torch.cat([per_group, padding], -1)


def _at_own_prefix(problem: Problem, members: Tensor, on_logits: Tensor) -> Tensor:
    """(M, G, T, V) gradients on logits, added up at the parameters: the logits of each token's prefix."""
    m, v = len(members), problem.space.vocab
    prefix = problem.space.prefix[members].reshape(m, -1, 1).expand(-1, -1, v)
    table = torch.zeros(m, problem.space.prefixes, v, dtype=problem.logits.dtype)
    return table.scatter_add_(1, prefix, on_logits.reshape(m, -1, v).to(table.dtype)).flatten(1)


def _one_number(on_logits: Tensor) -> Tensor:
    """One number per position for the gradient on its logits; equal weights would give 0 behind a softmax."""
    return on_logits @ torch.arange(1, on_logits.shape[-1] + 1, dtype=on_logits.dtype)


def sum_over_rows(problem: Problem, members: Tensor, parts: Parts) -> Gradient:
    """The gradient on the parameters, from the derivatives by the tensors of one batch of these groups."""
    each = Parts(*(part[:, None] for part in parts))  # every row as a group of one
    per_row = on_parameters(problem, members.reshape(-1, 1), each)
    unit = unit_of(per_row)
    # The gradient is the sum over rows. In a mean over rows, that of one row alone would be `rows` times as large.
    typical = math.sqrt(float((per_row / unit).square().sum()) * len(per_row)) * unit
    return Gradient(per_row.sum(0), math.nan, typical)
