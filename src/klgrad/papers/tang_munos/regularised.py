"""KL-regularised reward maximisation on many bandits: the simulation behind figures 4, 5 and 6.

π starts at ref; a step adds the leave-one-out policy gradient of a Gaussian reward and subtracts β times an
estimate of the KL's gradient, at learning rate 1, in float32. The paper gives neither β nor the number of steps. With
β = 1 the figures look as printed; each of them sweeps β.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...core.optima import forward_optimum, reverse_optimum
from ..study import Settings
from . import bandits

METHODS = ("exact", "k1-reward", "k1-reward-leave-one-out", "k1-loss", "k3-loss")
BETA = 1.0
EVERY = 10
TAIL = 0.2
"""The share of steps at the end over which a converged value is averaged."""

MANY = 1000
"""Problems for what needs no simulation."""


@dataclass(frozen=True)
class Paths:
    """KL(π‖π*) and KL(π‖π*_rev) over KL(ref‖π*), each (methods, points, repeats)."""

    to_optimum: Tensor
    to_forward_optimum: Tensor

    def converged(self, of: Tensor) -> Tensor:
        """(methods, repeats) mean over the tail."""
        return of[:, -max(1, int(TAIL * of.shape[1])) :].mean(1)


@cache
def simulate(settings: Settings, samples: int, beta: float, steps: int, methods: Sequence[str] = METHODS) -> Paths:
    """Run all methods on the same problems with the same random numbers; the cache lets figures share simulations."""
    repeats = settings.size(100, 60)
    generator = torch.Generator().manual_seed(settings.seed)
    problems = bandits.draw(repeats, generator, torch.float32)
    ref, reward = problems.ref_logp, problems.reward
    optimum, forward = reverse_optimum(ref, reward, beta), forward_optimum(ref, reward, beta)
    start = bandits.divergence(ref, optimum)
    logits, seen = ref.expand(len(methods), -1, -1).clone(), []
    for step in range(steps + 1):
        logp = torch.log_softmax(logits, -1)
        if step % EVERY == 0:
            seen.append(torch.stack([bandits.divergence(logp, x) / start for x in (optimum, forward)]))
        p = logp.exp()
        counts = bandits.count(p, samples, generator)
        gain = _reward_gradient(methods, reward, counts, p)
        logits = logits + bandits.RATE * (gain - beta * bandits.estimated_gradients(methods, logp - ref, counts, p))
    return Paths(*torch.stack(seen, 2))


def optima_apart(settings: Settings, beta: float) -> Tensor:
    """(`MANY`,) KL(π*_rev‖π*) over KL(ref‖π*): where k3 as a loss would end without noise, exactly."""
    problems = bandits.draw(MANY, torch.Generator().manual_seed(settings.seed))
    ref, reward = problems.ref_logp, problems.reward
    optimum = reverse_optimum(ref, reward, beta)
    return bandits.divergence(forward_optimum(ref, reward, beta), optimum) / bandits.divergence(ref, optimum)


def _reward_gradient(methods: Sequence[str], reward: Tensor, counts: Tensor, p: Tensor) -> Tensor:
    """The policy gradient: the same estimate for every method except `exact`, which has the exact gradient."""
    reward = reward.expand_as(p)
    gradient = bandits.mean_score(reward - bandits.others_mean(reward, counts), counts, p)
    if "exact" in methods:
        m = list(methods).index("exact")
        gradient[m] = bandits.exact_gradient(reward[m], p[m])
    return gradient
