"""The problems of every audit, and the tensors that it gives to a loss."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor

from ..core.divergences import Divergence
from ..core.rollout import Rollout
from ..enumeration import Problem, autoregressive, population, target_gradients, with_rational_sampler

PADDING_LOGP, PADDING_REF_LOGP = -1.25, (-2.5, -0.25)
"""The log-probs where the mask is 0: plausible and unequal, so that a loss that ignores the mask is detected. The two
of ref take turns between tokens and between completions, so that no clamp or filter of one sign hides it.

The logits there are those of the first prefix, in which π and ref differ too.
"""

Advantages = Literal["zero", "random"]
"""The advantages that a loss receives: 0 for every completion, or random numbers."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch of completions: (B, T) tensors, `rewards` and `group` (B,), and logits (B, T, V).

    `logp`, the two KLs and `logits` are autograd leaves. They are independent of each other: the gradient of a loss is
    the sum of what reaches each of them. `tokens` are the sampled ids, 0 where masked.
    """

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    behavior_logp: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor
    group: Tensor
    token_reverse_kl: Tensor
    token_forward_kl: Tensor
    logits: Tensor
    ref_logits: Tensor
    behavior_logits: Tensor
    tokens: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors that a loss may be differentiated by."""
        return self.logp, self.token_reverse_kl, self.token_forward_kl, self.logits

    @property
    def group_size(self) -> int:
        """Completions per group, the same for all groups of a batch."""
        return int((self.group == self.group[0]).sum())

    def fresh(self) -> "Batch":
        """The same values in new leaf tensors."""
        names = ("logp", "token_reverse_kl", "token_forward_kl", "logits")
        return replace(self, **{name: getattr(self, name).detach().clone().requires_grad_() for name in names})

    def copy(self) -> "Batch":
        """Copies of the tensors, through which gradients flow back to the leaves of this batch."""
        return Batch(**{name: x.clone() for name, x in vars(self).items()})

    def at_reference(self) -> "Batch":
        """The same batch with the reference set to the policy, so that every KL is zero."""
        none = torch.zeros_like(self.logp)
        same = {"ref_logp": self.logp.detach(), "ref_logits": self.logits.detach()}
        return replace(self, **same, token_reverse_kl=none, token_forward_kl=none)

    def with_logits_times(self, factor: float) -> "Batch":
        """The same batch with all logits multiplied by a factor."""
        names = ("logits", "ref_logits", "behavior_logits")
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def divergence(self, generator: Divergence) -> Tensor:
        """(B, T) a divergence over the vocabulary, by the logits."""
        return generator.over(self.logits.log_softmax(-1), self.ref_logits.log_softmax(-1))

    def rollout(self, generator: Divergence | None = None) -> Rollout:
        """The batch as the input of a `KLTerm` or a `Cell`, with one more divergence over the vocabulary if asked."""
        return Rollout(
            self.logp,
            self.ref_logp,
            self.mask,
            behavior_logp=self.behavior_logp,
            group=self.group,
            token_reverse_kl=self.token_reverse_kl,
            token_forward_kl=self.token_forward_kl,
            token_divergence=None if generator is None else self.divergence(generator),
        )


def advantage_of(problem: Problem, kind: Advantages) -> Tensor:
    """(N,) an advantage for each completion of a problem."""
    n = len(problem.space)
    if kind == "zero":
        return torch.zeros(n, dtype=torch.float64)
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def from_problem(problem: Problem, members: Tensor, advantage: Tensor) -> Batch:
    """(M, G) groups of completion indices, stacked to M·G rows; `advantage` is (N,), one per completion."""
    rows = members.flatten()
    mask = problem.space.mask
    padded = lambda x, fill: torch.where(mask, x, fill)[rows]
    turn = (torch.arange(len(mask))[:, None] + torch.arange(mask.shape[1])) % 2
    behavior = padded(problem.behavior_logp, PADDING_LOGP)
    return Batch(
        logp=padded(problem.logp, PADDING_LOGP),
        ref_logp=padded(problem.ref_logp, torch.tensor(PADDING_REF_LOGP, dtype=torch.float64)[turn]),
        old_logp=behavior,
        behavior_logp=behavior,
        mask=mask[rows],
        advantages=advantage[rows, None].expand(-1, mask.shape[1]).clone(),
        rewards=advantage[rows],
        group=torch.arange(len(members)).repeat_interleave(members.shape[1]),
        token_reverse_kl=problem.at_tokens(problem.prefix_kl())[rows],
        token_forward_kl=problem.at_tokens(problem.prefix_forward_kl())[rows],
        logits=problem.logits[problem.space.prefix][rows],
        ref_logits=problem.ref_logits[problem.space.prefix][rows],
        behavior_logits=problem.behavior_logits[problem.space.prefix][rows],
        tokens=problem.space.tokens[rows],
    ).fresh()


