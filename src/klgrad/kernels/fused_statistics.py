"""`token_statistics`: log-probs, both exact KLs and the entropy, from hidden states and without storing logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.rollout import Rollout
from . import validate as check
from .autograd import StatisticsFunction, backend_for, uncompiled
from .head import Head, Transform
from .hopper.choice import used_for
from .inputs import Job
from .parallel import shard_of
from .plan import Mode, make_plan


class TokenStatistics(NamedTuple):
    """Statistics of each token, in float32 (float64 for float64 inputs); 0 where masked.

    Attributes:
        logp: (...) log π of the sampled token.
        entropy: (...) entropy of π over the full vocabulary.
        ref_logp: (...) log ref of the sampled token, without gradient; None without a reference.
        reverse_kl: (...) KL(π ‖ ref) over the full vocabulary; None without a reference.
        forward_kl: (...) KL(ref ‖ π) over the full vocabulary; None without a reference.
        entries_logp: (..., k) log π of the requested entries, or None.

    Example:
        >>> import torch
        >>> from klgrad import KLTerm
        >>> from klgrad.kernels import from_logits
        >>> logits, ref_logits = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.zeros(1, 2, 2)
        >>> statistics = from_logits(logits.requires_grad_(), torch.tensor([[0, 1]]), ref_logits)
        >>> result = KLTerm(estimator="exact")(statistics.rollout(mask=torch.ones(1, 2)))
        >>> torch.allclose(result.loss, statistics.reverse_kl.sum())
        True
    """

    logp: Tensor
    entropy: Tensor
    ref_logp: Tensor | None
    reverse_kl: Tensor | None
    forward_kl: Tensor | None
    entries_logp: Tensor | None

    def rollout(self, mask: Tensor, behavior_logp: Tensor | None = None, group: Tensor | None = None) -> Rollout:
        """Make the batch for `KLTerm(estimator="exact")`; the statistics must be (B, T).

        Args:
            mask: (B, T) 1 where a token is live.
            behavior_logp: (B, T) log-probs of the policy that sampled, if it is not π.
            group: (B,) index of the prompt of each completion.

        Returns:
            A `Rollout` with exact KLs.
        """
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
    r"""Compute log-probs, entropy and exact KLs of each token from hidden states, without storing (N, V) logits.

    Estimates:
        nothing: every KL is the exact sum over the whole vocabulary.
    Gradient:
        of any weighted sum of `logp`, both KLs, the entropy and `entries_logp` with respect to `hidden`, `head.weight`
        and `head.bias`, in one backward pass. The reference has no gradient.
    Requires:
        hidden states of the positions that *predict* the targets: position t - 1 for token t.

    Args:
        hidden: (..., H) last hidden states of the policy, after its final norm.
        head: the policy's output head.
        targets: (...) sampled tokens; values where `mask` is 0 are ignored.
        ref_hidden: (..., H') last hidden states of the reference, whose hidden size may differ.
        ref_head: the reference's head, over the same vocabulary.
        mask: (...) 1 where a token is live; masked tokens are not computed.
        entries: (..., k) further vocabulary entries whose log-probs to compute, such as a teacher's top k.
        mode: `lean` has a budget of 2 GiB, and recomputes the logits that do not fit in the backward pass; `fast` has
            no limit, and recomputes nothing.
        budget: bytes for tiles of logits and for logits kept until the backward pass (16 bits each for half-precision
            inputs); overrides the budget of the mode.
        group: a process group over which the vocabulary is split, in order of rank; both heads hold the rows of this
            rank. The gradient of `hidden` is then summed over the group.
        validate: check that targets are in the vocabulary and results are finite. This costs one device
            synchronisation.

    Returns:
        The statistics of each token, in the shape of `targets`.

    Example:
        >>> import torch
        >>> from klgrad.kernels import Head, token_statistics
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)  # two tokens, H = 2
        >>> head, ref_head = Head(torch.eye(3, 2)), Head(torch.zeros(3, 2))  # V = 3, and a uniform reference
        >>> found = token_statistics(hidden, head, torch.tensor([0, 2]), hidden.detach(), ref_head)
        >>> found.logp.detach()
        tensor([-0.5514, -1.5514])
        >>> found.reverse_kl.detach()
        tensor([0.1233, 0.1233])
        >>> found.reverse_kl.sum().backward()
        >>> hidden.grad
        tensor([[ 0.2442, -0.1221],
                [-0.1221,  0.2442]])
    """
    check.shapes(hidden, targets, ref_hidden, mask, entries)
    check.heads(head, hidden, ref_head, ref_hidden)
    live = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask != 0
    index = None if mask is None else live.flatten().nonzero()[:, 0]
    flat = lambda x: live_rows(x, index, live.ndim)
    policy = head_tensors(flat(hidden), head)
    reference: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if ref_hidden is not None and ref_head is not None:
        x, weight, bias = head_tensors(flat(ref_hidden), ref_head)
        reference = x.detach(), weight.detach(), None if bias is None else bias.detach()
    wanted, others = flat(targets).long().contiguous(), _entries(entries, flat, targets)
    shard = shard_of(len(policy[1]), group, hidden.device)
    transforms = head.transform, ref_head.transform if ref_head is not None else Transform()
    hopper = used_for(policy, reference, transforms, others.shape[1])
    plan = make_plan(
        max(len(wanted), 1),
        len(policy[1]),
        policy[0].dtype,
        paired=ref_hidden is not None,
        mode=mode,
        budget=budget,
        hopper=hopper,
    )
    own = lambda x: x if shard.start == 0 else x - shard.start
    job = Job(
        own(wanted),
        own(others),
        plan,
        *transforms,
        shard,
        backend_for(policy[0]),
        hopper,
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
    """Hidden states, weight and bias in one dtype: that of autocast if it is on, else the wider of the two."""
    weight, bias = whole(head.weight), None if head.bias is None else whole(head.bias)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.contiguous()


def whole(x: Tensor) -> Tensor:
    """Gather a parameter that FSDP2 has sharded; other tensors are returned unchanged.

    The gradient of the shards is the mean over the processes, which have different tokens. This is the convention of
    FSDP for every other parameter.
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
    """Select the live rows, (N, *rest), of a tensor with `dims` leading dimensions, (..., *rest)."""
    rows = x.reshape(-1, *x.shape[dims:])
    return rows if index is None else rows.index_select(0, index)


def all_rows(x: Tensor, index: Tensor | None, shape: torch.Size) -> Tensor:
    """The inverse of `live_rows`, with 0 in the rows that are not live."""
    if index is not None:
        x = x.new_zeros(shape.numel(), *x.shape[1:]).index_copy(0, index, x)
    return x.reshape(*shape, *x.shape[1:])
