"""Single batches that ask one question each: about masks, the order of rows, lengths and large vocabularies."""

import math
from dataclasses import fields, replace
from functools import cache

import torch
from torch import Tensor

from ..enumeration import Problem, bandit, population, with_rational_sampler
from ..errors import LossCallError
from ..targets import TO_REFERENCE
from .batch import Batch, advantage_of, from_problem
from .gradient import Parts, evaluate
from .large_batches import limit_cases, sum_over_rows
from .measurement import Measurement
from .numerics import probe_batch
from .problems import Case
from .subject import Subject
from .verdict import MATCH, Comparison

LOG_RATIO = 0.7
"""log π/ref of the token that `probe_batch` moves."""

LARGE_VOCABULARY = 512
"""Tokens of the large vocabulary. A list of the most likely tokens, as in a top-k, has fewer."""


def reads_masked(subject: Subject) -> bool:
    """Whether the gradient of live tokens depends on what is at masked positions."""
    batch = _masked_at((2, 1), (1, 2))  # inside a completion, and at the end of one
    masked = {
        name: torch.where(_like(batch.mask, x), x, x - (2 if name.startswith("ref") else 1)).detach()
        for name, x in ((f.name, getattr(batch, f.name)) for f in fields(batch))
        if x.is_floating_point() and x.dim() > 1 and name != "advantages"
    }
    return not _same_at(batch.mask, _evaluated(subject, batch), _evaluated(subject, replace(batch, **masked).fresh()))


def stumbles_over_gaps(subject: Subject) -> bool:
    """Whether a masked position between live tokens changes their gradient, has one itself, or is an error.

    The same completions without the gap have the masked position at their end. All have it at the same place, since a
    baseline may compare the tokens at one position.
    """
    batch = _masked_at((0, 1), (1, 1), (2, 1))
    moved = replace(batch, **{f.name: _gap_last(getattr(batch, f.name)) for f in fields(batch)}).fresh()
    found, without = _evaluated(subject, batch), _evaluated(subject, moved)
    if found is None or without is None:
        return found is not without
    back = Parts(*map(_gap_last, without))
    is_clean = bool((found.logp[~batch.mask] == 0).all()) or bool((back.logp[~batch.mask] != 0).any())
    return not (is_clean and _same_at(batch.mask, found, back))


def is_finite_if_empty(subject: Subject) -> bool:
    """Whether loss and gradient are finite, and no error, where one completion of a batch has no token."""
    batch = probe_batch(LOG_RATIO, torch.float64)
    mask = batch.mask.clone()
    mask[0] = False
    try:
        loss, parts = evaluate(subject, replace(batch, mask=mask).fresh())
    except LossCallError:
        return False
    return all(bool(x.isfinite().all()) for x in (loss, *parts))


def order_matters(subject: Subject) -> bool:
    """Whether the gradient of a large batch depends on the order of its groups."""
    if subject.stacks or subject.exchangeable:
        return False
    case = next(c for c in limit_cases(on_policy=True) if c.varying and c.distance == "far")
    assert case.parts is not None
    members = population(case.problem, case.group_size, case.parts)
    order = torch.randperm(len(members), generator=torch.Generator().manual_seed(0))
    none = advantage_of(case.problem, "zero")
    listed, mixed = (
        evaluate(subject.large(), from_problem(case.problem, some, none))[1] for some in (members, members[order])
    )
    rows = order[:, None] * case.group_size + torch.arange(case.group_size)
    return not _same_at(None, Parts(*(part[rows.flatten()] for part in listed)), mixed)