# The problems: random, small, and different from each other.


@dataclass(frozen=True, eq=False)
class Case:
    """A problem with the size of the groups drawn on it.

    A batch is one group, and the audit sums over all groups. With `parts` it is the limit of large batches instead: one
    batch holds every group as often as it is likely (`klgrad.enumeration.population`).
    """

    distance: str
    problem: Problem
    group_size: int
    parts: int | None = None

    @property
    def name(self) -> str:
        """A description that is unique among the problems."""
        space = self.problem.space
        groups = f"groups of {self.group_size}" + (" in one large batch" if self.parts else "")
        return f"{self.distance}, {'varying' if space.ends else 'fixed'} length, vocabulary {space.vocab}, {groups}"

    @cached_property
    def members(self) -> Tensor:
        """(M, G) every group as often as it is likely, in the limit of large batches."""
        assert self.parts is not None
        return population(self.problem, self.group_size, self.parts)

    def batch(self, advantages: Advantages = "zero") -> Batch:
        """The batch that holds all of them."""
        return from_problem(self.problem, self.members, advantage_of(self.problem, advantages))

    @cached_property
    def targets(self) -> Mapping[str, Tensor]:
        """The gradient of every target on this problem: on the logits, and 0 on the padding."""
        padding = self.problem.logits.new_zeros(self.problem.space.length)
        return {name: torch.cat([t, padding]) for name, t in target_gradients(self.problem).items()}

    def on_policy(self) -> "Case":
        """The same case with the policy itself as the sampler."""
        return replace(self, problem=self.problem.on_policy())

    def describe(self) -> dict[str, object]:
        """Plain data for JSON."""
        space = self.problem.space
        return {
            "name": self.name,
            "distance_to_reference": self.distance,
            "vocabulary": space.vocab,
            "length": space.length,
            "lengths_vary": space.ends,
            "completions": len(space),
            "group_size": self.group_size,
            "groups": len(space) ** self.group_size,
        }


SHAPES = (
    # Vocabulary, length, ends, group size, seed. Pairs on the larger spaces, triples on the smaller: of a pair, a
    # division by the standard deviation of the group keeps only the sign.
    (3, 2, False, 2, 19),
    (3, 3, True, 2, 1),
    (2, 2, False, 3, 75),
    (2, 3, True, 3, 1620),
)

DISTANCES = {"near": (0.2, 0.5), "far": (2.5, 2.0)}
"""Standard deviation of the logits of ref, and of the sampler, from those of π. Near ref, reverse and forward KL almost
agree; far from it they do not."""


@cache
def cases(on_policy: bool = True) -> tuple[Case, ...]:
    """All problems. They are built once.

    Args:
        on_policy: whether the policy itself is the sampler.
    """
    if on_policy:
        return tuple(case.on_policy() for case in cases(False))
    return tuple(
        Case(
            distance,
            autoregressive(vocab, length, ends=ends, seed=seed, away_from_ref=from_ref, off_policy=off_policy),
            group_size,
        )
        for vocab, length, ends, group_size, seed in SHAPES
        for distance, (from_ref, off_policy) in DISTANCES.items()
    )


# The problems of the limit of large batches. A gradient that depends on statistics of the batch, such as a mean over
# all its tokens, differs in batches of 2, 3 and 32 completions. Here one batch has every group of completions as often
# as it is likely: the gradient of the loss on it is that of the limit, up to rounding.

PROOF_SHAPES = (
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
        return tuple(rational_case(*shape, on_policy=on_policy) for shape in PROOF_SHAPES if shape[-1] == 2)
    return (*(rational_case(*shape, on_policy=on_policy) for shape in PROOF_SHAPES), _sure_case(on_policy))


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
    return Case(distance, problem, group_size, parts)


SURE = 20
"""One over the probability of the rarer of two tokens: in the other problems and in the probes of a loss of logits no
token is much more likely than one half."""


def _sure_case(on_policy: bool) -> Case:
    """One token out of two, of which the sampler is nearly certain."""
    drawn = autoregressive(2, 1, ends=False, seed=3, away_from_ref=1.0)
    sampler = torch.tensor([[SURE - 1, 1]], dtype=torch.float64).log() - math.log(SURE)
    logits = sampler if on_policy else sampler + torch.tensor([[-0.5, 0.5]], dtype=torch.float64)
    ref_logits = logits + drawn.ref_logits - drawn.logits
    return Case("far", replace(drawn, logits=logits, ref_logits=ref_logits, behavior_logits=sampler), 2, SURE)
