r"""The KL over k entries of the vocabulary and a tail, for teachers that are stored or served as their top k.

Both forms keep the gradient right. Summing the k terms alone lacks the gradient of the tail's part; scoring the tail
beside a differentiated head adds ∇Σ_K p, the gradient of the head's mass, once.
"""

from typing import Literal

import torch
from torch import Tensor

from ..core.estimators import forward_k3, k3
from ..errors import KernelInputError
from .state import BANNED, LOWEST, excesses

Divergence = Literal["reverse", "forward"]


def lumped_kl(logp: Tensor, ref_logp: Tensor, divergence: Divergence = "reverse") -> Tensor:
    r"""KL between the two distributions over k entries and one lump: all the others.

    Estimates:
        a lower bound of the full KL (data processing), never negative, exact where the tail's inner proportions agree.
    Gradient:
        that of the lumped KL itself, exactly: log p flows through the k entries and through 1 - Σ p.
    Requires:
        the same k entries for both, chosen without regard to the sampled token.

    Args:
        logp: (..., k) log π of the entries; carries the gradient.
        ref_logp: (..., k) log ref of the same entries, such as a teacher's stored top k.
        divergence: `reverse` is KL(π‖ref), `forward` is KL(ref‖π).
    """
    a, b = (_with_tail(x) for x in _checked(logp, ref_logp))
    return _with_gradient(_excess(a, b, divergence).sum(-1), _pull(a, b, divergence).sum(-1))


def sampled_tail_kl(
    logp: Tensor,
    ref_logp: Tensor,
    token_logp: Tensor,
    token_ref_logp: Tensor,
    in_head: Tensor,
    *,
    ratio: Tensor | None = None,
    divergence: Divergence = "reverse",
) -> Tensor:
    r"""KL over k entries exactly, and over the tail by the sampled token where it lies there.

    Estimates:
        the full KL, unbiased for y ~ π (or weighted by `ratio`), never negative: Bregman terms of the head plus the
        tail's k3.
    Gradient:
        Σ_K Δ ∇p plus [y in tail] Δ_y ∇log p_y, unbiased for the gradient of the full KL (forward: -Σ_K q ∇log p
        - [y in tail] (q/p)_y ∇log p_y). The head's mass needs no correction of its own: it cancels.
    Requires:
        entries chosen without regard to the sampled token; log-probs of the sampled token by both.

    Args:
        logp: (..., k) log π of the entries; carries the gradient.
        ref_logp: (..., k) log ref of the same entries.
        token_logp: (...) log π of the sampled token; carries the gradient.
        token_ref_logp: (...) log ref of the sampled token.
        in_head: (...) whether the sampled token is among the entries.
        ratio: (...) token ratio π/μ where another policy sampled; the head needs none.
        divergence: `reverse` or `forward`.
    """
    logp, b = _checked(logp, ref_logp)
    log_ratio = token_logp.detach() - token_ref_logp.detach()
    weight = (~in_head.bool()).to(logp.dtype) * (1.0 if ratio is None else ratio.detach())
    if divergence == "reverse":
        tail, coefficient = k3.value(log_ratio), log_ratio
    else:  # k3's slope is 1 - q/p, and the tail's share of -Σ q ∇log p is -q/p
        tail, coefficient = forward_k3.value(log_ratio), k3.slope(log_ratio) - 1
    value = _excess(logp, b, divergence).sum(-1) + weight * tail
    return _with_gradient(value, _pull(logp, b, divergence).sum(-1) + weight * coefficient * token_logp)


def _excess(a: Tensor, b: Tensor, divergence: Divergence) -> Tensor:
    """Per entry q - p + p log(p/q), or its mirror image: never negative, and the KL in sum where both sum to 1."""
    reverse, forward = excesses(a.detach(), b)
    apart = a.detach() - b
    if divergence == "reverse":
        return torch.where(apart > BANNED, torch.inf, reverse)
    return torch.where(apart < -BANNED, torch.inf, forward)


def _pull(a: Tensor, b: Tensor, divergence: Divergence) -> Tensor:
    """What is differentiated: Δ·p with Δ held, or -q·log p."""
    return (a.detach() - b) * a.exp() if divergence == "reverse" else -b.exp() * a


def _with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    return value + (surrogate - surrogate.detach())


def _with_tail(logp: Tensor) -> Tensor:
    """(..., k) to (..., k + 1): the last is log(1 - Σp), no lower than rounding can tell from 0."""
    floor = torch.finfo(logp.dtype).eps
    mass = logp.exp().sum(-1, keepdim=True)
    return torch.cat([logp, (1 - mass).clamp(min=floor).log()], -1)


def _checked(logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float32 or wider, the reference's detached; -inf is held where differences stay finite."""
    if logp.shape != ref_logp.shape or not logp.is_floating_point():
        raise KernelInputError(
            "log-probs of the same k entries, (..., k) by both",
            f"shapes {tuple(logp.shape)} and {tuple(ref_logp.shape)}",
            "gather the policy's at the reference's entries: token_statistics(..., entries=ids).entries_logp",
        )
    lifted = lambda x: x.to(torch.promote_types(x.dtype, torch.float32)).clamp(min=LOWEST)
    return lifted(logp), lifted(ref_logp.detach())
