"""Many bandits at a time, with and without rewards: the simulations behind the figures."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from ...audit.batch import Batch
from ...audit.subject import Subject, as_subject, find
from ...core.divergences import Divergence
from ...core.estimators import k1, k2, k3
from ...drawing import STYLES, style
from ...errors import LossCallError
from ..study import Numbers

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


# A user's own estimator, beside those of the paper.


@cache
def weight_of(method: str) -> Weight:
    """The weight of a method of the paper, or of a user's estimator, `my.py:estimator`.

    An estimator is a function of one tensor, the log-ratios, to the coefficients on the scores; a `Divergence`, by its
    slope; or a loss that the audit takes, by its derivatives by the log-probs of completions of one token.

    Raises:
        LossCallError: if it has not one coefficient for each completion by itself.
    """
    if method in WEIGHTS:
        return WEIGHTS[method]
    estimator = find(method)
    if isinstance(estimator, Divergence):
        return lambda x, counts, p: estimator.slope(x)
    if inspect.isfunction(estimator) and len(inspect.signature(estimator).parameters) == 1:
        weight = lambda x, counts, p: estimator(x)
    else:
        weight = partial(_derivative, as_subject(estimator, method))
    _check_weight(method, weight)
    return weight


def _derivative(loss: Subject, log_ratio: Tensor, _: Tensor, probability: Tensor) -> Tensor:
    """What the loss, a mean over completions, puts on the score of each arm."""
    logp = probability.clamp(min=torch.finfo(probability.dtype).tiny).log().reshape(-1, 1)
    none, logits = torch.zeros_like(logp), torch.zeros_like(logp)[..., None]
    batch = Batch(
        logp=logp,
        ref_logp=logp - log_ratio.reshape(-1, 1),
        old_logp=logp,
        behavior_logp=logp,
        mask=torch.ones_like(logp, dtype=torch.bool),
        advantages=none,
        rewards=none[:, 0],
        group=none[:, 0].long(),
        token_reverse_kl=none,
        token_forward_kl=none,
        logits=logits,
        ref_logits=logits,
        behavior_logits=logits,
        tokens=none.long(),
    ).fresh()
    gradient, *others = torch.autograd.grad(loss(batch), batch.leaves, allow_unused=True)
    if gradient is None or any(x is not None and x.any() for x in others):
        raise LossCallError(
            f"{loss.name} to have its gradient through logp alone",
            "none, or one through logits or an exact KL",
            "write a loss of sampled log-probs",
        )
    return (gradient * len(logp)).view_as(log_ratio)


def _check_weight(name: str, weight: Weight) -> None:
    """Each arm's coefficient depends on that arm alone."""
    x = torch.linspace(-2, 2, 8, dtype=torch.float64)
    p = torch.softmax(x, -1)
    both, first = weight(x, p, p), weight(x[:4], p[:4], p[:4])
    if getattr(both, "shape", None) != x.shape:
        raise LossCallError(
            f"{name} to return the coefficient of each of 8 log-ratios",
            f"{both!r}",
            "write a function of the log-ratios, entry by entry",
        )
    if not torch.allclose(both[:4], first):
        raise LossCallError(
            f"{name} to treat each completion by itself, and to be a mean over completions",
            "coefficients that depend on the other completions of the batch",
            "leave baselines and sums over the batch out",
        )


def looks(methods: Iterable[str]) -> dict[str, Numbers]:
    """The look of each method in figures; a user's have colours of their own."""
    styles, colours = {}, iter(OWN_COLOURS * len(list(methods)))
    for name in methods:
        styles[name] = (
            style(name)
            if name in STYLES
            else {"color": next(colours), "linestyle": (0, (4, 1, 1, 1)), "lw": 2.2, "label": name}
        )
    return styles


OWN_COLOURS = ["#B3007D", "#7A4A00", "#3D3DB8", "#5A7D00"]
