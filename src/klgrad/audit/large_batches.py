"""The problems of the limit of large batches, and the gradient of a loss in it.

A gradient that depends on statistics of the batch, such as a mean over all its tokens, differs in batches of 2, 3 and
32 completions. Here one call of the loss has a batch with every group of completions as often as it is likely. Its
gradient is that of the limit, up to rounding.
"""

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ..enumeration import Problem, autoregressive, bandit, population, with_rational_sampler
from .batch import from_problem
from .gradient import Gradient, Parts, of_reference, on_parameters, unit_of
from .problems import DISTANCES, LONG, Case, Lengths
from .subject import Subject

SHAPES = (
    # Vocabulary, length, ends, group size, parts, seed. The batch has parts ^ (length * group size) groups: 64 or 256,
    # few enough for a framework's trainer. With 2 parts the sampler is uniform.
    (3, 2, False, 2, 4, 3),
    (3, 2, True, 2, 4, 3),
    (2, 3, True, 2, 2, 3),
    (2, 2, True, 3, 2, 3),
)

RARE = 24
"""One over the probability of a rare token. On-policy its log π/ref is near -log(24) = -3.2, beyond the dead zone of
k3 clamped at 10 (-2.61); off-policy its importance ratio is near 20, or near 1/400."""

FAR = 12.0
"""log π/ref of a token that ref nearly excludes."""

SHARP = 8
"""One over the probability of the rarer token at some prefixes of the problem with sharp prefixes. π is more certain
there than at the prefixes of the other problems, and less at another prefix of the same problem. Off-policy two rare
tokens have an importance ratio near 50 together, and two others one near 1.24 and 0.76, between common clips."""

LOG_RATIO = 6.0
"""Shift of the logit of the rare token from the sampler to π."""

BATCH_SIZES = (2, 3)
"""Sizes of small batches whose bias is reported beside that of the limit."""

FEW_COMPLETIONS = 4
"""Problems with at most this many completions are enumerated at every one of `BATCH_SIZES`."""


@cache
def limit_cases(on_policy: bool, lengths: Lengths = "all") -> tuple[Case, ...]:
    """All problems of the limit, the standard ones first. They are built once.

    Args:
        on_policy: whether the policy itself is the sampler.
        lengths: `equal` for problems with completions of equal length only.
    """
    found = [
        Case(distance, _rational(shape, distance, on_policy), shape[3], shape[2], parts=shape[4])
        for shape in SHAPES
        for distance in DISTANCES
        if lengths == "all" or not shape[2]
    ]
    long = [] if lengths == "equal" else [_long(on_policy)]
    return (*found, *(_rare(reach, on_policy) for reach in (FAR, -FAR)), _sharp(on_policy), *long)


@cache
def in_pairs(on_policy: bool, lengths: Lengths = "all") -> tuple[Case, ...]:
    """All problems of the limit, in batches of 2 completions."""
    return tuple(replace(case, group_size=2, parts=None) for case in limit_cases(on_policy, lengths))


def at_batch_size(size: int, *, on_policy: bool = True) -> list[Case]:
    """The smallest problems of the limit with single groups of `size` completions as batches."""
    small = [case for case in limit_cases(on_policy) if is_small(case)]
    return [replace(case, group_size=size, parts=None) for case in small]


def is_small(case: Case) -> bool:
    """Whether a problem is among those of `at_batch_size`."""
    return case.varying and len(case.problem.space) <= FEW_COMPLETIONS


def _rational(shape: tuple[int, int, bool, int, int, int], distance: str, on_policy: bool) -> Problem:
    """A random problem around a sampler with rational probabilities: π is away from the sampler, and ref from π.

    The near and the far problem have the same sampler, and so the same mean length: a loss that divides by the mean
    length has the same scale on both.
    """
    vocab, length, ends, _, parts, seed = shape
    from_ref, off_policy = DISTANCES[distance]
    drawn = autoregressive(vocab, length, ends=ends, seed=seed, away_from_ref=from_ref, off_policy=off_policy)
    sampler = with_rational_sampler(drawn.on_policy(), parts, on_policy=True)
    to_ref, to_sampler = drawn.ref_logits - drawn.logits, drawn.behavior_logits - drawn.logits
    logits = sampler.logits if on_policy else sampler.logits - to_sampler
    return replace(sampler, logits=logits, ref_logits=logits + to_ref)


def _long(on_policy: bool) -> Case:
    """Completions of up to 5 tokens, so that a rule for later tokens is detected."""
    problem = _rational((2, LONG, True, 2, 2, 3), "far", on_policy)
    return Case("far", problem, 2, True, f"completions of {LONG} tokens", parts=2)


def _rare(reach: float, on_policy: bool) -> Case:
    """One token out of four. The sampler draws the first rarely, and a log-ratio is beyond every common bound."""
    drawn = bandit(4, seed=2, away_from_ref=0.3)
    rare = drawn.logits.clone()
    rare[0, 0] -= 2 * FAR  # rounded up to one part
    sampler = with_rational_sampler(replace(drawn, behavior_logits=rare), RARE, on_policy=True)
    logits = sampler.logits.clone()
    if not on_policy:
        logits += drawn.logits - drawn.behavior_logits
        logits[0, 0] += LOG_RATIO if reach > 0 else -LOG_RATIO
    ref_logits = logits + drawn.ref_logits - drawn.logits
    ref_logits[0, 1 if reach > 0 else 0] -= reach  # ref excludes a common token, or has little but the rare one
    found = replace(sampler, logits=logits, ref_logits=ref_logits)
    return Case("beyond", found, 2, False, f"log-ratios of {reach:+g}", parts=RARE)


def _sharp(on_policy: bool) -> Case:
    """Two tokens over a vocabulary of two: π is nearly certain of the first, and of the second after one of them."""
    drawn = autoregressive(2, 2, ends=False, seed=3, away_from_ref=DISTANCES["near"][0])
    counts = torch.tensor([[SHARP - 1, 1], [SHARP / 2, SHARP / 2], [1, SHARP - 1]], dtype=torch.float64)
    sampler = counts.log() - math.log(SHARP)
    stale = torch.tensor([[0.1, 0.9], [0.38, 0.62], [0.9, 0.1]], dtype=torch.float64).log()
    logits = sampler if on_policy else stale
    problem = replace(
        drawn, logits=logits, ref_logits=logits + drawn.ref_logits - drawn.logits, behavior_logits=sampler
    )
    return Case("near", problem, 2, False, f"probabilities of {SHARP - 1}/{SHARP}", parts=SHARP)


def limit_gradient(subject: Subject, case: Case, advantage: Tensor) -> Gradient:
    """The gradient of one call of the loss on the batch that holds every group as often as it is likely."""
    assert case.parts is not None
    members = population(case.problem, case.group_size, case.parts)
    parts = of_reference(subject.large(), from_problem(case.problem, members, advantage))
    return sum_over_rows(case.problem, members, parts)


def sum_over_rows(problem: Problem, members: Tensor, parts: Parts) -> Gradient:
    """The gradient on the parameters, from the derivatives by the tensors of one batch of these groups."""
    each = Parts(*(part[:, None] for part in parts))  # every row as a group of one
    per_row, on_padding = on_parameters(problem, members.reshape(-1, 1), each)
    unit = unit_of(per_row)
    # The gradient is the sum over rows. In a mean over rows, that of one row alone would be `rows` times as large.
    typical = math.sqrt(float((per_row / unit).square().sum()) * len(per_row)) * unit
    return Gradient(per_row.sum(0), math.nan, typical, on_padding)
