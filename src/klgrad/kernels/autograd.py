"""The autograd function of the forward and backward pass."""

import os
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import tiles_torch, validate as check, weights
from .backward import gradients, over_kept
from .forward import scan
from .inputs import Inputs, Job
from .state import log_prob

P = ParamSpec("P")
R = TypeVar("R")


def backend_for(x: Tensor) -> ModuleType:
    """The module that computes tiles: Triton on CUDA or in Triton's interpreter, else torch; torch for float64."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if x.dtype == torch.float64 or not (x.is_cuda or interpreted):
        return tiles_torch
    try:
        from . import tiles_triton
    except ImportError:  # a CUDA build without Triton
        return tiles_torch
    return tiles_triton


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from `torch.compile`: its tiles depend on the values of the mask."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


class StatisticsFunction(torch.autograd.Function):
    """Computes (logp, ref_logp, reverse KL, forward KL, entropy, log-probs of other entries) of each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ref_hidden: Tensor | None,
        ref_weight: Tensor | None,
        ref_bias: Tensor | None,
        job: Job,
    ) -> tuple[Tensor, ...]:
        """Run one pass over all tiles."""
        seen = scan(Inputs(hidden, weight, bias, ref_hidden, ref_weight, ref_bias, job))
        ctx.save_for_backward(hidden, weight, bias, ref_hidden, ref_weight, ref_bias)
        ctx.job, ctx.seen = job, seen
        ctx.set_materialize_grads(False)
        logsumexp, entropy, shift, reverse, forward = seen.finished
        logp, ref_logp = (log_prob(*pair) for pair in zip(seen.picked, (logsumexp, logsumexp - shift), strict=True))
        ctx.mark_non_differentiable(ref_logp)
        others = log_prob(seen.others, logsumexp[:, None])
        # Copies, because a caller may change the returned tensors in place, and backward still needs these.
        return logp, ref_logp, reverse.clone(), forward.clone(), entropy.clone(), others

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the policy's hidden states, weight and bias."""
        check.first_order()
        inputs, seen = Inputs(*ctx.saved_tensors, job=ctx.job), ctx.seen
        # Kept logits are overwritten by their gradient; a second backward pass recomputes them.
        ctx.seen = replace(seen, kept=None)
        logp, _, reverse, forward, entropy, others = upstream
        none = torch.zeros_like(seen.finished.logsumexp)
        given = [none if x is None else x.to(none.dtype) for x in (logp, reverse, forward, entropy)]
        elsewhere = None if others is None else others.sum(-1).to(none.dtype)
        numbers = weights.per_token(seen.finished, weights.Upstream(*given), elsewhere)
        kept = over_kept(inputs, seen, numbers, others)
        seen = ctx.seen  # the last reference to the other half of what was kept is gone, and its memory free
        found = gradients(inputs, seen, numbers, others, kept, ctx.needs_input_grad)
        return found.hidden, found.weight, found.bias, None, None, None, None
