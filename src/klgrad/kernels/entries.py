"""The likeliest entries of a model's vocabulary, token by token, without all logits at once."""

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
    """What is known of a teacher that is stored or served as its top k, and of the sampled tokens.

    Attributes:
        ids: (..., k) entries, the likeliest first.
        logp: (..., k) their log-probs.
        token_logp: (...) log-probs of the sampled tokens, which need not be among them.
        has_token: (...) whether they are.
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
    """The k likeliest entries of every position, in float32 (float64 for float64 inputs); no gradient.

    Args:
        hidden: (..., H) last hidden states.
        head: the output head.
        targets: (...) sampled tokens.
        k: how many entries, fewer than the vocabulary has.
        mask: (...) 1 where a token is live; the rest costs nothing, and gets the entries 0 to k - 1.
        budget: bytes for logits, 2 GiB if not given.
        validate: look for targets outside the vocabulary, at the price of one synchronisation.
    """
    check.shapes(hidden, targets, None, mask, None)
    check.heads(head, hidden, None, None)
    if not 1 <= k < head.vocabulary:
        raise KernelInputError(f"k from 1 to {head.vocabulary - 1}", f"{k}", "the full vocabulary needs no entries")
    index = None if mask is None else (mask != 0).flatten().nonzero()[:, 0]
    rows, wanted = live_rows(hidden, index, targets.ndim), live_rows(targets, index, targets.ndim).long()
    if validate:
        check.targets(wanted, head.vocabulary)
    x, weight, bias = head_tensors(rows, head)
    dtype = torch.promote_types(x.dtype, torch.float32)
    budget = LEAN_BUDGET if budget is None else budget
    step = max(budget // (2 * head.vocabulary * dtype.itemsize), 1)  # the logits, and once more while they are changed
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
    else:  # different entries everywhere, for whoever gathers at them
        everywhere = torch.arange(k, device=ids.device).expand(targets.numel(), k)
        all_ids = everywhere.index_copy(0, index, ids).reshape(*targets.shape, k)
    return TopEntries(all_ids, back(logp), back(token_logp), (all_ids == targets[..., None]).any(-1))
