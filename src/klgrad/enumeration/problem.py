"""Three tabular policies (π, ref, μ) on one space of completions, which define every expectation.

The parameters θ are the logits of π at every prefix. This loses no generality: in any other parametrisation the
gradient passes through these logits, so by the chain rule an expected gradient that is correct here is correct there.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .space import CompletionSpace


@dataclass(frozen=True, eq=False)
class Problem:
    """A policy π, a reference and a sampler μ over one space of completions.

    Attributes:
        space: the completions.
        logits: (P, V) logits of π at every prefix, in float64.
        ref_logits: those of the reference.
        behavior_logits: those of the sampler.

    Example:
        >>> from klgrad.enumeration import autoregressive
        >>> problem = autoregressive(2, 2, ends=False, seed=0, away_from_ref=0.5)
        >>> problem.logp.shape
        torch.Size([4, 2])
        >>> round(float(problem.probability.sum()), 9)
        1.0
    """

    space: CompletionSpace
    logits: Tensor
    ref_logits: Tensor
    behavior_logits: Tensor

    def on_policy(self) -> "Problem":
        """The same problem with π itself as the sampler."""
        return replace(self, behavior_logits=self.logits)

    def with_logits(self, logits: Tensor) -> "Problem":
        """The same problem with other logits of π; pass logits that require grad to differentiate by them."""
        return replace(self, logits=logits)

    def log_probs(self, logits: Tensor) -> Tensor:
        """(N, T) log-prob of each token of each completion under a table of logits; 0 where masked."""
        table = torch.log_softmax(logits, -1)
        picked = table[self.space.prefix, self.space.tokens]
        return torch.where(self.space.mask, picked, 0)

    @cached_property
    def logp(self) -> Tensor:
        """(N, T) log π."""
        return self.log_probs(self.logits)

    @cached_property
    def ref_logp(self) -> Tensor:
        """(N, T) log ref."""
        return self.log_probs(self.ref_logits)

    @cached_property
    def behavior_logp(self) -> Tensor:
        """(N, T) log μ."""
        return self.log_probs(self.behavior_logits)

    @cached_property
    def probability(self) -> Tensor:
        """(N,) probability of each completion under the sampler μ."""
        return self.behavior_logp.sum(-1).exp()

    def prefix_probability(self, logits: Tensor) -> Tensor:
        """(P,) probability that a policy with these logits visits each prefix."""
        reached = self.log_probs(logits).cumsum(-1) - self.log_probs(logits)
        # All completions through a prefix have the same probability up to it, so one of them is enough.
        visits = torch.zeros(self.space.prefixes, dtype=logits.dtype)
        where = self.space.mask
        return visits.index_put((self.space.prefix[where],), reached[where].exp())

    def prefix_kl(self) -> Tensor:
        """(P,) KL(π‖ref) of the next token at each prefix."""
        p, q = torch.log_softmax(self.logits, -1), torch.log_softmax(self.ref_logits, -1)
        return (p.exp() * (p - q)).sum(-1)

    def prefix_forward_kl(self) -> Tensor:
        """(P,) KL(ref‖π) of the next token at each prefix."""
        p, q = torch.log_softmax(self.logits, -1), torch.log_softmax(self.ref_logits, -1)
        return (q.exp() * (q - p)).sum(-1)

    def at_tokens(self, per_prefix: Tensor) -> Tensor:
        """(P,) to (N, T): for each token, the value at the prefix before it; 0 where masked."""
        return torch.where(self.space.mask, per_prefix[self.space.prefix], 0)

    @cached_property
    def scores(self) -> Tensor:
        """(N, T, P·V) ∇_θ log π of each token; 0 where masked."""
        return self._at_own_prefix(
            torch.nn.functional.one_hot(self.space.tokens, self.space.vocab) - self._probs()[self.space.prefix]
        )

    @cached_property
    def kl_gradients(self) -> Tensor:
        """(N, T, P·V) ∇_θ KL(π‖ref) at the prefix before each token."""
        p, q = torch.log_softmax(self.logits, -1), torch.log_softmax(self.ref_logits, -1)
        return self._at_own_prefix((p.exp() * (p - q - self.prefix_kl()[:, None]))[self.space.prefix])

    @cached_property
    def forward_kl_gradients(self) -> Tensor:
        """(N, T, P·V) ∇_θ KL(ref‖π) at the prefix before each token."""
        return self._at_own_prefix((self._probs() - torch.softmax(self.ref_logits, -1))[self.space.prefix])

    def _probs(self) -> Tensor:
        return torch.softmax(self.logits, -1)

    def _at_own_prefix(self, per_token: Tensor) -> Tensor:
        """Put (N, T, V) into the block of θ that belongs to the prefix of each token."""
        n, t, v = per_token.shape
        full = torch.zeros(n, t, self.space.prefixes, v, dtype=self.logits.dtype)
        index = self.space.prefix[..., None, None].expand(n, t, 1, v)
        full.scatter_(2, index, torch.where(self.space.mask[..., None], per_token, 0)[:, :, None].to(full.dtype))
        return full.flatten(2)


def autoregressive(
    vocab: int, length: int, *, ends: bool, seed: int, away_from_ref: float, off_policy: float = 0.5
) -> Problem:
    """Make a random problem over completions of several tokens.

    Args:
        vocab: number of tokens, including the end token.
        length: most tokens in a completion.
        ends: whether token 0 ends a completion early, so that lengths vary.
        seed: seed of the random logits.
        away_from_ref: standard deviation of the logits of ref from those of π.
        off_policy: standard deviation of the logits of the sampler from those of π.

    Returns:
        The problem; the same arguments give the same problem.

    Example:
        >>> from klgrad.enumeration import autoregressive
        >>> len(autoregressive(3, 2, ends=False, seed=0, away_from_ref=1.0).space)
        9
    """
    space = CompletionSpace(vocab, length, ends)
    generator = torch.Generator().manual_seed(seed)
    noise = lambda: torch.randn(space.prefixes, vocab, generator=generator, dtype=torch.float64)
    logits = noise()
    return Problem(space, logits, logits + away_from_ref * noise(), logits + off_policy * noise())


def bandit(arms: int, *, seed: int, away_from_ref: float, off_policy: float = 0.5) -> Problem:
    """Make a random problem over completions of one token.

    Args:
        arms: number of tokens.
        seed: seed of the random logits.
        away_from_ref: standard deviation of the logits of ref from those of π.
        off_policy: standard deviation of the logits of the sampler from those of π.

    Returns:
        The problem.

    Example:
        >>> from klgrad.enumeration import bandit
        >>> bandit(5, seed=0, away_from_ref=1.0).logits.shape
        torch.Size([1, 5])
    """
    return autoregressive(arms, 1, ends=False, seed=seed, away_from_ref=away_from_ref, off_policy=off_policy)
