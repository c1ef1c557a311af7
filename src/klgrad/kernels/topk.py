"""The entries of a vocabulary that are most likely, and divergences over them."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.divergences import FORWARD_KL, REVERSE_KL, Divergence, named
from ..errors import KernelInputError
from . import tiles_torch
from .fused_statistics import all_rows, head_tensors, live_rows
from .head import Head, check_heads, check_shapes, check_targets
from .state import BANNED, LOWEST, bregman_terms
from .tiling import LEAN_BUDGET, matmul_t


class TopEntries(NamedTuple):
    """The top k entries of a model at each token, and the log-probs of the sampled tokens.

    Attributes:
        ids: (..., k) entries, the most likely first.
        logp: (..., k) their log-probs.
        token_logp: (...) log-probs of the sampled tokens, which need not be among the entries.
        has_token: (...) whether the sampled token is among the entries.

    Example:
        >>> import torch
        >>> from klgrad.kernels import Head, top_entries
        >>> top_entries(torch.ones(1, 1), Head(torch.tensor([[0.0], [2.0], [1.0]])), torch.tensor([0]), k=2).ids
        tensor([[1, 2]])
    """

    ids: Tensor
    logp: Tensor
    token_logp: Tensor
    has_token: Tensor


@torch.no_grad()
def top_entries(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    budget: int | None = None,
    validate: bool = True,
) -> TopEntries:
    """Find the k most likely entries at every position, in float32 (float64 for float64 inputs), without gradient.

    Args:
        hidden: (..., H) last hidden states.
        head: the output head.
        targets: (...) sampled tokens.
        k: number of entries, smaller than the vocabulary.
        mask: (...) 1 where a token is live; masked tokens are not computed, and get the entries 0 to k - 1.
        budget: bytes for logits; 2 GiB by default.
        validate: check that targets are in the vocabulary. This costs one device synchronisation.

    Returns:
        The entries, and the log-probs of the sampled tokens.

    Example:
        >>> import torch
        >>> from klgrad.kernels import Head, top_entries
        >>> head = Head(torch.tensor([[0.0], [2.0], [1.0]]))  # V = 3, H = 1
        >>> best = top_entries(torch.ones(2, 1), head, torch.tensor([0, 2]), k=2)
        >>> best.ids
        tensor([[1, 2],
                [1, 2]])
        >>> best.has_token
        tensor([False,  True])
    """
    check_shapes(hidden, targets, None, mask, None)
    check_heads(head, hidden, None, None)
    if not 1 <= k < head.vocabulary:
        raise KernelInputError(
            f"k from 1 to {head.vocabulary - 1}", f"{k}", "for the full vocabulary use token_statistics without entries"
        )
    index = None if mask is None else (mask != 0).flatten().nonzero()[:, 0]
    rows, tokens = live_rows(hidden, index, targets.ndim), live_rows(targets, index, targets.ndim).long()
    if validate:
        check_targets(tokens, head.vocabulary)
    x, weight, bias = head_tensors(rows, head)
    dtype = torch.promote_types(x.dtype, torch.float32)
    budget = LEAN_BUDGET if budget is None else budget
    step = max(budget // (2 * head.vocabulary * dtype.itemsize), 1)  # the logits, and a copy in `transform`
    ids, logp = x.new_empty(len(x), k, dtype=torch.long), x.new_empty(len(x), k, dtype=dtype)
    token_logp = x.new_empty(len(x), dtype=dtype)
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        logits = x.new_empty(len(x[part]), head.vocabulary, dtype=dtype)
        matmul_t(x[part], weight, logits)
        logits = head.transform.apply(logits if bias is None else logits.add_(bias))
        total = logits.logsumexp(-1, keepdim=True)
        best = logits.topk(k)
        ids[part], logp[part] = best.indices, best.values - total
        token_logp[part] = (logits.gather(1, tokens[part, None]) - total)[:, 0]
    back = lambda x: all_rows(x, index, targets.shape)
    if index is None:
        all_ids = back(ids)
    else:  # masked rows get distinct, valid entries, so that a caller can gather at them
        first_entries = torch.arange(k, device=ids.device).expand(targets.numel(), k)
        all_ids = first_entries.index_copy(0, index, ids).reshape(*targets.shape, k)
    return TopEntries(all_ids, back(logp), back(token_logp), (all_ids == targets[..., None]).any(-1))


# A divergence over k entries of the vocabulary and a tail, for teachers that are stored or served as their top k.
#
# With u = p/q and f(1) = f'(1) = 0, the k entries add Σ_K q f(u) to D_f, with the gradient Σ_K f'(u) ∇p. Their part is
# never negative, whatever their mass is. A sum of p log(p/q) over them is not such a part: its gradient has one more
# term, ∇Σ_K p, by which it pushes mass out of the entries, and adding a score term of a sampled tail token to it does
# not repair that. Renormalised log-probs do not feel the mass of the entries at all.


def head_kl(logp: Tensor, ref_logp: Tensor, divergence: str | Divergence = "reverse") -> Tensor:
    r"""The part of a divergence that k entries have, Σ_K q f(p/q), without a tail.

    Estimates:
        a lower bound of the full divergence, never negative, below `lumped_kl`; 0 if both agree on the k entries.
    Gradient:
        exactly that of this sum: it makes π agree with ref on the k entries, and leaves the others as they are.
    Requires:
        the same k entries for both, chosen independently of the sampled token.

    Args:
        logp: (..., k) log π of the entries, of a normalised π; has the gradient.
        ref_logp: (..., k) log ref of the same entries, not renormalised.
        divergence: `reverse` is KL(π‖ref), `forward` is KL(ref‖π); or any that `klgrad.divergences.named` takes.

    Returns:
        (...) the part of each token.

    Example:
        >>> import torch
        >>> from klgrad.kernels import head_kl
        >>> logp, ref_logp = torch.tensor([0.6, 0.3]).log(), torch.tensor([0.5, 0.3]).log()
        >>> head_kl(logp, ref_logp)
        tensor(0.0094)
    """
    a, b = _checked(logp, ref_logp)
    return _summed(a, b, named(divergence))


def lumped_kl(logp: Tensor, ref_logp: Tensor, divergence: str | Divergence = "reverse") -> Tensor:
    r"""KL, or another divergence, between the two distributions over k entries and one lump of all other entries.

    Estimates:
        a lower bound of the full divergence (data processing), never negative; exact if both models have the same
        proportions within the tail.
    Gradient:
        exactly that of the lumped divergence, through the k entries and through 1 - Σ p.
    Requires:
        the same k entries for both, chosen independently of the sampled token.

    Args:
        logp: (..., k) log π of the entries; has the gradient.
        ref_logp: (..., k) log ref of the same entries, such as a teacher's stored top k.
        divergence: `reverse` is KL(π‖ref), `forward` is KL(ref‖π); or any that `klgrad.divergences.named` takes.

    Returns:
        (...) the lumped divergence of each token.

    Example:
        >>> import torch
        >>> from klgrad.kernels import lumped_kl
        >>> logp, ref_logp = torch.tensor([0.6, 0.3]).log(), torch.tensor([0.5, 0.3]).log()  # k = 2, tails 0.1 and 0.2
        >>> lumped_kl(logp, ref_logp)
        tensor(0.0401)
    """
    a, b = (_with_tail(x) for x in _checked(logp, ref_logp))
    return _summed(a, b, named(divergence))


def sampled_tail_kl(
    logp: Tensor,
    ref_logp: Tensor,
    token_logp: Tensor,
    token_ref_logp: Tensor,
    in_head: Tensor,
    *,
    ratio: Tensor | None = None,
    divergence: str | Divergence = "reverse",
) -> Tensor:
    r"""KL, or another divergence: k entries (the head) summed, and the tail estimated by a sampled token in it.

    Estimates:
        the full divergence, unbiased for y ~ π (or weighted by `ratio`), never negative: the entries' part plus the
        excess f(u)/u of a token in the tail.
    Gradient:
        Σ_K f'(u) ∇p plus [y in tail] f'(u_y) ∇log p_y, unbiased for the gradient of the full divergence. The
        probability of the head needs no separate correction: it cancels.
    Requires:
        entries chosen independently of the sampled token; log-probs of the sampled token by both models.

    Args:
        logp: (..., k) log π of the entries; has the gradient.
        ref_logp: (..., k) log ref of the same entries.
        token_logp: (...) log π of the sampled token; has the gradient.
        token_ref_logp: (...) log ref of the sampled token.
        in_head: (...) whether the sampled token is among the entries.
        ratio: (...) token ratio π/μ if another policy μ sampled; only the tail uses it.
        divergence: `reverse` is KL(π‖ref), `forward` is KL(ref‖π); or any that `klgrad.divergences.named` takes.

    Returns:
        (...) the estimate of the divergence of each token.

    Example:
        >>> import torch
        >>> from klgrad.kernels import sampled_tail_kl
        >>> p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.5, 0.2, 0.3])
        >>> token = torch.arange(3)  # each entry of the vocabulary as the sampled token; the first is the head
        >>> head = (p[:1].log().expand(3, 1), q[:1].log().expand(3, 1))
        >>> kl = sampled_tail_kl(*head, p[token].log(), q[token].log(), in_head=token < 1)
        >>> torch.allclose((p * kl).sum(), (p * (p / q).log()).sum())  # its mean is the full KL
        True
    """
    a, b = _checked(logp, ref_logp)
    generator = named(divergence)
    log_ratio = token_logp.detach() - token_ref_logp.detach()
    weight = (~in_head.bool()).to(a.dtype) * (1.0 if ratio is None else ratio.detach())
    tail = _with_gradient(weight * generator.excess(log_ratio), weight * generator.slope(log_ratio) * token_logp)
    return _summed(a, b, generator) + tail


def _summed(a: Tensor, b: Tensor, divergence: Divergence) -> Tensor:
    """Compute Σ q f(p/q) over the entries, with the gradient Σ p f'(p/q) ∇log p."""
    at = a.detach()
    return _with_gradient(_terms(at, b, divergence).sum(-1), (_pull(at, b, divergence) * a).sum(-1))


