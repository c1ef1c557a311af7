"""`token_statistics`: log-probs, both exact KLs and the entropy, from hidden states and without the logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.rollout import Rollout
from . import validate as check
from .autograd import StatisticsFunction, backend_for, uncompiled
from .head import Head, Transform
from .inputs import Job
from .parallel import shard_of
from .plan import Mode, make_plan


class TokenStatistics(NamedTuple):
    """One number per token each, in float32 (float64 for float64 inputs); 0 where masked.

    Attributes:
        logp: log π of the sampled token.
        entropy: of π over the full vocabulary.
        ref_logp: log ref of the sampled token, without gradient; None without a reference, as are both KLs.
        reverse_kl: KL(π ‖ ref) over the full vocabulary.
        forward_kl: KL(ref ‖ π) likewise.
        entries_logp: log π of the entries asked for, (..., k), or None.
    """

    logp: Tensor
    entropy: Tensor
    ref_logp: Tensor | None
    reverse_kl: Tensor | None
    forward_kl: Tensor | None
    entries_logp: Tensor | None

    def rollout(self, mask: Tensor, behavior_logp: Tensor | None = None, group: Tensor | None = None) -> Rollout:
        """The batch as `KLTerm(estimator="exact")` takes it; every tensor is (B, T)."""
        check.has_reference(self.ref_logp)
        assert self.ref_logp is not None
        return Rollout(
            self.logp,
            self.ref_logp,
            mask,
            behavior_logp=behavior_logp,
            group=group,
            token_reverse_kl=self.reverse_kl,
            token_forward_kl=self.forward_kl,
        )


@uncompiled
def token_statistics(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    ref_hidden: Tensor | None = None,
    ref_head: Head | None = None,
    *,
    mask: Tensor | None = None,
    entries: Tensor | None = None,
    mode: Mode = "lean",
    budget: int | None = None,
    group: Any = None,
    validate: bool = True,
) -> TokenStatistics:
    r"""Per-token statistics of π, and of π against a reference, without ever holding (N, V) logits.

    Estimates:
        nothing: every KL is the sum over the whole vocabulary.
    Gradient:
        of any weighted sum of `logp`, both KLs, the entropy and `entries_logp`, to `hidden`, `head.weight` and
        `head.bias`, in one backward pass. None to the reference.
    Requires:
        hidden states of the positions that *predict* the targets: position t - 1 for token t.

    Args:
        hidden: (..., H) last hidden states of the policy, after its final norm.
        head: the policy's output head.
        targets: (...) sampled tokens; whatever stands where `mask` is 0 is not looked at.
        ref_hidden: (..., H') of the reference, whose hidden size may differ.
        ref_head: the reference's head, over the same vocabulary.
        mask: (...) 1 where a token is live; the rest costs nothing.
        entries: (..., k) further vocabulary entries whose log-probs are wanted, such as a teacher's top k.
        mode: `lean` has a budget of 2 GiB, and recomputes in backward the logits that it does not hold; `fast` has
            no limit, and recomputes nothing.
        budget: bytes for tiles of logits and for logits kept until backward (16 bits each for half-precision
            inputs), instead of the mode's.
        group: a process group over which the vocabulary is split, in order of rank; both heads hold this rank's
            rows. The gradient to `hidden` is then summed over it.
        validate: look at targets and results for NaN, infinities and strays, at the price of one synchronisation.
    """
    check.shapes(hidden, targets, ref_hidden, mask, entries)
    check.heads(head, hidden, ref_head, ref_hidden)
    live = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask != 0
    index = None if mask is None else live.flatten().nonzero()[:, 0]
    flat = lambda x: live_rows(x, index, live.ndim)
    policy = head_tensors(flat(hidden), head)
    reference: tuple[Tensor | None, ...] = (None, None, None)
    if ref_hidden is not None and ref_head is not None:
        reference = tuple(None if x is None else x.detach() for x in head_tensors(flat(ref_hidden), ref_head))
    wanted, others = flat(targets).long().contiguous(), _entries(entries, flat, targets)
    shard = shard_of(len(policy[1]), group, hidden.device)
    plan = make_plan(
        max(len(wanted), 1), len(policy[1]), policy[0].dtype, paired=ref_hidden is not None, mode=mode, budget=budget
    )
    own = lambda x: x if shard.start == 0 else x - shard.start
    job = Job(
        own(wanted),
        own(others),
        plan,
        head.transform,
        ref_head.transform if ref_head is not None else Transform(),
        shard,
        backend_for(policy[0]),
    )
    with torch.autocast(hidden.device.type, enabled=False):
        found = StatisticsFunction.apply(*policy, *reference, job)
    logp, ref_logp, reverse, forward, entropy, entries_logp = found
    if validate:
        check.outcome(torch.cat([wanted[:, None], others], 1), shard.vocabulary, found, policy, reference)
    back = lambda x: all_rows(x, index, live.shape)
    paired = ref_hidden is not None
    return TokenStatistics(
        back(logp),
        back(entropy),
        back(ref_logp) if paired else None,
        back(reverse) if paired else None,
        back(forward) if paired else None,
        None if entries is None else back(entries_logp),
    )


def head_tensors(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states and head in one dtype: autocast's where it is on, else the wider of the two."""
    weight, bias = whole(head.weight), None if head.bias is None else whole(head.bias)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.contiguous()


def whole(x: Tensor) -> Tensor:
    """A sharded parameter (FSDP2's) gathered; the gradient goes back to the shards.

    It is the mean over the processes, each of which has tokens of its own, as FSDP's is for every other parameter.
    """
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        return x
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(x, DTensor)
    full = x.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full


def _entries(entries: Tensor | None, flat: Any, targets: Tensor) -> Tensor:
    if entries is None:
        return targets.new_empty(int(flat(targets).shape[0]), 0, dtype=torch.long)
    return flat(entries).long().contiguous()


def live_rows(x: Tensor, index: Tensor | None, dims: int) -> Tensor:
    """(..., *rest) with `dims` leading dimensions to the live rows, (N, *rest)."""
    rows = x.reshape(-1, *x.shape[dims:])
    return rows if index is None else rows.index_select(0, index)


def all_rows(x: Tensor, index: Tensor | None, shape: torch.Size) -> Tensor:
    """Back to all rows, 0 where none was live."""
    if index is not None:
        x = x.new_zeros(shape.numel(), *x.shape[1:]).index_copy(0, index, x)
    return x.reshape(*shape, *x.shape[1:])
