"""`top_entries`: the most likely vocabulary entries at each token, without storing all logits at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import KernelInputError
from . import validate as check
from .fused_statistics import all_rows, head_tensors, live_rows
from .head import Head
from .plan import LEAN_BUDGET
from .project import project


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
        >>> found = top_entries(torch.ones(2, 1), head, torch.tensor([0, 2]), k=2)
        >>> found.ids
        tensor([[1, 2],
                [1, 2]])
        >>> found.has_token
        tensor([False,  True])
    """
    check.shapes(hidden, targets, None, mask, None)
    check.heads(head, hidden, None, None)
    if not 1 <= k < head.vocabulary:
        raise KernelInputError(
            f"k from 1 to {head.vocabulary - 1}", f"{k}", "for the full vocabulary use token_statistics without entries"
        )
    index = None if mask is None else (mask != 0).flatten().nonzero()[:, 0]
    rows, wanted = live_rows(hidden, index, targets.ndim), live_rows(targets, index, targets.ndim).long()
    if validate:
        check.targets(wanted, head.vocabulary)
    x, weight, bias = head_tensors(rows, head)
    dtype = torch.promote_types(x.dtype, torch.float32)
    budget = LEAN_BUDGET if budget is None else budget
    step = max(budget // (2 * head.vocabulary * dtype.itemsize), 1)  # the logits, and a copy in `transform`
    ids, logp = x.new_empty(len(x), k, dtype=torch.long), x.new_empty(len(x), k, dtype=dtype)
    token_logp = x.new_empty(len(x), dtype=dtype)
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        logits = x.new_empty(len(x[part]), head.vocabulary, dtype=dtype)
        project(x[part], weight, logits)
        logits = head.transform.apply(logits if bias is None else logits.add_(bias))
        total = logits.logsumexp(-1, keepdim=True)
        best = logits.topk(k)
        ids[part], logp[part] = best.indices, best.values - total
        token_logp[part] = (logits.gather(1, wanted[part, None]) - total)[:, 0]
    back = lambda found: all_rows(found, index, targets.shape)
    if index is None:
        all_ids = back(ids)
    else:  # masked rows get distinct, valid entries, so that a caller can gather at them
        everywhere = torch.arange(k, device=ids.device).expand(targets.numel(), k)
        all_ids = everywhere.index_copy(0, index, ids).reshape(*targets.shape, k)
    return TopEntries(all_ids, back(logp), back(token_logp), (all_ids == targets[..., None]).any(-1))
