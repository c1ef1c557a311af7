"""Problems small enough to sum over every completion, and the exact gradients of the targets on them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .errors import ProblemError
from .targets import TargetName

# Every completion over a small vocabulary, and every prefix at which a policy chooses a token.

END = 0
"""The end token, if there is one. It ends a completion and is part of it."""

MAX_COMPLETIONS = 100_000
"""Largest space that is built; beyond it exact sums take minutes."""


@dataclass(frozen=True, eq=False)
class CompletionSpace:
    """All completions of at most `length` tokens; with `ends`, token 0 ends a completion early, so that lengths vary.

    Args:
        vocab: number of tokens, at least 2.
        length: most tokens in a completion.
        ends: whether token 0 ends a completion.

    Attributes:
        tokens: (N, T) token ids, 0 where masked.
        mask: (N, T) live tokens.
        prefix: (N, T) index of the prefix before each token, in 0..prefixes-1; 0 where masked.
        prefixes: number of distinct prefixes.

    Example:
        >>> from klgrad.enumeration import CompletionSpace
        >>> space = CompletionSpace(vocab=2, length=2, ends=True)
        >>> len(space), space.prefixes
        (3, 2)
        >>> space.mask.sum(-1).tolist()
        [1, 2, 2]
    """

    vocab: int
    length: int
    ends: bool
    tokens: Tensor = field(init=False)
    mask: Tensor = field(init=False)
    prefix: Tensor = field(init=False)
    prefixes: int = field(init=False)

    def __post_init__(self) -> None:
        if (most := self.vocab**self.length) > MAX_COMPLETIONS:
            raise ProblemError(
                f"at most {MAX_COMPLETIONS} completions",
                f"{self.vocab} tokens ^ length {self.length} = {most}",
                "use shorter completions: the number of terms grows exponentially with the length",
            )
        done: list[tuple[int, ...]] = []
        index: dict[tuple[int, ...], int] = {}
        open_prefixes: list[tuple[int, ...]] = [()]
        for step in range(self.length):
            grown = []
            for prefix in open_prefixes:
                index[prefix] = len(index)
                for token in range(self.vocab):
                    over = step == self.length - 1 or (self.ends and token == END)
                    (done if over else grown).append((*prefix, token))
            open_prefixes = grown
        shape = (len(done), self.length)
        tokens, prefix_index = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.bool)
        for n, completion in enumerate(done):
            for t, token in enumerate(completion):
                tokens[n, t], prefix_index[n, t], mask[n, t] = token, index[completion[:t]], True
        for name, x in {"tokens": tokens, "mask": mask, "prefix": prefix_index, "prefixes": len(index)}.items():
            object.__setattr__(self, name, x)

    def __len__(self) -> int:
        return len(self.tokens)


# Three tabular policies (π, ref, μ) on one space of completions, which define every expectation.
#
# The parameters θ are the logits of π at every prefix. This loses no generality: in any other parametrisation the
# gradient passes through these logits, so by the chain rule an expected gradient that is correct here is correct there.


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
        return _reversed(self).prefix_kl()

    def at_tokens(self, per_prefix: Tensor) -> Tensor:
        """(P,) to (N, T): for each token, the value at the prefix before it; 0 where masked."""
        return torch.where(self.space.mask, per_prefix[self.space.prefix], 0)

    @cached_property
    def scores(self) -> Tensor:
        """(N, T, P·V) ∇_θ log π of each token; 0 where masked."""
        token = torch.nn.functional.one_hot(self.space.tokens, self.space.vocab)
        per_token = token - torch.softmax(self.logits, -1)[self.space.prefix]
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


# Every group of completions that a sampler can draw, with its probability.


def every_group(problem: Problem, size: int) -> tuple[Tensor, Tensor]:
    """List all groups of independently drawn completions.

    Args:
        problem: its sampler draws the completions.
        size: completions per group.

    Returns:
        (N^size, size) indices into the completions of the problem, and probabilities, which sum to 1.

    Example:
        >>> from klgrad.enumeration import bandit, every_group
        >>> members, probability = every_group(bandit(3, seed=0, away_from_ref=1.0), 2)
        >>> members.shape, round(float(probability.sum()), 9)
        (torch.Size([9, 2]), 1.0)
    """
    single = torch.arange(len(problem.space))
    members = torch.cartesian_prod(*[single] * size).reshape(-1, size)
    return members, problem.probability[members].prod(-1)


# The limit of large batches, exactly: a batch that holds every group of completions as often as it is likely.
#
# The gradient of a loss with statistics over the batch, such as a mean over all its tokens, depends on the size of the
# batch. If the sampler's probabilities are multiples of one fraction, a finite batch has exactly the proportions of the
# distribution. The loss of this batch is the loss in the limit of large batches, without extrapolation.


def with_rational_sampler(problem: Problem, parts: int, *, on_policy: bool) -> Problem:
    """Move the sampler to probabilities that are multiples of 1 / `parts` at every prefix.

    Args:
        problem: the policies; its sampler is rounded, and no token gets probability 0.
        parts: the denominator, at least the size of the vocabulary.
        on_policy: move the policy to the same probabilities, so that it is the sampler.

    Returns:
        The problem with its new sampler.

    Example:
        >>> from klgrad.enumeration import autoregressive, with_rational_sampler
        >>> problem = autoregressive(3, 1, ends=False, seed=0, away_from_ref=1.0)
        >>> moved = with_rational_sampler(problem, 4, on_policy=True)
        >>> sorted(moved.probability.tolist())
        [0.25, 0.25, 0.5]
    """
    if parts < problem.space.vocab:
        raise ProblemError(
            f"at least {problem.space.vocab} parts, one for each token of the vocabulary",
            f"parts={parts}",
            "use a larger denominator",
        )
    shares = torch.softmax(problem.behavior_logits, -1) * parts
    counts = torch.ones_like(shares)
    for _ in range(parts - problem.space.vocab):  # one part at a time to the token that lacks most
        lacking = (shares - counts).argmax(-1, keepdim=True)
        counts.scatter_add_(-1, lacking, torch.ones_like(lacking, dtype=counts.dtype))
    logits = (counts / parts).log()
    return replace(problem, behavior_logits=logits, logits=logits if on_policy else problem.logits)


def population(problem: Problem, size: int, parts: int) -> Tensor:
    """List every group of completions as often as it is likely.

    Args:
        problem: with a sampler of `with_rational_sampler`.
        size: completions per group.
        parts: the denominator of the sampler's probabilities.

    Returns:
        (M, size) indices into the completions of the problem; a group of probability p is in p·M of the rows.

    Example:
        >>> from klgrad.enumeration import bandit, population, with_rational_sampler
        >>> problem = with_rational_sampler(bandit(2, seed=0, away_from_ref=1.0), 2, on_policy=True)
        >>> population(problem, 1, parts=2).flatten().tolist()
        [0, 1]
    """
    exact = problem.probability * parts**problem.space.length
    counts = exact.round()
    if not torch.allclose(exact, counts, rtol=1e-9, atol=0.0):  # rounding makes them differ by about 1e-15
        raise ProblemError(
            f"a sampler whose probabilities are multiples of 1/{parts}",
            "other probabilities",
            "move it there by with_rational_sampler",
        )
    rows = torch.arange(len(counts)).repeat_interleave(counts.long())
    return torch.cartesian_prod(*[rows] * size).reshape(-1, size)


# The gradient of every target, from its definition: autograd through a sum over all completions.


def _of_completions(p: Problem) -> Tensor:
    """KL(π‖ref) of completions."""
    logp = p.logp.sum(-1)
    return (logp.exp() * (logp - p.ref_logp.sum(-1))).sum()


def _at_own_prefixes(kl: Callable[[Problem], Tensor]) -> Callable[[Problem], Tensor]:
    """Σ of a KL of the next token over the prefixes that π visits, the visits held fixed."""
    return lambda p: (p.prefix_probability(p.logits).detach() * kl(p)).sum()


def _at_sampled_prefixes(kl: Callable[[Problem], Tensor]) -> Callable[[Problem], Tensor]:
    """Σ of a KL of the next token over the prefixes that the sampler visits."""
    return lambda p: (p.prefix_probability(p.behavior_logits) * kl(p)).sum()


def _sampled(value: Callable[[Tensor], Tensor]) -> Callable[[Problem], Tensor]:
    """E_μ[Σ of a function of log π/ref of each token], the sampler held fixed."""
    return lambda p: (p.probability.detach() * value(p.logp - p.ref_logp).sum(-1)).sum()


def _to_sampler(objective: Callable[[Problem], Tensor]) -> Callable[[Problem], Tensor]:
    """The same divergence between π and the sampler, held fixed."""
    return lambda p: objective(replace(p, ref_logits=p.behavior_logits))


def _reversed(p: Problem) -> Problem:
    """π and ref in each other's place."""
    return replace(p, logits=p.ref_logits, ref_logits=p.logits)


