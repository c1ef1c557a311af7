r"""Binary Markov chains of a fixed length, and the mean and variance of a KL gradient over all their sequences.

The paper's parametrisation of A_θ and B_φ is not in the sources at hand. Chosen here: first-order chains with
one logit per (step, previous token), which says how likely token 1 is; the token before the first counts as 0.
The score of token t then touches one logit only, so the gradient of a sequence is known by T numbers and a
million sequences are summed in a second.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...credit import whole
from ...estimators import Estimator, k1, k3
from ...rollout import Rollout

CHUNK = 2**15
"""Sequences summed at a time: 20 tokens of them are 5 MB a tensor, which a processor's cache holds."""

Coefficients = Callable[[Rollout], dict[str, Tensor]]
"""From all sequences at once to a coefficient (N, T) on the scores of their tokens, by configuration."""

PLACEMENTS: dict[str, tuple[Estimator, float, float]] = {
    "k1-reward": (k1, 1.0, 0.0),
    "k3-reward": (k3, 1.0, 0.0),
    "k1-loss": (k1, 0.0, 1.0),
    "k3-loss": (k3, 0.0, 1.0),
    "k1-both": (k1, 1.0, 1.0),
    "k3-both": (k3, 1.0, 1.0),
}
"""The paper's configurations: an estimator, and its strength β in the reward and in the loss."""


def placed(rollout: Rollout, estimator: Estimator, in_reward: float, in_loss: float) -> Tensor:
    """The coefficient (N, T) of an estimate that is summed into the reward, differentiated as a loss, or both.

    Args:
        rollout: the sequences.
        estimator: k1 or k3, of one token.
        in_reward: β of its detached sum over the sequence, on the score of every token.
        in_loss: β of its slope, on the score of its own token.
    """
    log_ratio = rollout.log_ratio
    terms = []
    if in_reward:
        terms.append(in_reward * whole(estimator.value(log_ratio), rollout.mask))
    if in_loss:
        terms.append(in_loss * estimator.slope(log_ratio))
    return sum(terms[1:], terms[0])


@dataclass(frozen=True, eq=False)
class Moments:
    """Of the gradient from one sampled sequence: its mean (T, 2), by logit, and its variance E‖g - Eg‖²."""

    mean: Tensor
    variance: float


@dataclass(frozen=True, eq=False)
class Chains:
    """Logits (T, 2), float64, of the policy A, the reference B and the sampler; None means that A samples."""

    policy: Tensor
    reference: Tensor
    behaviour: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return len(self.policy)

    def sampled_by(self, behaviour: Tensor) -> "Chains":
        """The same pair with sequences drawn by another chain."""
        return replace(self, behaviour=behaviour)

    @cached_property
    def kl_gradient(self) -> Tensor:
        """∇KL(A‖B) of whole sequences, (T, 2): autograd through the chain rule of the KL, no sequence listed."""
        return _gradient(lambda logits: _visited_kl(_visits(logits), logits, self.reference), self.policy)

    @cached_property
    def token_forward_kl_gradient(self) -> Tensor:
        """∇ of the tokens' KL(B‖A), (T, 2), at prefixes as A visits them, the visits held fixed."""
        visits = _visits(self.policy)
        return _gradient(lambda logits: _visited_kl(visits, self.reference, logits), self.policy)

    def moments(self, coefficients: Coefficients) -> dict[str, Moments]:
        """Exact moments of Σ_t c_t s_t, one sequence sampled, by configuration."""
        first: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {}
        for place in _places(self.length):
            rollout = self._rollout(place)
            probability = rollout.sampler_logp.sum(-1).exp()
            score = _look_up(_scores(self.policy), place)
            after_one = (place & 2).to(score) / 2
            for name, coefficient in coefficients(rollout).items():
                gradient = coefficient * score
                total, of_one = probability @ gradient, probability @ (gradient * after_one)
                first[name] = first.get(name, 0) + torch.stack([total - of_one, of_one], -1)
                # Each token has a logit of its own, so the squares of a sequence's gradient just add.
                second[name] = second.get(name, 0) + probability @ gradient.square_().sum(-1)
        return {name: Moments(x, float(second[name] - x.square().sum())) for name, x in first.items()}

    def expectation(self, of: Callable[[Rollout], Tensor]) -> float:
        """The mean over sampled sequences of a number (N,) per sequence."""
        rollouts = map(self._rollout, _places(self.length))
        return float(sum(rollout.sampler_logp.sum(-1).exp() @ of(rollout) for rollout in rollouts))

    def _rollout(self, place: Tensor) -> Rollout:
        logp, ref_logp = (_look_up(_log_probs(logits), place) for logits in (self.policy, self.reference))
        behaviour = None if self.behaviour is None else _look_up(_log_probs(self.behaviour), place)
        return Rollout(logp, ref_logp, torch.ones_like(place, dtype=torch.bool), behavior_logp=behaviour)


def random_logits(length: int, generator: torch.Generator) -> Tensor:
    """Standard normal logits (T, 2) of one chain."""
    return torch.randn(length, 2, generator=generator, dtype=torch.float64)


def random_chains(length: int, generator: torch.Generator) -> Chains:
    """Two independent chains of standard normal logits."""
    return Chains(random_logits(length, generator), random_logits(length, generator))


def relative_bias(found: Moments, target: Tensor) -> float:
    """‖E g - target‖ / ‖target‖."""
    return float((found.mean - target).norm() / target.norm())


def relative_deviation(found: Moments, target: Tensor) -> float:
    """The standard deviation of the one-sample gradient over ‖target‖."""
    return max(found.variance, 0.0) ** 0.5 / float(target.norm())


def _places(length: int) -> Iterator[Tensor]:
    """Every sequence in chunks (n, T): the index of each token's entry in a flat table (T, 2, 2).

    An entry is (step, previous token, token), so that bit 0 of the index is the token and bit 1 the one before.
    """
    shift = torch.arange(length)
    for start in range(0, 2**length, CHUNK):
        number = torch.arange(start, min(start + CHUNK, 2**length))[:, None]
        # Doubling puts the 0 before the first token; the two lowest bits are then (token t, token t - 1).
        window = (2 * number >> shift) & 3
        yield 4 * shift + 2 * (window & 1) + (window >> 1)


def _look_up(table: Tensor, place: Tensor) -> Tensor:
    return torch.take(table, place)


def _log_probs(logits: Tensor) -> Tensor:
    """(T, 2, 2) log-prob by (step, previous token, token)."""
    return torch.stack([logsigmoid(-logits), logsigmoid(logits)], -1)


def _scores(logits: Tensor) -> Tensor:
    """(T, 2, 2) ∇log-prob by the one logit that it depends on: token - P(token = 1)."""
    return torch.tensor([0.0, 1.0], dtype=logits.dtype) - torch.sigmoid(logits)[..., None]


def _visits(logits: Tensor) -> Tensor:
    """(T, 2) how often the token before step t is 0 and 1."""
    visits = [torch.tensor([1.0, 0.0], dtype=logits.dtype)]
    for step in _log_probs(logits)[:-1].exp():
        visits.append(visits[-1] @ step)
    return torch.stack(visits)


def _visited_kl(visits: Tensor, of: Tensor, to: Tensor) -> Tensor:
    """Σ over steps and previous tokens of visits x KL of the next token."""
    p, q = _log_probs(of), _log_probs(to)
    return (visits * (p.exp() * (p - q)).sum(-1)).sum()


def _gradient(objective: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    logits = at.clone().requires_grad_()
    return torch.autograd.grad(objective(logits), logits)[0]
