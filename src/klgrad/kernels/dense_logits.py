"""`from_logits`: the same statistics from given logits, which are read once forward and once backward."""

from typing import Any

import torch
from torch import Tensor

from . import state, validate as check, weights
from .autograd import backend_for, uncompiled
from .fused_statistics import TokenStatistics, all_rows, live_rows
from .head import Transform, check_transform
from .tile import Tile


@uncompiled
def from_logits(
    logits: Tensor,
    targets: Tensor,
    ref_logits: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    validate: bool = True,
) -> TokenStatistics:
    r"""Compute log-probs, entropy and exact KLs of each token, as `token_statistics` does, from (..., V) logits.

    An entry with logit -inf is banned: it cannot be sampled. It contributes nothing if both models ban it. If only the
    reference bans it, the reverse KL is infinite; if only the policy bans it, the forward KL is infinite. A model that
    bans every entry at a token is an error; with `validate=False` both KLs are NaN there.

    Estimates:
        nothing: every KL is the exact sum over the whole vocabulary.
    Gradient:
        of any weighted sum of the outputs with respect to `logits`; `ref_logits` have no gradient.
    Requires:
        logits of the positions that *predict* the targets.

    Args:
        logits: (..., V) of the policy.
        targets: (...) sampled tokens.
        ref_logits: (..., V) of the reference.
        mask: (...) 1 where a token is live.
        temperature: the sampling temperature; the logits of both models are divided by it.
        validate: check that targets are in the vocabulary and log-probs are finite. This costs one device
            synchronisation.

    Returns:
        The statistics of each token, in the shape of `targets`.

    Example:
        >>> import torch
        >>> from klgrad.kernels import from_logits
        >>> logits = torch.tensor([[2.0, 0.0, 0.0]], requires_grad=True)
        >>> found = from_logits(logits, torch.tensor([0]), torch.zeros(1, 3))
        >>> found.reverse_kl.detach(), found.forward_kl.detach()
        (tensor([0.4330]), tensor([0.4743]))
        >>> found.reverse_kl.sum().backward()
        >>> logits.grad
        tensor([[ 0.3353, -0.1676, -0.1676]])
    """
    check_transform(temperature)
    check.shapes(logits, targets, ref_logits, mask, None)
    check.one_vocabulary(logits.shape[-1], logits.shape[-1] if ref_logits is None else ref_logits.shape[-1])
    index = None if mask is None else (mask != 0).flatten().nonzero()[:, 0]
    wanted = live_rows(targets, index, targets.ndim).long().contiguous()
    flat = lambda x: live_rows(x, None, targets.ndim)  # all rows: the live ones alone would be a copy
    z, z_ref = flat(logits), None if ref_logits is None else flat(ref_logits.detach())
    if validate:
        check.targets(wanted[:, None], logits.shape[-1])
    with torch.autocast(z.device.type, enabled=False):
        transform = Transform(1, None, temperature)
        logp, entropy, ref_logp, reverse, forward = _FromLogits.apply(z, z_ref, wanted, index, transform)
    if validate:
        check.log_probs(logp, ref_logp, reverse, z, z_ref, index)
    back = lambda x: all_rows(x, index, targets.shape)
    paired = [None if z_ref is None else back(x) for x in (ref_logp, reverse, forward)]
    return TokenStatistics(back(logp), back(entropy), paired[0], paired[1], paired[2], None)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, z_ref: Tensor | None, targets: Tensor, places: Tensor | None, transform: Transform
    ) -> tuple[Tensor, ...]:
        tile, backend = _tile(z, z_ref, targets, places, transform), backend_for(z)
        dtype = torch.promote_types(z.dtype, torch.float32)
        new = lambda *shape: torch.zeros(shape, dtype=dtype, device=z.device)
        fields = state.POLICY_FIELDS if z_ref is None else state.FIELDS
        states = new(fields, backend.slices(z.shape[1]), len(targets))
        picked = new(2, len(targets))
        backend.statistics(tile, states, 0, picked, None)
        finished = state.finish(state.merge(states))
        ctx.save_for_backward(z, z_ref, targets, places)
        ctx.transform, ctx.finished, ctx.states = transform, finished, states
        ctx.set_materialize_grads(False)
        ref_logp = state.log_prob(picked[1], finished.logsumexp - finished.shift)
        ctx.mark_non_differentiable(ref_logp)
        copies = (x.clone() for x in (finished.reverse_kl, finished.forward_kl))
        return state.log_prob(picked[0], finished.logsumexp), finished.entropy.clone(), ref_logp, *copies

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        check.first_order()
        z, z_ref, targets, places = ctx.saved_tensors
        logp, entropy, _, reverse, forward = upstream
        none = torch.zeros_like(ctx.finished.logsumexp)
        given = [none if x is None else x.to(none.dtype) for x in (logp, reverse, forward, entropy)]
        rows = weights.per_token(ctx.finished, weights.Upstream(*given))
        new = torch.empty_like if places is None else torch.zeros_like  # masked rows are not written
        out = new(z, memory_format=torch.contiguous_format)
        tile = _tile(z, z_ref, targets, places, ctx.transform)
        backend_for(z).gradient(tile, rows, ctx.states, 0, None, out)
        return out, None, None, None, None


def _tile(z: Tensor, z_ref: Tensor | None, targets: Tensor, places: Tensor | None, transform: Transform) -> Tile:
    rows = lambda x: x if x is None or x.stride(-1) == 1 else x.contiguous()
    given = (rows(z), rows(z_ref), None, None, transform, transform)
    return Tile(0, z.shape[1], targets, *given, projected=False, places=places)
