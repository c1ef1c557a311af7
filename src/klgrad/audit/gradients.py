"""The expected gradient of a loss on a problem, in small batches and in the limit of large ones."""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..enumeration import Problem, autoregressive, every_group, with_rational_sampler
from .batch import Batch, from_problem
from .problems import DISTANCES, Case
from .subject import Subject

# The exact expected gradient of a loss, and its exact variance, on one problem.

AT_ONCE = 128
"""Groups whose graphs are held at once. More would be little faster, and a loss may run a language model."""

SAME = 1e-9
"""Relative difference of derivatives that are the same up to rounding."""


@dataclass(frozen=True, eq=False)
class Gradient:
    """Moments of the gradient of one call of the loss, on one group drawn by the sampler.

    Attributes:
        mean: (P·V + T,) the expected gradient: on the logits, then on the masked positions of each column,
            where every target has zero.
        deviation: sqrt(E‖g - mean‖² times the size of the group): that of one completion, in a mean over completions.
            It is a root because squares overflow float64 from 1e155 on.
        typical: sqrt(E‖g‖²), the size to compare a zero mean with.
        on_padding: whether any masked position has a gradient.
    """

    mean: Tensor
    deviation: float
    typical: float
    on_padding: bool


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
        with subject.named_errors(batch):
            return loss.detach(), _by_leaves([loss], batch)


def evaluate_groups(subject: Subject, batch: Batch) -> Parts:
    """The derivatives of the loss of each group, which is called with one group at a time.

    Groups have no rows in common, so one backward pass gives the derivatives of all their losses, unless the loss has a
    state that its later calls change. The first and the last group are therefore evaluated alone too.
    """
    with torch.enable_grad():
        losses = [subject(group) for group in batch.groups()]
        try:
            found = _by_leaves(losses, batch)
        except Exception:  # a state that was modified in place, or an error that `_one_by_one` gives a name
            return _one_by_one(subject, batch)
    size = batch.group_size
    for rows in (slice(0, size), slice(-size, None)):
        alone = evaluate(subject, batch.part(rows))[1]
        if not all(
            torch.allclose(a[rows], b, rtol=SAME, atol=0, equal_nan=True) for a, b in zip(found, alone, strict=True)
        ):
            return _one_by_one(subject, batch)
    return found


def _one_by_one(subject: Subject, batch: Batch) -> Parts:
    found = [evaluate(subject, group.fresh())[1] for group in batch.groups()]
    return Parts(*(torch.cat(part) for part in zip(*found, strict=True)))


def _by_leaves(losses: list[Tensor], batch: Batch) -> Parts:
    found: tuple[Tensor | None, ...] = (None,) * len(batch.leaves)
    differentiable = [loss for loss in losses if loss.requires_grad]
    if differentiable:  # a loss without gradient has the verdict `nothing`; it is no error
        found = torch.autograd.grad(differentiable, batch.leaves, allow_unused=True)
    return Parts(*(torch.zeros_like(x) if g is None else g for x, g in zip(batch.leaves, found, strict=True)))


def expected_gradient(subject: Subject, problem: Problem, size: int, advantage: Tensor) -> Gradient:
    """Sum over every group of `size` completions; with advantages, sum what the reference adds to the gradient."""
    members, probability = every_group(problem, size, ordered=not subject.exchangeable)
    per_group, on_padding = every_gradient(subject, problem, members, advantage)
    unit = unit_of(per_group)
    mean = probability @ (per_group / unit)
    second = float(probability @ (per_group / unit).square().sum(-1))
    spread = float(probability @ (per_group / unit - mean).square().sum(-1))
    return Gradient(mean * unit, math.sqrt(spread * size) * unit, math.sqrt(second) * unit, on_padding)


def unit_of(x: Tensor) -> float:
    """The power of two below the largest entry; 1 if all entries are zero.

    Divided by it, squares neither overflow nor underflow, and a division by a power of two is exact.
    """
    largest = float(x.abs().max())
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if math.isfinite(largest) and largest > 0 else 1.0


def every_gradient(subject: Subject, problem: Problem, members: Tensor, advantage: Tensor) -> tuple[Tensor, bool]:
    """(M, P·V + T) the gradient of the loss on each of M groups, and whether any masked position has one."""
    if subject.stacks:
        parts = of_reference(subject, from_problem(problem, members, advantage))
        # A stacked call is a mean over all rows: multiply by the number of groups for the mean over one group.
        found = [Parts(*(part * len(members) for part in parts))]
    else:
        batches = (from_problem(problem, some, advantage) for some in members.split(AT_ONCE))
        found = [of_reference(subject, batch, by_group=True) for batch in batches]
    parts = (torch.cat(part) for part in zip(*found, strict=True))
    return on_parameters(problem, members, Parts(*(part.reshape(*members.shape, *part.shape[1:]) for part in parts)))


def of_reference(subject: Subject, batch: Batch, *, by_group: bool = False) -> Parts:
    """The derivatives of the loss, or of that of each group; with advantages, what the reference adds to them."""
    derivatives = evaluate_groups if by_group else lambda subject, batch: evaluate(subject, batch)[1]
    parts = derivatives(subject, batch)
    if not bool(batch.advantages.any()):
        return parts
    without = derivatives(subject, batch.at_reference().fresh())
    return Parts(*(a - b for a, b in zip(parts, without, strict=True)))


