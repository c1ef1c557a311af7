"""The second pass over the tiles: gradients of the policy's hidden states, weight and bias."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .forward import Scan
from .hopper import passes
from .inputs import Inputs
from .project import add_product, product
from .tile import Tile


@dataclass(eq=False)
class Gradients:
    """The gradients of the policy's inputs; None for those that need none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def gradients(
    inputs: Inputs, seen: Scan, numbers: Tensor, others: Tensor | None, needed: tuple[bool, ...]
) -> Gradients:
    """Compute the gradients of a weighted sum of the outputs.

    Args:
        inputs: of the forward pass.
        seen: results of the forward pass; its kept logits are overwritten.
        numbers: the weights of the outputs, as `weights.per_token` returns them.
        others: (N, k) weights of the log-probs of other entries, or None.
        needed: which of hidden states, weight and bias need a gradient.

    Returns:
        The gradients.
    """
    several = len(inputs.chunks) != 1
    # The matrix product sums over the tokens of a chunk; several chunks also need a sum in float32.
    new_weight = torch.zeros_like if several else torch.empty_like
    total = Gradients(
        torch.empty_like(inputs.hidden) if needed[0] else None,
        new_weight(inputs.weight, dtype=inputs.dtype if several else None) if needed[1] else None,
        torch.zeros_like(inputs.bias, dtype=inputs.dtype) if needed[2] and inputs.bias is not None else None,
    )
    for rows in inputs.chunks:
        _chunk(inputs, rows, seen, numbers, others, total)
    return Gradients(
        None if total.hidden is None else inputs.job.shard.total(total.hidden),
        None if total.weight is None else total.weight.to(inputs.weight.dtype),
        None if total.bias is None or inputs.bias is None else total.bias.to(inputs.bias.dtype),
    )


def _chunk(inputs: Inputs, rows: slice, seen: Scan, numbers: Tensor, others: Tensor | None, total: Gradients) -> None:
    """One chunk of tokens: one product for all kept tiles, and one for each other tile."""
    plan, count = inputs.job.plan, rows.stop - rows.start
    kept = 0 if seen.kept is None else plan.kept
    recomputed = [t for t in inputs.tiles if t.start >= kept]
    parts = len(recomputed) + (seen.kept is not None)
    to_hidden = None if total.hidden is None else total.hidden[rows]
    hidden_sum = to_hidden if to_hidden is None or parts == 1 else inputs.new(*to_hidden.shape)
    fused = inputs.fused
    buffers = inputs.buffers() if any(t.start < fused.start for t in recomputed) else []
    room = inputs.new(count, plan.columns if recomputed else 0, dtype=inputs.weight.dtype)
    first, fresh, raw_numbers = 0, True, passes.scaled(inputs, numbers) if fused else numbers
    for columns in inputs.tiles:
        if columns.start >= max(kept, fused.start):
            passes.gradient(inputs, rows, columns, raw_numbers, room[:, : len(columns)])
        else:
            for strip in plan.strips(rows.start, rows.stop):
                local = slice(strip.start - rows.start, strip.stop - rows.start)
                _to_logits(inputs, strip, columns, seen, first, numbers, others, buffers, room[local])
            first += inputs.job.backend.slices(len(columns))
        if columns.start >= kept:
            _multiply(inputs, rows, columns, room[:, : len(columns)], hidden_sum, fresh, total)
            fresh = False
    if seen.kept is not None:  # the kept part is one matrix, so one product is enough
        whole = seen.kept.larger[rows].view(inputs.weight.dtype)
        _multiply(inputs, rows, range(kept), whole, hidden_sum, fresh, total)
    if to_hidden is not None and hidden_sum is not None and hidden_sum is not to_hidden:
        to_hidden.copy_(hidden_sum)


def _to_logits(
    inputs: Inputs,
    rows: slice,
    columns: range,
    seen: Scan,
    first: int,
    numbers: Tensor,
    others: Tensor | None,
    buffers: list[Tensor],
    room: Tensor,
) -> None:
    """Write the gradient of one tile's raw logits into `room`, or over the kept logits."""
    own = seen.kept.cut(rows, columns) if seen.kept else None
    tile = inputs.tile(rows, columns) if own else inputs.projected(rows, columns, buffers)
    if others is not None:
        tile = replace(tile, extra=_scattered(inputs, tile, inputs.job.others[rows], others[rows]))
    out = own.larger.view(inputs.weight.dtype) if own else room[:, : len(columns)]
    inputs.job.backend.gradient(tile, numbers[:, rows], seen.states[:, :, rows], first, own, out)


def _multiply(
    inputs: Inputs,
    rows: slice,
    columns: range,
    to_logits: Tensor,
    hidden_sum: Tensor | None,
    fresh: bool,
    total: Gradients,
) -> None:
    """Add the gradients of hidden states, weight and bias from the gradient of one part of the logits."""
    part = slice(columns.start, columns.stop)
    if hidden_sum is not None:
        if fresh and hidden_sum.dtype == to_logits.dtype:
            product(to_logits, inputs.weight[part], out=hidden_sum)
        else:
            add_product(hidden_sum.zero_() if fresh else hidden_sum, to_logits, inputs.weight[part])
    if total.weight is not None:
        if len(inputs.chunks) == 1:
            product(to_logits.T, inputs.hidden[rows], out=total.weight[part])
        else:
            add_product(total.weight[part], to_logits.T, inputs.hidden[rows])
    if total.bias is not None:
        total.bias[part] += to_logits.sum(0, dtype=total.bias.dtype)


def _scattered(inputs: Inputs, tile: Tile, wanted: Tensor, weights: Tensor) -> Tensor:
    """The weights on other entries' log-probs, at their columns of the tile."""
    local, here = tile.locate(wanted)
    extra = torch.zeros_like(inputs.new(len(weights), tile.width))
    return extra.scatter_add_(1, local, torch.where(here, weights, 0.0).to(extra.dtype))
