r"""What a KL term may be the gradient of, each computed from its definition by autograd over all outcomes."""

from collections.abc import Callable

import torch
from torch import Tensor

from .problem import Problem


def _reverse_kl_sequence(p: Problem) -> Tensor:
    """KL(π‖ref) of completions."""
    logp = p.logp.sum(-1)
    return (logp.exp() * (logp - p.ref_logp.sum(-1))).sum()


def _reverse_kl_token(p: Problem) -> Tensor:
    """Σ KL_t(π‖ref) over prefixes as π visits them, the visits held fixed."""
    return (p.prefix_probability(p.logits).detach() * p.prefix_kl()).sum()


def _reverse_kl_token_sampler(p: Problem) -> Tensor:
    """The same over prefixes as the sampler visits them."""
    return (p.prefix_probability(p.behavior_logits) * p.prefix_kl()).sum()


def _forward_kl_token(p: Problem) -> Tensor:
    """Σ KL_t(ref‖π) over prefixes as π visits them, the visits held fixed."""
    return (p.prefix_probability(p.logits).detach() * p.prefix_forward_kl()).sum()


def _forward_kl_sequence(p: Problem) -> Tensor:
    """KL(ref‖π) of completions."""
    ref_logp = p.ref_logp.sum(-1)
    return (ref_logp.exp() * (ref_logp - p.logp.sum(-1))).sum()


def _squared_sequence(p: Problem) -> Tensor:
    """E_μ[(Σ_t l_t)² / 2], the sampler held fixed."""
    log_ratio = (p.logp - p.ref_logp).sum(-1)
    return (p.probability.detach() * log_ratio.square() / 2).sum()


TARGETS: dict[str, Callable[[Problem], Tensor]] = {
    "reverse_kl_sequence": _reverse_kl_sequence,
    "reverse_kl_token": _reverse_kl_token,
    "reverse_kl_token_sampler": _reverse_kl_token_sampler,
    "forward_kl_token": _forward_kl_token,
    "forward_kl_sequence": _forward_kl_sequence,
    "squared_sequence": _squared_sequence,
}
"""By name, plainest first: on-policy some coincide, and the first of them names the verdict."""


def target_gradients(problem: Problem) -> dict[str, Tensor]:
    """∇_θ of every target, flat (P·V,)."""
    found = {}
    for name, objective in TARGETS.items():
        logits = problem.logits.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(problem.with_logits(logits)), logits)
        found[name] = gradient.flatten()
    return found