def on_parameters(problem: Problem, members: Tensor, parts: Parts) -> tuple[Tensor, bool]:
    """From derivatives (M, G, T) or (M, G, T, V) by the tensors of a batch to those (M, P·V + T) by the parameters.

    Also whether any masked position has a derivative.
    """
    mask = problem.space.mask[members]
    padding = torch.where(mask, 0, parts.logp + _one_number(parts.logits)).sum(1)
    jacobians = (problem.scores, problem.kl_gradients, problem.forward_kl_gradients)
    per_group = torch.zeros(len(members), problem.logits.numel(), dtype=problem.logits.dtype)
    for part, jacobian in zip(parts[:3], jacobians, strict=True):
        if bool((part != 0).any()):
            per_group += torch.einsum("mgt,mgtp->mp", torch.where(mask, part, 0), jacobian[members])
    if bool((parts.logits != 0).any()):
        per_group += _at_own_prefix(problem, members, torch.where(mask[..., None], parts.logits, 0))
    return torch.cat([per_group, padding], -1), bool((padding.nan_to_num() != 0).any())


def _at_own_prefix(problem: Problem, members: Tensor, on_logits: Tensor) -> Tensor:
    """(M, G, T, V) gradients on logits, added up at the parameters: the logits of each token's prefix."""
    m, v = len(members), problem.space.vocab
    prefix = problem.space.prefix[members].reshape(m, -1, 1).expand(-1, -1, v)
    table = torch.zeros(m, problem.space.prefixes, v, dtype=problem.logits.dtype)
    return table.scatter_add_(1, prefix, on_logits.reshape(m, -1, v).to(table.dtype)).flatten(1)


def _one_number(on_logits: Tensor) -> Tensor:
    """One number per position for the gradient on its logits; equal weights would give 0 behind a softmax."""
    return on_logits @ torch.arange(1, on_logits.shape[-1] + 1, dtype=on_logits.dtype)


# The gradient of a loss on one case.


class Measurement(NamedTuple):
    """The exact gradient of a loss on one case."""

    case: Case
    gradient: Gradient


# The problems of the limit of large batches, and the gradient of a loss in it.
#
# A gradient that depends on statistics of the batch, such as a mean over all its tokens, differs in batches of 2, 3 and
# 32 completions. Here one call of the loss has a batch with every group of completions as often as it is likely. Its
# gradient is that of the limit, up to rounding.

SHAPES = (
    # Distance to ref, vocabulary, length, ends, group size, parts. The batch has parts ^ (length * group size) groups:
    # 64 or 256, few enough for a framework's trainer. With 2 parts the sampler is uniform.
    ("near", 3, 2, False, 2, 4),
    ("far", 3, 2, False, 2, 4),
    ("far", 3, 2, True, 2, 4),
    ("far", 2, 3, True, 2, 2),
    ("far", 2, 2, True, 3, 2),
)


@cache
def proof_cases(on_policy: bool, *, few: bool = False) -> tuple[Case, ...]:
    """The problems on which the formula of a loss is compared with its enumerated gradient.

    Args:
        on_policy: whether the policy itself is the sampler.
        few: the two smallest only, for a framework's trainer, whose calls take long.
    """
    if few:
        return tuple(rational_case(*shape, on_policy=on_policy) for shape in SHAPES if shape[-1] == 2)
    return (*(rational_case(*shape, on_policy=on_policy) for shape in SHAPES), _sure_case(on_policy))


def rational_case(
    distance: str, vocab: int, length: int, ends: bool, group_size: int, parts: int, *, on_policy: bool
) -> Case:
    """A random problem around a sampler with rational probabilities: π is away from the sampler, and ref from π.

    The near and the far problem have the same sampler, and so the same mean length: a loss that divides by the mean
    length has the same scale on both.
    """
    from_ref, off_policy = DISTANCES[distance]
    drawn = autoregressive(vocab, length, ends=ends, seed=3, away_from_ref=from_ref, off_policy=off_policy)
    sampler = with_rational_sampler(drawn.on_policy(), parts, on_policy=True)
    to_ref, to_sampler = drawn.ref_logits - drawn.logits, drawn.behavior_logits - drawn.logits
    logits = sampler.logits if on_policy else sampler.logits - to_sampler
    problem = replace(sampler, logits=logits, ref_logits=logits + to_ref)
    return Case(distance, problem, group_size, ends, parts)


SURE = 20
"""One over the probability of the rarer of two tokens: in the other problems and in the probes of a loss of logits no
token is much more likely than one half."""


def _sure_case(on_policy: bool) -> Case:
    """One token out of two, of which the sampler is nearly certain."""
    drawn = autoregressive(2, 1, ends=False, seed=3, away_from_ref=1.0)
    sampler = torch.tensor([[SURE - 1, 1]], dtype=torch.float64).log() - math.log(SURE)
    logits = sampler if on_policy else sampler + torch.tensor([[-0.5, 0.5]], dtype=torch.float64)
    ref_logits = logits + drawn.ref_logits - drawn.logits
    return Case("far", replace(drawn, logits=logits, ref_logits=ref_logits, behavior_logits=sampler), 2, False, SURE)


def sum_over_rows(problem: Problem, members: Tensor, parts: Parts) -> Gradient:
    """The gradient on the parameters, from the derivatives by the tensors of one batch of these groups."""
    each = Parts(*(part[:, None] for part in parts))  # every row as a group of one
    per_row, on_padding = on_parameters(problem, members.reshape(-1, 1), each)
    unit = unit_of(per_row)
    # The gradient is the sum over rows. In a mean over rows, that of one row alone would be `rows` times as large.
    typical = math.sqrt(float((per_row / unit).square().sum()) * len(per_row)) * unit
    return Gradient(per_row.sum(0), math.nan, typical, on_padding)
