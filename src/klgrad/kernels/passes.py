"""The two passes over the tiles: the first sums, the second computes gradients."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import hopper as hopper_passes, state, tile as tiles, tiles_torch
from .state import Finished
from .tile import Kept, Tile, kept_dtype
from .tiling import Inputs, add_product, product

# The first pass over the tiles: sums, logits of the wanted entries, and the logits that are kept.


@dataclass(frozen=True, eq=False)
class Scan:
    """The results of the first pass, for all tokens.

    Attributes:
        finished: log-sum-exps, KLs, entropies.
        picked: (2, N) logits of the targets, by the policy and by the reference.
        others: (N, k) logits of other entries, by the policy.
        states: (FIELDS, slices, N) of this process' part of the vocabulary; on Hopper some are merged.
        kept: logits of the first `plan.kept` entries, or None.
    """

    finished: Finished
    picked: Tensor
    others: Tensor
    states: Tensor
    kept: Kept | None


def scan(inputs: Inputs) -> Scan:
    """Run one pass over every tile."""
    job, tokens = inputs.job, len(inputs.hidden)
    picked = torch.zeros_like(inputs.new(2, tokens))
    others = torch.zeros_like(inputs.new(tokens, job.others.shape[1]))
    kept = _room(inputs)
    states = hopper_passes.states_of(inputs, picked, kept) if job.hopper else _states_of(inputs, picked, others, kept)
    finished = state.finish(job.shard.merge(state.merge(states)))
    return Scan(finished, job.shard.total(picked), job.shard.total(others), states, kept)


def _states_of(inputs: Inputs, picked: Tensor, others: Tensor, kept: Kept | None) -> Tensor:
    """Compute the states of all slices, and write the logits of the wanted entries and those that are kept."""
    job, tokens = inputs.job, len(inputs.hidden)
    fields = state.FIELDS if inputs.paired else state.POLICY_FIELDS
    states = inputs.new(fields, sum(job.backend.slices(len(t)) for t in inputs.tiles), tokens)
    buffers, first = inputs.buffers(), 0
    for columns in inputs.tiles:
        for rows in job.plan.strips(0, tokens):
            tile = inputs.projected(rows, columns, buffers)
            own = kept.cut(rows, columns) if kept else None
            job.backend.statistics(tile, states[:, :, rows], first, picked[:, rows], own)
            if others.shape[1]:
                _pick(tile, job.others[rows], others[rows])
        first += job.backend.slices(len(columns))
    return states


def _room(inputs: Inputs) -> Kept | None:
    columns = inputs.job.plan.kept
    if not columns:
        return None
    tokens, dtype = len(inputs.hidden), kept_dtype(inputs.hidden.dtype)
    if not inputs.job.hopper:
        new = lambda: inputs.new(tokens, columns, dtype=dtype)
        return Kept(new(), new() if inputs.paired else None)
    # The copy engine stores multiples of 16 bytes: what a row has beyond its last entry is overwritten.
    new = lambda: inputs.new(tokens, -(-columns // 8) * 8, dtype=dtype)[:, :columns]
    return Kept(new(), new(), inputs.new(3, tokens, -(-columns // tiles.MARKED)))


def _pick(tile: Tile, wanted: Tensor, logits: Tensor) -> None:
    """Copy the policy's logits of the wanted entries in this tile."""
    assert tile.raw is not None  # all tiles of the forward pass are projected
    local, here = tile.locate(wanted)
    raw = tile.raw.gather(1, local)
    raw = raw if tile.bias is None else raw + tile.bias[local + tile.start]
    logits.copy_(torch.where(here, tile.transform.apply(raw), logits))


# The second pass over the tiles: gradients of the policy's hidden states, weight and bias.
#
# It has two steps, `over_kept` and `gradients`. Between them half of what was kept of two models is freed, and the
# gradients can use that memory.