def divides_by_length(subject: Subject) -> bool:
    """Whether each completion's gradient is that of a target, divided by its length or by the square of it.

    Near ref, where no clamp is active.
    """
    cases = [c for c in limit_cases(on_policy=True) if c.varying and c.distance == "near"]
    for power in (1, 2):
        found = []
        for case in cases:
            assert case.parts is not None
            members = population(case.problem, case.group_size, case.parts)
            batch = from_problem(case.problem, members, advantage_of(case.problem, "zero"))
            lengths = batch.mask.sum(-1).double() ** power
            parts = Parts(*(_rowwise(lengths, part) * part for part in evaluate(subject.large(), batch)[1]))
            found.append(Measurement(case, sum_over_rows(case.problem, members, parts)))
        if Comparison(found, TO_REFERENCE).match is not None:
            return True
    return False


def in_large_vocabulary(subject: Subject) -> Measurement | None:
    """The gradient of a loss of logits where the vocabulary is large; None for another loss.

    One batch holds each token as often as it is likely. This is exact for a loss whose rows do not influence each
    other; of other losses it is not measured. A framework's trainer has a vocabulary of its own.
    """
    if subject.kind == "framework":
        return None
    problem, parts = _large_vocabulary()
    case = Case("middle", problem, 1, False, f"a vocabulary of {LARGE_VOCABULARY} tokens", parts=parts)
    few = from_problem(problem, torch.arange(3)[:, None], advantage_of(problem, "zero"))
    other = replace(few, **{name: _in_last_row(getattr(few, name)) for name in ("ref_logp", "ref_logits")}).fresh()
    one, moved = _evaluated(subject, few), _evaluated(subject, other)
    if one is None or moved is None or not bool((one.logits != 0).any()):
        return None
    first = torch.tensor([[True], [True], [False]])
    if not _same_at(first, one, moved):
        return None
    members = population(problem, 1, parts)
    batch = from_problem(problem, members, advantage_of(problem, "zero"))
    batch = replace(batch, group=torch.zeros_like(batch.group))  # a mean over the others of a group needs others
    return Measurement(case, sum_over_rows(problem, members, evaluate(subject.large(), batch)[1]))


@cache
def _large_vocabulary() -> tuple[Problem, int]:
    parts = 4 * LARGE_VOCABULARY
    drawn = bandit(LARGE_VOCABULARY, seed=0, away_from_ref=1.0)
    sampler = with_rational_sampler(drawn.on_policy(), parts, on_policy=True)
    return replace(sampler, ref_logits=sampler.logits + drawn.ref_logits - drawn.logits), parts


def _masked_at(*positions: tuple[int, int]) -> Batch:
    """Three completions of three tokens, without those at some positions."""
    batch = probe_batch(LOG_RATIO, torch.float64)
    mask = batch.mask.clone()
    for position in positions:
        mask[position] = False
    return replace(batch, mask=mask).fresh()


def _evaluated(subject: Subject, batch: Batch) -> Parts | None:
    """The derivatives, or None if the loss raises an error."""
    try:
        return evaluate(subject, batch)[1]
    except LossCallError:
        return None


def _same_at(mask: Tensor | None, one: Parts | None, other: Parts | None) -> bool:
    """Whether derivatives are the same up to rounding, at all positions or at those of a mask."""
    if one is None or other is None:
        return one is other
    for a, b in zip(one, other, strict=True):
        if mask is not None:
            a, b = (torch.where(_like(mask, x), x, 0) for x in (a, b))
        a, b = a.nan_to_num(), b.nan_to_num()
        if float((a - b).norm()) > MATCH * max(float(a.norm()), float(b.norm()), math.ulp(0.0)):
            return False
    return True


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask if x.dim() == mask.dim() else mask[..., None]


def _rowwise(per_row: Tensor, x: Tensor) -> Tensor:
    return per_row.reshape(-1, *[1] * (x.dim() - 1))


def _gap_last(x: Tensor) -> Tensor:
    """The second and the third column in the other order; a tensor without columns stays as it is."""
    return x if x.dim() == 1 else x.detach()[:, [0, 2, 1]]


def _in_last_row(x: Tensor) -> Tensor:
    """Other log-probs or logits in the last row."""
    moved = x.detach().clone()
    moved[-1] = moved[-1].flip(-1) if x.dim() == 3 else moved[-1] - 1
    return moved
