"""Small problems whose completions are all listed, and the exact gradient of a loss on them.

The problems differ from those of the audit: other vocabularies, lengths and probabilities, batches of two groups, and
masks with holes. No code of the package is used. The gradient of a target is written out from its definition; only the
loss itself is evaluated by torch.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import compositions
import numpy as np
import torch

SAME = 1e-6
"""Relative distance up to which two gradients are the same. Rounding makes about 1e-12; a difference that matters is
above 1e-5, which the audit counts as zero."""

ROUNDING = 1e-8
"""A mean below this share of the gradients that it is the mean of is not resolved."""

PADDING = (-1.7, -0.6, -2.9)
"""Log-probs of π, ref and the sampler where the mask is 0."""

Array = Any  # np.ndarray, whose stubs are not needed here


@dataclass(frozen=True, eq=False)
class World:
    """All completions of a small problem, and three policies over them, as tables of log-probs (prefixes, vocabulary).

    A column `hole` holds a token that the policy did not choose: it is masked, and no prefix depends on it.
    """

    tokens: Array
    mask: Array
    prefix: Array
    policy: Array
    reference: Array
    sampler: Array
    varying: bool

    def of(self, table: Array) -> Array:
        """(N, T) the log-prob of every token, 0 where masked."""
        return np.where(self.mask, table[self.prefix, self.tokens], 0.0)

    @cached_property
    def probability(self) -> Array:
        """(N,) that of each completion under the sampler."""
        return np.exp(self.of(self.sampler).sum(1))

    @cached_property
    def scores(self) -> Array:
        """(N, T, P·V) the gradient of log π of each token by the logits of every prefix."""
        n, t = self.tokens.shape
        found = np.zeros((n, t, *self.policy.shape))
        for i, s in zip(*np.nonzero(self.mask), strict=True):
            p = self.prefix[i, s]
            found[i, s, p] = -np.exp(self.policy[p])
            found[i, s, p, self.tokens[i, s]] += 1.0
        return found.reshape(n, t, -1)

    def visits(self, table: Array) -> Array:
        """(P,) how likely a policy is to come to each prefix."""
        logp, found = self.of(table), np.zeros(len(table))
        likely = np.exp(logp.sum(1))
        for i, s in zip(*np.nonzero(self.mask), strict=True):
            found[self.prefix[i, s]] += likely[i]
        return found

    @cached_property
    def targets(self) -> dict[str, Array]:
        """By name, the gradient of every target by the logits."""
        to_reference = self._targets(self.reference)
        to_sampler = self._targets(self.sampler)
        moved = ("forward-kl-sequence", "forward-kl-token", "reverse-kl-sequence", "reverse-kl-token")
        renamed = {name.replace("-kl-", "-kl-sampler-"): to_sampler[name] for name in moved}
        return to_reference | renamed | {"reverse-kl-sampler-token-sampler": to_sampler["reverse-kl-token-sampler"]}

    def _targets(self, anchor: Array) -> dict[str, Array]:
        pi, log = np.exp(self.policy), self.policy - anchor
        reverse = pi * (log - (pi * log).sum(1, keepdims=True))  # of each prefix's KL(π‖anchor), by its logits
        forward = pi - np.exp(anchor)
        own, others, anchors = (self.visits(x)[:, None] for x in (self.policy, self.sampler, anchor))
        each, drawn, mine = (
            self.of(self.policy) - self.of(anchor),
            self.probability,
            np.exp(self.of(self.policy).sum(1)),
        )
        on_scores = lambda weight, c: np.einsum("n,nt,ntp->p", weight, c, self.scores)
        whole = np.broadcast_to(each.sum(1, keepdims=True), each.shape)
        return {
            "reverse-kl-sequence": on_scores(mine, whole),
            "reverse-kl-token": (own * reverse).ravel(),
            "reverse-kl-token-sampler": (others * reverse).ravel(),
            "forward-kl-token": (own * forward).ravel(),
            "forward-kl-token-sampler": (others * forward).ravel(),
            "forward-kl-sequence": (anchors * forward).ravel(),
            "k3-token": on_scores(drawn, 1 - np.exp(-each)),
            "squared-token": on_scores(drawn, each),
            "squared-sequence": on_scores(drawn, whole),
        }

    def batches(self, members: Array, size: int) -> compositions.Batches:
        """(M, R) completions as the tensors of M batches, with groups of `size` rows."""
        column = lambda table, fill: torch.tensor(np.where(self.mask, table[self.prefix, self.tokens], fill)[members])
        # Logits need not be normalised.
        logits, ref_logits = (torch.tensor((x + 0.7)[self.prefix][members]) for x in (self.policy, self.reference))
        return compositions.Batches(
            column(self.policy, PADDING[0]).requires_grad_(),
            column(self.reference, PADDING[1]),
            column(self.sampler, PADDING[0 if self.sampler is self.policy else 2]),
            torch.tensor(self.mask[members]),
            size,
            logits.requires_grad_(),
            ref_logits,
        )


TO_REFERENCE = (
    "reverse-kl-sequence",
    "reverse-kl-token",
    "forward-kl-token",
    "forward-kl-sequence",
)
"""The targets that differ on fresh samples."""


def tree(vocab: int, steps: int, *, ends: bool, hole: int | None = None) -> tuple[Array, Array, Array, int]:
    """Tokens, mask and prefixes (N, T) of all completions, and the number of prefixes; the last token ends."""
    completions = [
        y
        for n in (range(1, steps + 1) if ends else [steps])
        for y in product(range(vocab), repeat=n)
        if not ends or (vocab - 1 not in y[:-1] and (n == steps or y[-1] == vocab - 1))
    ]
    numbers: dict[tuple[int, ...], int] = {}
    columns = [c for c in range(steps + (hole is not None)) if c != hole]
    tokens, mask, prefix = (np.zeros((len(completions), columns[-1] + 1), dtype=kind) for kind in (int, bool, int))
    for i, y in enumerate(completions):
        for s, token in enumerate(y):
            at = columns[s]
            tokens[i, at], mask[i, at], prefix[i, at] = token, True, numbers.setdefault(y[:s], len(numbers))
    return tokens, mask, prefix, len(numbers)


def normalised(logits: Array) -> Array:
    """Log-probs over the last axis."""
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def apart(rng: np.random.Generator, table: Array, reach: float) -> Array:
    """Another policy, with log-ratios up to about `reach` in size."""
    away = rng.uniform(-1, 1, table.shape)
    return normalised(table + reach / np.abs(away).max() * away)


@dataclass(frozen=True, eq=False)
class Case:
    """A world, its batches (M, R) with their probabilities, and the rows of a group.

    Cases with one `family` have the same scale: the same shape, and in large batches the same sampler. `large` is one
    batch with every group as often as it is likely.
    """

    world: World
    members: Array
    weights: Array
    group: int
    family: str
    large: bool = False

    @property
    def has_hole(self) -> bool:
        """Whether a masked position is before a live one."""
        return bool((self.world.mask[:, 1:] & ~self.world.mask[:, :-1]).any())

    @property
    def shape(self) -> str:
        """As in `AuditResult.scale_by_shape`."""
        lengths = "varying" if self.world.varying else "fixed"
        return f"{self.members.shape[1]} x {self.world.tokens.shape[1]}, {lengths}"

    def fresh(self) -> "Case":
        """The same with the sampler as the policy: ref keeps its log-ratios to it."""
        world = self.world
        reference = normalised(world.reference - world.policy + world.sampler)
        return replace(self, world=replace(world, policy=world.sampler, reference=reference))

    def twice(self) -> "Case":
        """A large batch of two halves, each of which has every group as often as it is likely."""
        return replace(self, members=np.concatenate([self.members, self.members[:, ::-1]], 1))


SMALL = (
    # Vocabulary, steps, ends, rows, rows of a group, hole.
    (5, 1, False, 2, 2, None),
    (2, 2, False, 3, 3, None),
    (4, 2, False, 2, 2, None),
    (2, 3, False, 2, 2, None),
    (3, 2, True, 2, 2, None),
    (2, 3, True, 3, 3, None),
    (3, 3, True, 2, 2, None),
    (2, 4, True, 2, 2, None),
    (2, 2, True, 4, 2, None),
    (2, 2, False, 2, 2, 1),
    (2, 3, True, 2, 2, 1),
)

LARGE = (
    # Vocabulary, steps, ends, rows of a group, parts of the sampler's probabilities (a choice for each prefix).
    (2, 1, False, 2, ((49, 1),)),
    (3, 1, False, 2, ((45, 4, 1),)),
    (2, 2, True, 2, ((7, 1), (3, 5))),
    (2, 3, True, 2, ((3, 1), (1, 3), (2, 2))),
    (4, 2, False, 3, ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2))),
    (2, 2, False, 2, ((1, 7), (7, 1), (4, 4))),
    # For losses without statistics of groups. Fewer rows are enough, so that tokens may be rarer.
    (2, 1, False, 1, ((1, 1999),)),
    (3, 2, False, 1, ((62, 1, 1), (1, 60, 3))),
    (2, 2, True, 1, ((62, 1), (2, 61))),
)

DISTANCES = ((0.4, 0.3), (2.0, 1.0), (6.0, 2.5), (2.5, 4.5))
"""Shifts of the logits from π to ref and to the sampler: log π/ref comes to 10, and π/μ of a token to thousands."""

SPREAD = (0.8, 1.5, 2.5, 1.2)
"""Of the logits of π: the third policy has probabilities up to 0.98."""


@cache
def small_cases() -> tuple[Case, ...]:
    """Every group on small problems."""
    rng, found = np.random.default_rng(20), []
    for vocab, steps, ends, rows, group, hole in SMALL:
        tokens, mask, prefix, prefixes = tree(vocab, steps, ends=ends, hole=hole)
        for (to_reference, to_sampler), spread in zip(DISTANCES, SPREAD, strict=True):
            policy = normalised(rng.uniform(-spread, spread, (prefixes, vocab)))
            reference, sampler = apart(rng, policy, to_reference), apart(rng, policy, to_sampler)
            world = World(tokens, mask, prefix, policy, reference, sampler, ends)
            if spread == max(SPREAD):  # π all but excludes a token that ref has: log π/ref is -5
                world = replace(world, policy=reference, reference=policy, sampler=apart(rng, reference, to_sampler))
            members = np.array(list(product(range(len(tokens)), repeat=rows)))
            weights = world.probability[members].prod(1)
            lengths = "varying" if ends else "fixed"
            family = f"{rows} rows in groups of {group}, {tokens.shape[1]} tokens, {lengths}, hole {hole}"
            found.append(Case(world, members, weights, group, family))
    return tuple(found)


@cache
def large_cases() -> tuple[Case, ...]:
    """Large batches, in random order."""
    rng, found = np.random.default_rng(21), []
    for number, (vocab, steps, ends, group, parts) in enumerate(LARGE):
        tokens, mask, prefix, prefixes = tree(vocab, steps, ends=ends)
        shares = np.array([parts[i % len(parts)] for i in range(prefixes)], dtype=float)
        sampler = np.log(shares / shares.sum(1, keepdims=True))
        for k, (to_reference, to_sampler) in enumerate(DISTANCES):
            policy = apart(rng, sampler, to_sampler)
            if k == len(DISTANCES) - 1:  # π likes what the sampler all but excludes
                policy = apart(rng, np.zeros_like(sampler), 1.0)
            world = World(tokens, mask, prefix, policy, apart(rng, policy, to_reference), sampler, ends)
            counts = np.rint(world.probability * shares[0].sum() ** steps).astype(int)
            rows = np.repeat(np.arange(len(tokens)), counts)
            members = np.array(list(product(rows, repeat=group)))
            members = members[rng.permutation(len(members))].reshape(1, -1)
            found.append(Case(world, members, np.ones(1), group, f"large {number}", large=True))
    return tuple(found)


@cache
def all_cases(*, fresh: bool) -> tuple[Case, ...]:
    """Small and large batches, of the policy's own samples or of the sampler's."""
    found = (*small_cases(), *large_cases())
    if not fresh:
        return found
    # The policy is then the sampler. In small batches it is the policy that is kept, since it has the wanted range.
    own = [replace(c, world=replace(c.world, sampler=c.world.policy)) for c in found if not c.large]
    own = [replace(c, weights=c.world.probability[c.members].prod(1)) for c in own]
    return (*own, *(c.fresh() for c in found if c.large))


@dataclass(frozen=True, eq=False)
class Measured:
    """The expected gradient of a loss on one case: on the logits, then on masked positions.

    Attributes:
        case: where.
        mean: the gradient.
        typical: the mean size of the gradients that it is the mean of.
    """

    case: Case
    mean: Array
    typical: float

    @property
    def is_finite(self) -> bool:
        """Whether the gradient is a number on every batch."""
        return bool(np.isfinite(self.mean).all() and math.isfinite(self.typical))

    @property
    def is_zero(self) -> bool:
        """Whether the expected gradient is zero, relative to those of single batches."""
        return bool(np.linalg.norm(self.mean) <= SAME * self.typical)

    @property
    def on_padding(self) -> bool:
        """Whether masked positions have a gradient in expectation."""
        return bool(np.abs(self.mean[self.case.world.scores.shape[2] :]).max() > 0)

    def target(self, name: str) -> Array:
        """The gradient of a target, which has none on masked positions."""
        found = self.case.world.targets[name]
        return np.concatenate([found, np.zeros(len(self.mean) - len(found))])

    def along(self, name: str) -> tuple[float, float]:
        """The multiple of a target that is nearest, and the relative distance to it."""
        t, size = self.target(name), max(np.linalg.norm(self.mean), ROUNDING * self.typical)
        scale = float(self.mean @ t / (t @ t))
        return scale, float(np.linalg.norm(self.mean - scale * t) / size) if size else 1.0


def measure(recipe: compositions.Recipe, case: Case) -> Measured:
    """Sum the gradient of a loss over all batches of a case."""
    world, x = case.world, case.world.batches(case.members, case.group)
    loss = compositions.evaluate(recipe, x).sum()
    if loss.requires_grad:  # a composition may have no gradient at all
        torch.autograd.backward(loss)
    on_logp = np.zeros(case.members.shape + world.tokens.shape[1:]) if x.logp.grad is None else x.logp.grad.numpy()
    live = world.mask[case.members]
    each = np.einsum("mrt,mrtp->mrp", np.where(live, on_logp, 0), world.scores[case.members])
    padding = np.where(live, 0, on_logp)
    if x.logits is not None and x.logits.grad is not None:
        by_logits = x.logits.grad.numpy()
        prefixes, vocab = world.policy.shape
        place = np.where(live[..., None], by_logits, 0)
        table = np.zeros((*case.members.shape, prefixes, vocab))
        m, r = np.indices(case.members.shape)
        for t in range(world.tokens.shape[1]):
            table[m, r, world.prefix[case.members, t]] += place[:, :, t]
        each = each + table.reshape(each.shape)
        padding = padding + np.where(live, 0, by_logits @ np.arange(1, vocab + 1))
    each = np.concatenate([each, padding], -1)
    if case.large:
        return Measured(case, each.sum((0, 1)), float(np.linalg.norm(each, axis=-1).sum()))
    rows = each.sum(1)
    return Measured(case, case.weights @ rows, float(case.weights @ np.linalg.norm(rows, axis=-1)))
