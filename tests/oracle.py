"""Independent exact expectations for the tests: plain sums over completions, no part of the audit."""

import itertools
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


def gradient_of_rows(problem: Problem, rows: Tensor, loss: Callable[[Rollout], Tensor], *, on_policy: bool) -> Tensor:
    """∇loss of one batch of completions of one prompt, by autograd through the logits."""
    logits = problem.logits.clone().requires_grad_()
    moved = problem.with_logits(logits)
    rollout = Rollout(
        moved.logp[rows],
        problem.ref_logp[rows],
        problem.space.mask[rows],
        behavior_logp=(problem.logp if on_policy else problem.behavior_logp)[rows],
        group=torch.zeros(len(rows), dtype=torch.long),
        token_reverse_kl=moved.at_tokens(moved.prefix_kl())[rows],
        token_forward_kl=moved.at_tokens(moved.prefix_forward_kl())[rows],
    )
    (gradient,) = torch.autograd.grad(loss(rollout), logits)
    return gradient.flatten()


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
