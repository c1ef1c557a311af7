"""Three tabular policies (π, ref, μ) on one space of completions: all that an expectation needs.

The parameters θ are the logits of π at every prefix. That loses no generality: a loss reaches any other
parametrisation through these logits, so an expected gradient that is right here is right there, by the
chain rule.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .space import CompletionSpace


@dataclass(frozen=True, eq=False)
class Problem:
    """Logits (P, V) in float64 of the policy, the reference and the sampler, over `space`."""

    space: CompletionSpace
    logits: Tensor
    ref_logits: Tensor
    behavior_logits: Tensor

    def on_policy(self) -> "Problem":
        """The same problem with π itself as the sampler."""
        return replace(self, behavior_logits=self.logits)

    def with_logits(self, logits: Tensor) -> "Problem":
        """The same problem at another θ; give it logits that require grad to differentiate towards them."""
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
        """(P,) how often a policy visits each prefix."""
        reached = self.log_probs(logits).cumsum(-1) - self.log_probs(logits)
        # Every completion through a prefix shares its probability so far; one of them tells it.
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
        """(P,) to (N, T): the value at the prefix before each token; 0 where masked."""
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
        """Place (N, T, V) into the block of θ that belongs to each token's prefix."""
        n, t, v = per_token.shape
        full = torch.zeros(n, t, self.space.prefixes, v, dtype=self.logits.dtype)
        index = self.space.prefix[..., None, None].expand(n, t, 1, v)
        full.scatter_(2, index, torch.where(self.space.mask[..., None], per_token, 0)[:, :, None].to(full.dtype))
        return full.flatten(2)


def autoregressive(
    vocab: int, length: int, *, ends: bool, seed: int, away_from_ref: float, off_policy: float = 0.5
) -> Problem:
    """A random problem whose lengths vary if `ends`.

    Args:
        vocab: tokens, the end token among them.
        length: most tokens of a completion.
        ends: whether token 0 ends a completion early.
        seed: of the random logits.
        away_from_ref: standard deviation of ref's logits from π's.
        off_policy: standard deviation of the sampler's logits from π's.
    """
    space = CompletionSpace(vocab, length, ends)
    generator = torch.Generator().manual_seed(seed)
    noise = lambda: torch.randn(space.prefixes, vocab, generator=generator, dtype=torch.float64)
    logits = noise()
    return Problem(space, logits, logits + away_from_ref * noise(), logits + off_policy * noise())


def bandit(arms: int, *, seed: int, away_from_ref: float, off_policy: float = 0.5) -> Problem:
    """One token and no more: a single categorical choice."""
    return autoregressive(arms, 1, ends=False, seed=seed, away_from_ref=away_from_ref, off_policy=off_policy)
