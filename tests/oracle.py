"""Independent exact expectations for the tests: plain sums over completions, no part of the audit."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from klgrad import Rollout
from klgrad.enumeration import Problem, autoregressive, bandit

PROBLEMS = {
    "bandit": bandit(5, seed=3, away_from_ref=1.0),
    "fixed": autoregressive(3, 3, ends=False, seed=4, away_from_ref=1.0),
    "varying": autoregressive(3, 3, ends=True, seed=5, away_from_ref=1.0),
    "near": autoregressive(2, 4, ends=True, seed=6, away_from_ref=0.05),
}
SEQUENCES = {name: problem for name, problem in PROBLEMS.items() if name != "bandit"}
ON_SEQUENCES = pytest.mark.parametrize("problem", SEQUENCES.values(), ids=SEQUENCES)
SMALL = autoregressive(2, 3, ends=True, seed=8, away_from_ref=1.0)
"""Small enough to sum over groups of its completions."""


def alpha(order: float) -> Callable[[Tensor], Tensor]:
    return lambda u: (u - 1 - (u**order - 1) / order) / (1 - order)


def jensen_shannon(beta: float) -> Callable[[Tensor], Tensor]:
    rest = 1 - beta
    return lambda u: rest * u * (u / (beta + rest * u)).log() - beta * (beta + rest * u).log()


def huber(bound: float) -> Callable[[Tensor], Tensor]:
    edge = math.exp(bound)
    tangents = lambda u: torch.where(u > 1, bound * u - edge + 1, 1 - 1 / edge - bound * u)
    return lambda u: torch.where(u.log().abs() <= bound, u * u.log() - u + 1, tangents(u))


GENERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse": lambda u: u * u.log() - u + 1,
    "forward": lambda u: u - 1 - u.log(),
    "chi-square": lambda u: (u - 1) ** 2 / 2,
    "hellinger": lambda u: 2 * (u.sqrt() - 1) ** 2,
    "total-variation": lambda u: (u - 1).abs(),
    "alpha(-1)": alpha(-1),
    "alpha(0.3)": alpha(0.3),
    "alpha(1.5)": alpha(1.5),
    "jensen-shannon": jensen_shannon(0.5),
    "jensen-shannon(0.1)": jensen_shannon(0.1),
    "huber(0.7)": huber(0.7),
}
"""f(u) of the divergence Σ ref f(π/ref), written independently of the slope and the excess of the package."""


def whole_space(problem: Problem) -> Rollout:
    """Every completion once, as one batch."""
    return Rollout(
        problem.logp,
        problem.ref_logp,
        problem.space.mask,
        behavior_logp=problem.behavior_logp,
        token_reverse_kl=problem.at_tokens(problem.prefix_kl()),
        token_forward_kl=problem.at_tokens(problem.prefix_forward_kl()),
    )


def kl_gradients(problem: Problem) -> Tensor:
    """(N, T, P·V) ∇_θ KL(π‖ref) at the prefix before each token, by autograd."""
    kl = lambda logits: (moved := problem.with_logits(logits)).at_tokens(moved.prefix_kl())
    return torch.autograd.functional.jacobian(kl, problem.logits).flatten(2)


def mean_gradient(problem: Problem, coefficient: Tensor) -> Tensor:
    """E_μ[ Σ_t c_t s_t ] for coefficients (N, T) of every completion."""
    per_completion = (coefficient[..., None] * problem.scores).sum(1)
    return problem.probability @ per_completion


def differentiated(problem: Problem, value: Callable[[Problem], Tensor]) -> Tensor:
    """The gradient of a function of the problem by the logits of π."""
    logits = problem.logits.clone().requires_grad_()
    return torch.autograd.grad(value(problem.with_logits(logits)), logits)[0].flatten()


def gradient(total: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of the sum of a tensor, whose graph is kept."""
    return torch.autograd.grad(total.sum(), leaf, retain_graph=True)[0]


def gradient_of_rows(problem: Problem, rows: Tensor, loss: Callable[[Rollout], Tensor], *, on_policy: bool) -> Tensor:
    """∇loss of one batch of completions, of one prompt or (groups, size) of several, through the logits."""
    members = rows.reshape(-1, rows.shape[-1])
    rows, behavior_logp = rows.flatten(), problem.logp if on_policy else problem.behavior_logp
    batch = lambda moved: Rollout(
        moved.logp[rows],
        problem.ref_logp[rows],
        problem.space.mask[rows],
        behavior_logp=behavior_logp[rows],
        group=torch.arange(len(members)).repeat_interleave(members.shape[1]),
        token_reverse_kl=moved.at_tokens(moved.prefix_kl())[rows],
        token_forward_kl=moved.at_tokens(moved.prefix_forward_kl())[rows],
    )
    return differentiated(problem, lambda moved: loss(batch(moved)))


def mean_gradient_over_groups(
    problem: Problem, size: int, loss: Callable[[Rollout], Tensor], *, on_policy: bool
) -> Tensor:
    """E of ∇loss over every ordered group of `size` completions."""
    total = torch.zeros(problem.logits.numel(), dtype=torch.float64)
    sampled = problem.on_policy() if on_policy else problem
    for members in itertools.product(range(len(problem.space)), repeat=size):
        rows = torch.tensor(members)
        total += sampled.probability[rows].prod() * gradient_of_rows(problem, rows, loss, on_policy=on_policy)
    return total