@dataclass(eq=False)
class Gradients:
    """The gradients of the policy's inputs; None for those that need none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def over_kept(inputs: Inputs, seen: Scan, numbers: Tensor, others: Tensor | None) -> Tensor | None:
    """Overwrite the kept logits with the gradient of the raw logits, which is returned; None if there are none.

    Args:
        inputs: of the forward pass.
        seen: results of the forward pass.
        numbers: the weights of the outputs, as `weights.per_token` returns them.
        others: (N, k) weights of the log-probs of other entries, or None.
    """
    if seen.kept is None:
        return None
    first, plan, tokens = 0, inputs.job.plan, len(inputs.hidden)
    # As few launches as possible, for which the GPU would wait. Slices without marks belong to tiles; torch, and the
    # weights of other entries, need matrices of the size of a tile.
    tiles = [t for t in inputs.tiles if t.start < plan.kept] if seen.kept.marks is None else [range(plan.kept)]
    dense = others is not None or inputs.job.backend is tiles_torch
    strips = plan.strips(0, tokens) if dense else [slice(0, tokens)]
    for columns in tiles:
        for rows in strips:
            own = seen.kept.cut(rows, columns)
            assert own is not None  # a tile is kept completely or not at all
            tile, out = inputs.tile(rows, columns), own.larger.view(inputs.weight.dtype)
            _to_logits(inputs, tile, rows, seen, first, numbers, others, own, out)
        first += inputs.job.backend.slices(len(columns))
    return seen.kept.larger.view(inputs.weight.dtype)


def gradients(
    inputs: Inputs,
    seen: Scan,
    numbers: Tensor,
    others: Tensor | None,
    kept: Tensor | None,
    needed: tuple[bool, ...],
) -> Gradients:
    """Compute the gradients of a weighted sum of the outputs.

    Args:
        inputs: of the forward pass.
        seen: results of the forward pass, without kept logits.
        numbers: the weights of the outputs, as `weights.per_token` returns them.
        others: (N, k) weights of the log-probs of other entries, or None.
        kept: (N, entries) the gradient at the first entries, as `over_kept` returns it; the rest is computed here.
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
        _chunk(inputs, rows, seen, numbers, others, None if kept is None else kept[rows], total)
    return Gradients(
        None if total.hidden is None else inputs.job.shard.total(total.hidden),
        None if total.weight is None else total.weight.to(inputs.weight.dtype),
        None if total.bias is None or inputs.bias is None else total.bias.to(inputs.bias.dtype),
    )


def _chunk(
    inputs: Inputs,
    rows: slice,
    seen: Scan,
    numbers: Tensor,
    others: Tensor | None,
    kept: Tensor | None,
    total: Gradients,
) -> None:
    """One chunk of tokens: one product for all kept tiles, and one for each other tile."""
    done = 0 if kept is None else kept.shape[1]
    recomputed = [t for t in inputs.tiles if t.start >= done]
    parts = len(recomputed) + (kept is not None)
    to_hidden = None if total.hidden is None else total.hidden[rows]
    hidden_sum = to_hidden if to_hidden is None or parts == 1 else inputs.new(*to_hidden.shape)
    if kept is not None:  # the kept part is one matrix, so one product is enough
        _multiply(inputs, rows, range(done), kept, hidden_sum, True, total)
    for columns, out in _recomputed(inputs, rows, recomputed, seen, numbers, others):
        _multiply(inputs, rows, columns, out, hidden_sum, columns.start == 0, total)
    if to_hidden is not None and hidden_sum is not None and hidden_sum is not to_hidden:
        to_hidden.copy_(hidden_sum)


def _recomputed(
    inputs: Inputs, rows: slice, tiles: list[range], seen: Scan, numbers: Tensor, others: Tensor | None
) -> Iterator[tuple[range, Tensor]]:
    """Compute the logits of some tiles again, and yield each tile with its gradient; the next one overwrites it."""
    if not tiles:
        return
    plan, hopper = inputs.job.plan, inputs.job.hopper
    room = inputs.new(rows.stop - rows.start, plan.columns, dtype=inputs.weight.dtype)
    buffers = [] if hopper else inputs.buffers()
    raw_numbers = hopper_passes.scaled(inputs, numbers) if hopper else numbers
    for columns in tiles:
        out = room[:, : len(columns)]
        if hopper:
            hopper_passes.gradient(inputs, rows, columns, raw_numbers, out)
        else:
            for strip in plan.strips(rows.start, rows.stop):
                local = out[strip.start - rows.start : strip.stop - rows.start]
                tile = inputs.projected(strip, columns, buffers)
                _to_logits(inputs, tile, strip, seen, 0, numbers, others, None, local)
        yield columns, out


def _to_logits(
    inputs: Inputs,
    tile: Tile,
    rows: slice,
    seen: Scan,
    first: int,
    numbers: Tensor,
    others: Tensor | None,
    kept: Kept | None,
    out: Tensor,
) -> None:
    """Write the gradient of one tile's raw logits; `first` is the number of its first slice, for kept logits."""
    if others is not None:
        tile = replace(tile, extra=_scattered(inputs, tile, inputs.job.others[rows], others[rows]))
    inputs.job.backend.gradient(tile, numbers[:, rows], seen.states[:, :, rows], first, kept, out)


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
