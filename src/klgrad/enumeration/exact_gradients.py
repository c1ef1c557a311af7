"""The gradient of every target, from its definition: autograd through a sum over all completions."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..targets import TargetName
from .problem import Problem


def _reverse_kl_sequence(p: Problem) -> Tensor:
    """KL(π‖ref) of completions."""
    logp = p.logp.sum(-1)
    return (logp.exp() * (logp - p.ref_logp.sum(-1))).sum()


def _reverse_kl_token(p: Problem) -> Tensor:
    """Σ KL_t(π‖ref) over the prefixes that π visits, the visits held fixed."""
    return (p.prefix_probability(p.logits).detach() * p.prefix_kl()).sum()


def _reverse_kl_token_sampler(p: Problem) -> Tensor:
    """Σ KL_t(π‖ref) over the prefixes that the sampler visits."""
    return (p.prefix_probability(p.behavior_logits) * p.prefix_kl()).sum()


def _forward_kl_token(p: Problem) -> Tensor:
    """Σ KL_t(ref‖π) over the prefixes that π visits, the visits held fixed."""
    return (p.prefix_probability(p.logits).detach() * p.prefix_forward_kl()).sum()


def _forward_kl_token_sampler(p: Problem) -> Tensor:
    """Σ KL_t(ref‖π) over the prefixes that the sampler visits."""
    return (p.prefix_probability(p.behavior_logits) * p.prefix_forward_kl()).sum()


def _forward_kl_sequence(p: Problem) -> Tensor:
    """KL(ref‖π) of completions."""
    ref_logp = p.ref_logp.sum(-1)
    return (ref_logp.exp() * (ref_logp - p.logp.sum(-1))).sum()


def _k3_token(p: Problem) -> Tensor:
    """E_μ[Σ_t (exp(-l_t) - 1 + l_t)], the sampler held fixed."""
    log_ratio = p.logp - p.ref_logp
    return (p.probability.detach() * (torch.expm1(-log_ratio) + log_ratio).sum(-1)).sum()


def _squared_token(p: Problem) -> Tensor:
    """E_μ[Σ_t l_t² / 2], the sampler held fixed."""
    return (p.probability.detach() * (p.logp - p.ref_logp).square().sum(-1) / 2).sum()


def _squared_sequence(p: Problem) -> Tensor:
    """E_μ[(Σ_t l_t)² / 2], the sampler held fixed."""
    log_ratio = (p.logp - p.ref_logp).sum(-1)
    return (p.probability.detach() * log_ratio.square() / 2).sum()


def _to_sampler(objective: Callable[[Problem], Tensor]) -> Callable[[Problem], Tensor]:
    """The same divergence between π and the sampler, held fixed."""
    return lambda p: objective(replace(p, ref_logits=p.behavior_logits))


OBJECTIVES: dict[TargetName, Callable[[Problem], Tensor]] = {
    "reverse-kl-sequence": _reverse_kl_sequence,
    "reverse-kl-token": _reverse_kl_token,
    "reverse-kl-token-sampler": _reverse_kl_token_sampler,
    "forward-kl-token": _forward_kl_token,
    "forward-kl-token-sampler": _forward_kl_token_sampler,
    "forward-kl-sequence": _forward_kl_sequence,
    "k3-token": _k3_token,
    "squared-token": _squared_token,
    "squared-sequence": _squared_sequence,
    "forward-kl-sampler-sequence": _to_sampler(_forward_kl_sequence),
    "forward-kl-sampler-token": _to_sampler(_forward_kl_token),
    "reverse-kl-sampler-sequence": _to_sampler(_reverse_kl_sequence),
    "reverse-kl-sampler-token": _to_sampler(_reverse_kl_token),
    "reverse-kl-sampler-token-sampler": _to_sampler(_reverse_kl_token_sampler),
}
"""The exact value of each target of `klgrad.targets.WITH_GRADIENT`, as a differentiable function of a problem."""


def target_gradients(problem: Problem) -> dict[TargetName, Tensor]:
    """Differentiate every target at the policy of a problem.

    Args:
        problem: the policies; π's logits are the parameters.

    Returns:
        By name of the target, its gradient with respect to the logits of π, flattened to (P·V,).

    Example:
        >>> from klgrad.enumeration import bandit, target_gradients
        >>> found = target_gradients(bandit(2, seed=0, away_from_ref=1.0))
        >>> found["reverse-kl-token"].shape
        torch.Size([2])
    """
    found: dict[TargetName, Tensor] = {}
    for name, objective in OBJECTIVES.items():
        logits = problem.logits.detach().clone().requires_grad_()
        with torch.enable_grad():  # also inside a caller's no_grad()
            value = objective(problem.with_logits(logits))
        (gradient,) = torch.autograd.grad(value, logits)
        found[name] = gradient.flatten()
    return found