OBJECTIVES: dict[TargetName, Callable[[Problem], Tensor]] = {
    "reverse-kl-sequence": _of_completions,
    "reverse-kl-token": _at_own_prefixes(Problem.prefix_kl),
    "reverse-kl-token-sampler": _at_sampled_prefixes(Problem.prefix_kl),
    "forward-kl-token": _at_own_prefixes(Problem.prefix_forward_kl),
    "forward-kl-token-sampler": _at_sampled_prefixes(Problem.prefix_forward_kl),
    "forward-kl-sequence": lambda p: _of_completions(_reversed(p)),
    "k3-token": _sampled(lambda x: torch.expm1(-x) + x),
    "squared-token": _sampled(lambda x: x.square() / 2),
    "squared-sequence": _sampled(lambda x: x.sum(-1, keepdim=True).square() / 2),
    "forward-kl-sampler-sequence": _to_sampler(lambda p: _of_completions(_reversed(p))),
    "reverse-kl-sampler-sequence": _to_sampler(_of_completions),
    "reverse-kl-sampler-token-sampler": _to_sampler(_at_sampled_prefixes(Problem.prefix_kl)),
}
"""The exact value of each target of `klgrad.targets` that has a gradient, as a differentiable function of a problem."""


def target_gradients(problem: Problem) -> dict[TargetName, Tensor]:
    """Differentiate every target at the policy of a problem.

    Args:
        problem: the policies; π's logits are the parameters.

    Returns:
        By name of the target, its gradient with respect to the logits of π, flattened to (P·V,).

    Example:
        >>> from klgrad.enumeration import bandit, target_gradients
        >>> targets = target_gradients(bandit(2, seed=0, away_from_ref=1.0))
        >>> targets["reverse-kl-token"].shape
        torch.Size([2])
    """
    gradients: dict[TargetName, Tensor] = {}
    for name, objective in OBJECTIVES.items():
        logits = problem.logits.detach().clone().requires_grad_()
        with torch.enable_grad():  # also inside a caller's no_grad()
            value = objective(problem.with_logits(logits))
        (gradient,) = torch.autograd.grad(value, logits)
        gradients[name] = gradient.flatten()
    return gradients