def _terms(a: Tensor, b: Tensor, divergence: Divergence) -> Tensor:
    """Compute q f(p/q) of each entry: never negative. A KL is infinite where one side bans what the other allows."""
    if divergence not in (REVERSE_KL, FORWARD_KL):
        return tiles_torch.terms(divergence, a, b, a - b)
    reverse, forward = bregman_terms(a, b)
    difference = a - b
    if divergence == REVERSE_KL:
        return torch.where(difference > BANNED, torch.inf, reverse)
    return torch.where(difference < -BANNED, torch.inf, forward)


def _pull(a: Tensor, b: Tensor, divergence: Divergence) -> Tensor:
    """Compute p f'(p/q) of each entry; of the forward KL without exp(-l), which the slope caps."""
    return a.exp() - b.exp() if divergence == FORWARD_KL else a.exp() * divergence.slope(a - b)


def _with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    return value + (surrogate - surrogate.detach())


def _with_tail(logp: Tensor) -> Tensor:
    """(..., k) to (..., k + 1): the last is log(1 - Σp), where 1 - Σp is at least the rounding error."""
    floor = torch.finfo(logp.dtype).eps
    mass = logp.exp().sum(-1, keepdim=True)
    return torch.cat([logp, (1 - mass).clamp(min=floor).log()], -1)


def _checked(logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float32 or wider, those of the reference detached; -inf becomes `LOWEST`, for finite differences."""
    if logp.shape != ref_logp.shape or not logp.is_floating_point():
        raise KernelInputError(
            "log-probs of the same k entries, both of shape (..., k)",
            f"shapes {tuple(logp.shape)} and {tuple(ref_logp.shape)}",
            "take the policy's log-probs at the reference's entries: token_statistics(..., entries=ids).entries_logp",
        )
    lifted = lambda x: x.to(torch.promote_types(x.dtype, torch.float32)).clamp(min=LOWEST)
    return lifted(logp), lifted(ref_logp.detach())
