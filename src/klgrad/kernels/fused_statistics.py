"""Log-probs, exact KLs and the entropy of each token: from hidden states without storing logits, and from logits."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..core.divergences import Divergence, named
from ..core.rollout import Rollout
from ..errors import KernelInputError
from . import state, tiles_torch
from .head import (
    Head,
    Transform,
    check_heads,
    check_one_vocabulary,
    check_shapes,
    check_targets,
    check_transform,
)
from .hopper import used_for
from .passes import gradients, over_kept, scan
from .state import log_prob
from .tiling import CPU_STRIP, Mode, Operands, PassConfig, Tile, TilePlan, make_plan

# Checks of the results of the kernels; those of the inputs are in `head.py`.


def check_outcome(
    wanted: Tensor,
    vocabulary: int,
    outputs: tuple[Tensor, ...],
    policy: tuple[Tensor | None, ...],
    references: list[tuple[Tensor | None, Tensor | None, Tensor | None]],
) -> None:
    """Check targets and results with one device synchronisation; an error names the input that caused it."""
    outside = (wanted < 0) | (wanted >= vocabulary)
    if not bool(outside.any() | ~torch.stack([*outputs[:5], *outputs[6:]]).detach().isfinite().all()):
        return
    check_targets(wanted, vocabulary)
    for prefix, model in (("", policy), *(("ref_", reference) for reference in references)):
        for name, x in zip(("hidden", "head.weight", "head.bias"), model, strict=True):
            if x is not None and not bool(x.isfinite().all()):
                where = (~x.isfinite()).nonzero()[0].tolist()
                raise KernelInputError(
                    f"finite `{prefix}{name}`",
                    f"{float(x[tuple(where)]):g} at {where}",
                    "find its origin (an overflow in half precision, an uninitialised or diverged weight)",
                )
    raise KernelInputError(
        "finite statistics", "an overflow in the logits", "check the scale of the hidden states and heads"
    )


def check_log_probs(
    logp: Tensor, ref_logp: Tensor, kl: Tensor, logits: Tensor, ref_logits: Tensor | None, places: Tensor | None
) -> None:
    """Check that sampled tokens have finite log-probs; other logits may be -inf, but not all of a model at a token.

    `places` are the rows of the tokens in the logits; None if they are all rows.
    """
    sound = logp.detach().isfinite() & ~ref_logp.isnan() & ~kl.detach().isnan()
    if bool(sound.all()):
        return
    row = int((~sound).nonzero()[0])
    place = row if places is None else int(places[row])
    for name, x in (("logits", logits), ("ref_logits", ref_logits)):
        if x is not None and not bool((x[place] < torch.inf).all()):
            raise KernelInputError(f"`{name}` without NaN and +inf", f"one at live token {row}", "find its origin")
        if x is not None and not bool((x[place] > -torch.inf).any()):
            raise KernelInputError(
                f"`{name}` with a finite entry at every live token",
                f"-inf at live token {row} for every entry",
                "mask tokens that have no prediction, or find the code that banned the whole vocabulary",
            )
    raise KernelInputError(
        "a finite log-prob of every sampled token",
        f"{float(logp[row].detach()):g} at live token {row}",
        "use the distribution that sampled the token; do not ban entries that it allowed",
    )


def check_first_order() -> None:
    """Refuse second derivatives, which would silently be wrong."""
    if torch.is_grad_enabled():
        raise KernelInputError(
            "first derivatives only",
            "create_graph=True",
            "second derivatives: klgrad.kernels.fused_statistics.reference_statistics, which is plain torch",
        )


# The autograd function of the forward and backward pass.

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
    """Computes (logp, ref_logp, reverse KL, forward KL, entropy, log-probs of other entries) of each token.

    A divergence, if one is wanted, is the seventh output. `references` are hidden states, weight and bias of each one,
    with its settings in `configs`; what depends on them is summed with `weights`, numbers or (N,) tensors.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        configs: list[PassConfig],
        weights: list[Tensor | float],
        *references: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, bias, *references)
        ctx.configs, ctx.weights = configs, weights
        ctx.forward_states = forward_states = scan(_pairs((hidden, weight, bias), references, configs))
        ctx.set_materialize_grads(False)
        logsumexp, entropy, *_ = forward_states[0].statistics
        # Copies, because a caller may change the returned tensors in place, and backward still needs these.
        total = lambda values: sum((w * x for w, x in zip(weights, values, strict=True)), torch.zeros_like(logsumexp))
        logp = log_prob(forward_states[0].picked[0], logsumexp)
        ref_logp = total(log_prob(s.picked[1], logsumexp - s.statistics.lse_difference) for s in forward_states)
        ctx.mark_non_differentiable(ref_logp)
        others = log_prob(forward_states[0].others, logsumexp[:, None])
        reverse, forward = (total(s.statistics[i] for s in forward_states) for i in (3, 4))
        divergences = [s.divergence[0] for s in forward_states if s.divergence is not None]
        divergence = (total(divergences),) if divergences else ()
        return logp, ref_logp, reverse, forward, entropy.clone(), others, *divergence

    @staticmethod
    def backward(ctx, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_order()
        hidden, weight, bias, *references = ctx.saved_tensors
        pairs, forward_states = _pairs((hidden, weight, bias), references, ctx.configs), ctx.forward_states
        # Kept logits are overwritten by their gradient; a second backward pass recomputes them.
        ctx.forward_states = [replace(s, kept=None) for s in forward_states]
        logp, _, reverse, forward, entropy, others, *divergence = upstream
        statistics = [s.statistics for s in forward_states]
        none = torch.zeros_like(statistics[0].logsumexp)
        cast = lambda x: none if x is None else x.to(none.dtype)
        elsewhere = None if others is None else others.sum(-1).to(none.dtype)
        of_policy = (state.Upstream(cast(logp), none, none, cast(entropy)), elsewhere)
        numbers: list[Tensor] = []
        for i, (w, s) in enumerate(zip(ctx.weights, statistics, strict=True)):
            # The policy's own outputs count once.
            weights, elsewhere = of_policy if i == 0 else (state.Upstream(none, none, none, none), None)
            weights = weights._replace(reverse_kl=w * cast(reverse), forward_kl=w * cast(forward))
            numbers.append(state.gradient_numbers(s, weights, elsewhere))
            if divergence and divergence[0] is not None:
                mean_slope = forward_states[i].divergence[1]
                numbers[i] = state.with_divergence(numbers[i], w * cast(divergence[0]), mean_slope)
        kept = over_kept(pairs[0], forward_states[0], numbers[0], others)
        forward_states = ctx.forward_states  # without the other half of what was kept, whose memory is now free
        slopes = gradients(pairs, forward_states, numbers, others, kept, ctx.needs_input_grad)
        return slopes.hidden, slopes.weight, slopes.bias, None, None, *(None for _ in references)


def _pairs(
    policy: tuple[Tensor | None, ...], references: Sequence[Tensor | None], configs: list[PassConfig]
) -> list[Operands]:
    """The policy with each of the references."""
    return [Operands(*policy, *references[3 * i : 3 * i + 3], config=config) for i, config in enumerate(configs)]  # type: ignore[arg-type]


# `token_statistics`: log-probs, both exact KLs and the entropy, from hidden states and without storing logits.


class TokenStatistics(NamedTuple):
    """Statistics of each token, in float32 (float64 for float64 inputs); 0 where masked.

    Attributes:
        logp: (...) log π of the sampled token.
        entropy: (...) entropy of π over the full vocabulary.
        ref_logp: (...) log ref of the sampled token, without gradient; None without a reference.
        reverse_kl: (...) KL(π ‖ ref) over the full vocabulary; None without a reference.
        forward_kl: (...) KL(ref ‖ π) over the full vocabulary; None without a reference.
        entries_logp: (..., k) log π of the requested entries, or None.
        divergence: (...) the requested divergence of π from ref over the full vocabulary, or None.

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
    divergence: Tensor | None = None

    def rollout(self, mask: Tensor, behavior_logp: Tensor | None = None, group: Tensor | None = None) -> Rollout:
        """Make the batch for `KLTerm(estimator="exact")`; the statistics must be (B, T).

        Args:
            mask: (B, T) 1 where a token is live.
            behavior_logp: (B, T) log-probs of the policy that sampled, if it is not π.
            group: (B,) index of the prompt of each completion.

        Returns:
            A `Rollout` with exact KLs.
        """
        if self.ref_logp is None:
            raise KernelInputError(
                "statistics with a reference", "no reference", "pass ref_hidden and ref_head to token_statistics"
            )
        return Rollout(
            self.logp,
            self.ref_logp,
            mask,
            behavior_logp=behavior_logp,
            group=group,
            token_reverse_kl=self.reverse_kl,
            token_forward_kl=self.forward_kl,
            token_divergence=self.divergence,
        )


@uncompiled
def token_statistics(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    ref_hidden: Tensor | Sequence[Tensor] | None = None,
    ref_head: Head | Sequence[Head] | None = None,
    *,
    ref_weights: Sequence[float | Tensor] | None = None,
    mask: Tensor | None = None,
    entries: Tensor | None = None,
    divergence: str | Divergence | None = None,
    mode: Mode = "lean",
    budget: int | None = None,
    validate: bool = True,
) -> TokenStatistics:
    r"""Compute log-probs, entropy and exact KLs of each token from hidden states, without storing (N, V) logits.

    Estimates:
        nothing: every KL is the exact sum over the whole vocabulary.
    Gradient:
        of any weighted sum of `logp`, both KLs, the entropy, `entries_logp` and `divergence` with respect to `hidden`,
        `head.weight` and `head.bias`, in one backward pass. The reference has no gradient.
    Requires:
        hidden states of the positions that *predict* the targets: position t - 1 for token t.

    Args:
        hidden: (..., H) last hidden states of the policy, after its final norm.
        head: the policy's output head.
        targets: (...) sampled tokens; values where `mask` is 0 are ignored.
        ref_hidden: (..., H') last hidden states of the reference, whose hidden size may differ.
            Several references are a list: the policy's logits are computed once for all of them.
        ref_head: the reference's head, over the same vocabulary; a list beside a list.
        ref_weights: of several references, each a number or a tensor that broadcasts to (...): `ref_logp`, both KLs and
            `divergence` are sums with these weights. By default they are equal, of sum 1. With weights of sum 1 the sum
            of reverse KLs is the KL to the references' geometric mean, up to a constant.
        mask: (...) 1 where a token is live; masked tokens are not computed.
        entries: (..., k) further vocabulary entries whose log-probs to compute, such as a teacher's top k.
        divergence: an f-divergence to compute beside the rest, as `klgrad.divergences.named` takes it:
            `jensen-shannon(0.1)`, `hellinger`, `chi-square` (half of it, as `alpha(2)`), `total-variation`, a sum, or a
            `Divergence`. It costs a second pass over the vocabulary, so use `reverse_kl` and `forward_kl` for these
            two. A `Divergence` with functions of your own has no Triton kernel: everything is then computed by torch,
            which is several times slower on a GPU.
        mode: `lean` has a budget of 2 GiB, and recomputes the logits that do not fit in the backward pass; `fast` has
            no limit, and recomputes nothing.
        budget: bytes for tiles of logits and for logits kept until the backward pass (16 bits each for half-precision
            inputs); overrides the budget of the mode.
        validate: check that targets are in the vocabulary and results are finite. This costs one device
            synchronisation.

    Returns:
        The statistics of each token, in the shape of `targets`.

    Example:
        >>> import torch
        >>> from klgrad.kernels import Head, token_statistics
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)  # two tokens, H = 2
        >>> head, ref_head = Head(torch.eye(3, 2)), Head(torch.zeros(3, 2))  # V = 3, and a uniform reference
        >>> statistics = token_statistics(hidden, head, torch.tensor([0, 2]), hidden.detach(), ref_head)
        >>> statistics.logp.detach()
        tensor([-0.5514, -1.5514])
        >>> statistics.reverse_kl.detach()
        tensor([0.1233, 0.1233])
        >>> statistics.reverse_kl.sum().backward()
        >>> hidden.grad
        tensor([[ 0.2442, -0.1221],
                [-0.1221,  0.2442]])
    """
    pairs = _references(ref_hidden, ref_head)
    for x, h in pairs:
        check_shapes(hidden, targets, x, mask, entries)
        check_heads(head, hidden, h, x)
    if divergence is not None:
        if pairs == [(None, None)]:
            raise KernelInputError("a reference with `divergence`", "none", "pass ref_hidden and ref_head")
        divergence = named(divergence)
    live = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask != 0
    index = None if mask is None else live.flatten().nonzero()[:, 0]
    flat = lambda x: live_rows(x, index, live.ndim)
    policy = head_tensors(flat(hidden), head)
    references: list[tuple[Tensor | None, Tensor | None, Tensor | None]] = []
    for x, h in pairs:
        tensors = (None, None, None) if x is None or h is None else head_tensors(flat(x), h)
        references.append(tuple(None if y is None else y.detach() for y in tensors))  # type: ignore[arg-type]
    weights = _weights(
        ref_weights, len(pairs), targets, lambda x: flat(x).to(torch.promote_types(policy[0].dtype, torch.float32))
    )
    tokens = flat(targets).long().contiguous()
    others = tokens.new_empty(len(tokens), 0) if entries is None else flat(entries).long().contiguous()
    transforms = [Transform() if h is None else h.transform for _, h in pairs]
    # Logits of the kernels for Hopper round differently, and they compute no divergence, and one reference.
    alone = divergence is None and len(pairs) == 1
    hopper = alone and used_for(policy, references[0], (head.transform, transforms[0]), others.shape[1])
    plan = make_plan(
        max(len(tokens), 1),
        len(policy[1]),
        policy[0].dtype,
        paired=ref_hidden is not None,
        mode=mode,
        budget=budget,
        hopper=hopper,
    )
    config = PassConfig(
        tokens,
        others,
        _plan_for(divergence, hidden.device, plan, len(pairs)),
        head.transform,
        transforms[0],
        backend_for(policy[0]) if divergence is None or divergence.parts else tiles_torch,
        hopper,
        divergence,
    )
    configs = [replace(config, ref_transform=transform) for transform in transforms]
    flattened = [x for reference in references for x in reference]
    with torch.autocast(hidden.device.type, enabled=False):
        outputs = StatisticsFunction.apply(*policy, configs, weights, *flattened)
    logp, ref_logp, reverse, forward, entropy, entries_logp, *wanted_divergence = outputs
    if validate:
        check_outcome(torch.cat([tokens[:, None], others], 1), head.vocabulary, outputs, policy, references)
    back = lambda x: all_rows(x, index, live.shape)
    of_pair = [None if ref_hidden is None else back(x) for x in (ref_logp, reverse, forward)]
    return TokenStatistics(
        back(logp),
        back(entropy),
        *of_pair,
        entries_logp=None if entries is None else back(entries_logp),
        divergence=back(wanted_divergence[0]) if wanted_divergence else None,
    )


def _references(
    hidden: Tensor | Sequence[Tensor] | None, head: Head | Sequence[Head] | None
) -> list[tuple[Tensor | None, Head | None]]:
    """Hidden states and head of each reference; None for both without one."""
    one = [hidden] if hidden is None or isinstance(hidden, Tensor) else list(hidden)
    other = [head] if head is None or isinstance(head, Head) else list(head)
    if len(one) != len(other) or not one:
        raise KernelInputError(
            "as many `ref_head` as `ref_hidden`, and one at least", f"{len(other)} and {len(one)}", "pass two lists"
        )
    return list(zip(one, other, strict=True))


def _weights(
    ref_weights: Sequence[float | Tensor] | None, count: int, targets: Tensor, flat: Callable[[Tensor], Tensor]
) -> list[float | Tensor]:
    """The weight of each reference: a number, or (N,) of the live tokens."""
    weights = [1 / count] * count if ref_weights is None else list(ref_weights)
    if len(weights) != count:
        raise KernelInputError(
            f"{count} `ref_weights`, one for each reference", f"{len(weights)}", "leave them out for equal ones"
        )
    return [flat(w.detach().expand(targets.shape)) if isinstance(w, Tensor) else w for w in weights]


def _plan_for(divergence: Divergence | None, device: torch.device, plan: TilePlan, references: int = 1) -> TilePlan:
    """The plan with short strips on a CPU, and without kept logits if they could not be used.

    Rounded to 16 bits, they would be on the wrong side of a slope's jump at l = 0. They are of one pair of models, and
    with several the memory of half a strip is that of a further gradient.
    """
    if device.type == "cpu":
        plan = replace(plan, strip=min(plan.strip, CPU_STRIP))
    jumps = divergence is not None and divergence.scale == torch.inf
    plan = replace(plan, kept=0, kept_bytes=0) if jumps or references > 1 else plan
    return replace(plan, strip=-(-plan.strip // 2)) if references > 1 else plan


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


def live_rows(x: Tensor, index: Tensor | None, dims: int) -> Tensor:
    """Select the live rows, (N, *rest), of a tensor with `dims` leading dimensions, (..., *rest)."""
    rows = x.reshape(-1, *x.shape[dims:])
    return rows if index is None else rows.index_select(0, index)


def all_rows(x: Tensor, index: Tensor | None, shape: torch.Size) -> Tensor:
    """The inverse of `live_rows`, with 0 in the rows that are not live."""
    if index is not None:
        x = x.new_zeros(shape.numel(), *x.shape[1:]).index_copy(0, index, x)
    return x.reshape(*shape, *x.shape[1:])


# `from_logits`: the same statistics from given logits, which are read once forward and once backward.


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
        >>> statistics = from_logits(logits, torch.tensor([0]), torch.zeros(1, 3))
        >>> statistics.reverse_kl.detach(), statistics.forward_kl.detach()
        (tensor([0.4330]), tensor([0.4743]))
        >>> statistics.reverse_kl.sum().backward()
        >>> logits.grad
        tensor([[ 0.3353, -0.1676, -0.1676]])
    """
    check_transform(temperature)
    check_shapes(logits, targets, ref_logits, mask, None)
    check_one_vocabulary(logits.shape[-1], logits.shape[-1] if ref_logits is None else ref_logits.shape[-1])
    index = None if mask is None else (mask != 0).flatten().nonzero()[:, 0]
    tokens = live_rows(targets, index, targets.ndim).long().contiguous()
    flat = lambda x: live_rows(x, None, targets.ndim)  # all rows: the live ones alone would be a copy
    z, z_ref = flat(logits), None if ref_logits is None else flat(ref_logits.detach())
    if validate:
        check_targets(tokens[:, None], logits.shape[-1])
    with torch.autocast(z.device.type, enabled=False):
        transform = Transform(1, None, temperature)
        logp, entropy, ref_logp, reverse, forward = _FromLogits.apply(z, z_ref, tokens, index, transform)
    if validate:
        check_log_probs(logp, ref_logp, reverse, z, z_ref, index)
    back = lambda x: all_rows(x, index, targets.shape)
    of_pair = [None if z_ref is None else back(x) for x in (ref_logp, reverse, forward)]
    return TokenStatistics(back(logp), back(entropy), *of_pair, entries_logp=None)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, z: Tensor, z_ref: Tensor | None, targets: Tensor, places: Tensor | None, transform: Transform
    ) -> tuple[Tensor, ...]:
        tile, backend = _tile(z, z_ref, targets, places, transform), backend_for(z)
        dtype = torch.promote_types(z.dtype, torch.float32)
        new = lambda *shape: torch.zeros(shape, dtype=dtype, device=z.device)
        fields = state.POLICY_FIELDS if z_ref is None else state.FIELDS
        states = new(fields, backend.slices(z.shape[1]), len(targets))
        picked = new(2, len(targets))
        backend.statistics(tile, states, 0, picked, None)
        statistics = state.finish(state.merge(states))
        ctx.save_for_backward(z, z_ref, targets, places)
        ctx.transform, ctx.statistics, ctx.states = transform, statistics, states
        ctx.set_materialize_grads(False)
        ref_logp = state.log_prob(picked[1], statistics.logsumexp - statistics.lse_difference)
        ctx.mark_non_differentiable(ref_logp)
        copies = (x.clone() for x in (statistics.reverse_kl, statistics.forward_kl))
        return state.log_prob(picked[0], statistics.logsumexp), statistics.entropy.clone(), ref_logp, *copies

    @staticmethod
    def backward(ctx, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_order()
        z, z_ref, targets, places = ctx.saved_tensors
        logp, entropy, _, reverse, forward = upstream
        none = torch.zeros_like(ctx.statistics.logsumexp)
        weights = (none if x is None else x.to(none.dtype) for x in (logp, reverse, forward, entropy))
        rows = state.gradient_numbers(ctx.statistics, state.Upstream(*weights))
        new = torch.empty_like if places is None else torch.zeros_like  # masked rows are not written
        out = new(z, memory_format=torch.contiguous_format)
        tile = _tile(z, z_ref, targets, places, ctx.transform)
        backend_for(z).gradient(tile, rows, ctx.states, 0, None, out)
        return out, None, None, None, None


def _tile(z: Tensor, z_ref: Tensor | None, targets: Tensor, places: Tensor | None, transform: Transform) -> Tile:
    rows = lambda x: x if x is None or x.stride(-1) == 1 else x.contiguous()
    return Tile(
        0, z.shape[1], targets, rows(z), rows(z_ref), None, None, transform, transform, projected=False, places=places
    )


# The specification in plain torch, over full logits. All other implementations are tested and timed against it.


def logits(hidden: Tensor, head: Head) -> Tensor:
    """(..., V) logits, in the dtype of the product."""
    raw = hidden @ head.weight.T
    return head.transform.apply(raw if head.bias is None else raw + head.bias)


def statistics_of_logits(
    z: Tensor,
    targets: Tensor,
    z_ref: Tensor | None = None,
    entries: Tensor | None = None,
    divergence: Divergence | None = None,
) -> TokenStatistics:
    """Compute all outputs by their definitions."""
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    pick = lambda table, index: table.gather(-1, index)
    logp = pick(log_p, targets[..., None])[..., 0]
    entropy = -(p * log_p).sum(-1)
    others = None if entries is None else pick(log_p, entries)
    if z_ref is None:
        return TokenStatistics(logp, entropy, None, None, None, others)
    log_q = torch.log_softmax(z_ref.detach(), -1)
    return TokenStatistics(
        logp,
        entropy,
        pick(log_q, targets[..., None])[..., 0],
        (p * (log_p - log_q)).sum(-1),
        (log_q.exp() * (log_q - log_p)).sum(-1),
        others,
        None if divergence is None else (p * divergence.excess(log_p - log_q)).sum(-1),
    )


def reference_statistics(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    ref_hidden: Tensor | None = None,
    ref_head: Head | None = None,
    entries: Tensor | None = None,
    divergence: Divergence | None = None,
) -> TokenStatistics:
    """Compute the same as `klgrad.kernels.token_statistics`, with all logits in memory."""
    z_ref = None if ref_hidden is None or ref_head is None else logits(ref_hidden, ref_head)
    return statistics_of_logits(logits(hidden, head), targets, z_ref, entries, divergence)
