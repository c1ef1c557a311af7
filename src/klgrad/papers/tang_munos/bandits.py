"""Many bandits at a time, with and without rewards: the simulations behind the figures."""

import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import torch
from torch import Tensor

from ...audit.subject import find
from ...core.divergences import Divergence
from ...core.estimators import k1, k2, k3
from ...drawing import STYLES, style
from ...errors import LossCallError
from ..study import Axes, Numbers

# Many bandits at once: the paper's tabular protocol (appendix C), batched over methods and repeats.
#
# 100 arms; the logits of ref are ε1, those of π ε1 + ε2 (or ε1, where the reward is maximised), with ε unit Gaussian. A
# gradient estimate depends on n samples only through the number of times each arm was drawn, and is computed from these
# counts.

ARMS = 100
RATE = 1.0
"""The paper's learning rate."""


@dataclass(frozen=True)
class Bandits:
    """(R, ARMS) independent problems."""

    logits: Tensor
    ref_logp: Tensor
    reward: Tensor

    @property
    def logp(self) -> Tensor:
        """(R, ARMS) log π at the start."""
        return torch.log_softmax(self.logits, -1)


def draw(
    repeats: int, generator: torch.Generator, dtype: torch.dtype = torch.float64, *, scale: float = 1.0
) -> Bandits:
    """Problems as the paper draws them: π starts away from ref; `scale` multiplies ε2, the distance in the logits."""
    ref, away, reward = torch.randn(3, repeats, ARMS, generator=generator, dtype=dtype)
    return Bandits(ref + scale * away, torch.log_softmax(ref, -1), reward)


def sample(probability: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """The arms of `samples` draws, (..., samples).

    Leading axes share their random numbers, except the last one before the arms: methods (first axis) are compared on
    the same random numbers, and repeats (second axis) are independent.
    """
    uniform = torch.rand(probability.shape[-2], samples, generator=generator, dtype=probability.dtype)
    arms = torch.searchsorted(probability.cumsum(-1), uniform.expand(*probability.shape[:-1], samples).contiguous())
    return arms.clamp_(max=probability.shape[-1] - 1)


def count(probability: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """The number of times each arm is drawn in `samples` draws, (..., ARMS); random numbers as in `sample`."""
    arms = sample(probability, samples, generator)
    hits = torch.ones((), dtype=probability.dtype).expand(arms.shape)
    return torch.zeros_like(probability).scatter_add_(-1, arms, hits)


def mean_score(weight: Tensor, counts: Tensor, probability: Tensor) -> Tensor:
    """(1/n) Σ_i w(y_i) ∇log π(y_i) over logits, from counts: the score of arm y is e_y - π."""
    share = weight * counts / counts.sum(-1, keepdim=True)
    return share - probability * share.sum(-1, keepdim=True)


def others_mean(value: Tensor, counts: Tensor) -> Tensor:
    """Leave-one-out mean of a value, for a sample of each arm."""
    n = counts.sum(-1, keepdim=True)
    return ((value * counts).sum(-1, keepdim=True) - value) / (n - 1)


Weight = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log-ratio of each arm, counts, probability) to the coefficient on each arm's score."""

WEIGHTS: dict[str, Weight] = {
    "k1-reward": lambda x, counts, p: k1.value(x),
    "k1-reward-leave-one-out": lambda x, counts, p: k1.value(x) - others_mean(x, counts),
    "k1-reward-optimal-baseline": lambda x, counts, p: k1.value(x) - (p * x).sum(-1, keepdim=True),
    "k2-loss": lambda x, counts, p: k2.slope(x),
    "k1-loss": lambda x, counts, p: k1.slope(x),
    "k3-loss": lambda x, counts, p: k3.slope(x),
}


def estimated_gradients(methods: Sequence[str], log_ratio: Tensor, counts: Tensor, probability: Tensor) -> Tensor:
    """(M, R, ARMS) one estimate of ∇KL(π‖ref) per method and repeat; `exact` sums over every arm instead."""
    counts = counts.clone()
    weight = torch.empty_like(log_ratio)
    for m, method in enumerate(methods):
        if method == "exact":  # the expectation is the mean score of counts n π
            counts[m], weight[m] = counts[m].sum(-1, keepdim=True) * probability[m], log_ratio[m]
        else:
            weight[m] = weight_of(method)(log_ratio[m], counts[m], probability[m])
    return mean_score(weight, counts, probability)


def exact_gradient(weight: Tensor, probability: Tensor) -> Tensor:
    """E_π[w ∇log π] over logits; ∇KL(π‖ref) for the log-ratio as weight."""
    return probability * (weight - (probability * weight).sum(-1, keepdim=True))


def divergence(logp: Tensor, other: Tensor) -> Tensor:
    """KL(π‖other) over the last axis."""
    return (logp.exp() * (logp - other)).sum(-1)


def descent(
    logits: Tensor, ref_logp: Tensor, steps: int, shown: Container[int], gradient: Callable[[Tensor], Tensor]
) -> Tensor:
    """Descend gradients that are functions of log π.

    Returns:
        (..., points, R) KL(π‖ref) at the steps `shown`, of 0 to `steps`.
    """
    seen = []
    for step in range(steps + 1):
        logp = torch.log_softmax(logits, -1)
        if step in shown:
            seen.append(divergence(logp, ref_logp))
        logits = logits - RATE * gradient(logp)
    return torch.stack(seen, -2)


# A user's own estimator, beside those of the paper.


@cache
def weight_of(method: str) -> Weight:
    """The weight of a method of the paper, or of a user's estimator, `my.py:estimator`.

    An estimator is a function of one tensor, the log-ratios, to the coefficients on the scores; or a `Divergence`, by
    its slope.

    Raises:
        LossCallError: if it is neither, or has not one coefficient for each completion by itself.
    """
    if method in WEIGHTS:
        return WEIGHTS[method]
    estimator = find(method)
    coefficient = estimator.slope if isinstance(estimator, Divergence) else estimator
    remedy = "write a function of the log-ratios, entry by entry"
    if not inspect.isroutine(coefficient) or len(inspect.signature(coefficient).parameters) != 1:
        raise LossCallError(f"{method} to be a function of the log-ratios, or a Divergence", repr(estimator), remedy)
    x = torch.linspace(-2, 2, 8, dtype=torch.float64)
    both, first = coefficient(x), coefficient(x[:4])
    if getattr(both, "shape", None) != x.shape or not torch.allclose(both[:4], first):
        raise LossCallError(f"{method} to return the coefficient of each log-ratio by itself", repr(both), remedy)
    return lambda x, counts, p: coefficient(x)


def looks(methods: Iterable[str]) -> dict[str, Numbers]:
    """The look of each method in figures; a user's have colours of their own."""
    colours = cycle(("#B3007D", "#7A4A00", "#3D3DB8", "#5A7D00"))
    own = lambda name: {"color": next(colours), "linestyle": (0, (4, 1, 1, 1)), "lw": 2.2, "label": name}
    return {name: style(name) if name in STYLES else own(name) for name in methods}


def draw_paths(axis: Axes, steps: list[int], paths: Numbers, *, least: float) -> None:
    """Draw the mean of each method over the steps, with a band of one standard error that ends at `least`."""
    for name, look in looks(paths).items():
        mean, error = torch.tensor(paths[name]["mean"]), torch.tensor(paths[name]["error"])
        axis.plot(steps, mean, **look)
        axis.fill_between(steps, (mean - error).clamp(min=least), mean + error, color=look["color"], alpha=0.2, lw=0)
