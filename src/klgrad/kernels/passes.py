"""The two passes over the tiles: the first sums, the second computes gradients."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import hopper as hopper_passes, state, tiles_torch, tiling as tiles
from .state import Statistics
from .tiling import CachedLogits, Operands, Tile, addmm, kept_dtype, matmul

# The first pass over the tiles: sums, logits of the wanted entries, and the logits that are kept.


@dataclass(frozen=True, eq=False)
class ForwardState:
    """The results of the first pass, for all tokens.

    Attributes:
        picked: (2, N) logits of the targets, by the policy and by the reference.
        others: (N, k) logits of other entries, by the policy.
        states: (FIELDS, slices, N) of the slices of the vocabulary; on Hopper some are merged.
        kept: logits of the first `plan.kept` entries, or None.
        divergence: (2, N) the divergence and the mean of its slope, or None.
    """

    statistics: Statistics
    picked: Tensor
    others: Tensor
    states: Tensor
    kept: CachedLogits | None
    divergence: Tensor | None = None


def scan(pairs: list[Operands]) -> list[ForwardState]:
    """Run one pass over every tile, and a second one for a divergence, which needs both log-sum-exps.

    The pairs have one policy, whose logits are computed once, and each its own reference.
    """
    operands = pairs[0]
    config, tokens = operands.config, len(operands.hidden)
    picked = [torch.zeros_like(operands.new(2, tokens)) for _ in pairs]
    others = torch.zeros_like(operands.new(tokens, config.others.shape[1]))
    kept = _room(operands)
    states = (
        [hopper_passes.states_of(operands, picked[0], kept)]
        if config.hopper
        else _states_of(pairs, picked, others, kept)
    )
    statistics = [state.finish(state.merge(parts)) for parts in states]
    divergences = [None] * len(pairs) if config.divergence is None else _divergences_of(pairs, statistics)
    return [
        ForwardState(whole, logits, others, sums, kept, divergence)
        for whole, logits, sums, divergence in zip(statistics, picked, states, divergences, strict=True)
    ]


def _states_of(pairs: list[Operands], picked: list[Tensor], others: Tensor, kept: CachedLogits | None) -> list[Tensor]:
    """Compute the states of all slices, and write the logits of the wanted entries and those that are kept."""
    operands, config = pairs[0], pairs[0].config
    fields = state.FIELDS if operands.paired else state.POLICY_FIELDS
    states = [operands.new(fields, _slices(operands), len(operands.hidden)) for _ in pairs]
    for i, tile, rows, columns, first in _tiles(pairs):
        part = kept.cut(rows, columns) if kept else None
        config.backend.statistics(tile, states[i][:, :, rows], first, picked[i][:, rows], part)
        if i == 0 and others.shape[1]:
            _pick(tile, config.others[rows], others[rows])
    return states


def _divergences_of(pairs: list[Operands], statistics: list[Statistics]) -> list[Tensor]:
    """Compute (2, N) the divergence and the mean of its slope, for each pair; the logits are computed again."""
    operands = pairs[0]
    sums = [operands.new(2, _slices(operands), len(operands.hidden)) for _ in pairs]
    numbers = [torch.stack([whole.logsumexp, whole.lse_difference]) for whole in statistics]
    for i, tile, rows, _, first in _tiles(pairs):
        operands.config.backend.divergence(tile, numbers[i][:, rows], sums[i][:, :, rows], first)
    return [parts.sum(1) for parts in sums]


def _slices(operands: Operands) -> int:
    return sum(operands.config.backend.slices(len(columns)) for columns in operands.tiles)


def _tiles(pairs: list[Operands]) -> Iterator[tuple[int, Tile, slice, range, int]]:
    """Every tile of every pair: its number, tokens, entries and the first slice's number; the next overwrites it."""
    operands, first = pairs[0], 0
    config, buffers = operands.config, operands.buffers()
    for columns in operands.tiles:
        for rows in config.plan.strips(0, len(operands.hidden)):
            for i, pair in enumerate(pairs):
                yield i, pair.projected(rows, columns, buffers, policy=i == 0), rows, columns, first
        first += config.backend.slices(len(columns))


def _room(operands: Operands) -> CachedLogits | None:
    columns = operands.config.plan.kept
    if not columns:
        return None
    tokens, dtype = len(operands.hidden), kept_dtype(operands.hidden.dtype)
    if not operands.config.hopper:
        new = lambda: operands.new(tokens, columns, dtype=dtype)
        return CachedLogits(new(), new() if operands.paired else None)
    # The copy engine stores multiples of 16 bytes: what a row has beyond its last entry is overwritten.
    new = lambda: operands.new(tokens, -(-columns // 8) * 8, dtype=dtype)[:, :columns]
    return CachedLogits(new(), new(), operands.new(3, tokens, -(-columns // tiles.MARKED)))


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


def over_kept(operands: Operands, forward_state: ForwardState, numbers: Tensor, others: Tensor | None) -> Tensor | None:
    """Overwrite the kept logits with the gradient of the raw logits, which is returned; None if there are none.

    `numbers` are the weights of the outputs, as `state.gradient_numbers` returns them; `others` are (N, k) weights of
    the log-probs of other entries.
    """
    if forward_state.kept is None:
        return None
    first, plan, tokens = 0, operands.config.plan, len(operands.hidden)
    # As few launches as possible, for which the GPU would wait. Slices without `slice_stats` belong to tiles; torch,
    # and the weights of other entries, need matrices of the size of a tile.
    tiles = (
        [t for t in operands.tiles if t.start < plan.kept]
        if forward_state.kept.slice_stats is None
        else [range(plan.kept)]
    )
    dense = others is not None or operands.config.backend is tiles_torch
    strips = plan.strips(0, tokens) if dense else [slice(0, tokens)]
    for columns in tiles:
        for rows in strips:
            part = forward_state.kept.cut(rows, columns)
            assert part is not None  # a tile is kept completely or not at all
            tile, out = operands.tile(rows, columns), part.a_or_minus_b.view(operands.weight.dtype)
            _to_logits(operands, tile, rows, forward_state, first, numbers, others, part, out)
        first += operands.config.backend.slices(len(columns))
    return forward_state.kept.a_or_minus_b.view(operands.weight.dtype)


def gradients(
    pairs: list[Operands],
    forward_states: list[ForwardState],
    numbers: list[Tensor],
    others: Tensor | None,
    kept: Tensor | None,
    needed: tuple[bool, ...],
) -> Gradients:
    """Compute the gradients of a weighted sum of the outputs, those `needed` of hidden states, weight and bias.

    `kept` is (N, entries) the gradient at the first entries, as `over_kept` returns it; the rest is computed here. The
    forward states have no kept logits any more. `numbers` (of each pair) and `others` are weights, as for `over_kept`.
    """
    operands = pairs[0]
    several = len(operands.chunks) != 1
    # The matrix product sums over the tokens of a chunk; several chunks also need a sum in float32.
    new_weight = torch.zeros_like if several else torch.empty_like
    total = Gradients(
        torch.empty_like(operands.hidden) if needed[0] else None,
        new_weight(operands.weight, dtype=operands.dtype if several else None) if needed[1] else None,
        torch.zeros_like(operands.bias, dtype=operands.dtype) if needed[2] and operands.bias is not None else None,
    )
    for rows in operands.chunks:
        part = None if kept is None else kept[rows]
        done = 0 if part is None else part.shape[1]
        recomputed = _recomputed(pairs, rows, done, forward_states, numbers, others)
        _chunk(operands, rows, part, recomputed, total)
    return Gradients(
        total.hidden,
        None if total.weight is None else total.weight.to(operands.weight.dtype),
        None if total.bias is None or operands.bias is None else total.bias.to(operands.bias.dtype),
    )


def _chunk(
    operands: Operands, rows: slice, kept: Tensor | None, recomputed: Iterator[tuple[range, Tensor]], total: Gradients
) -> None:
    """One chunk of tokens: one product for all kept tiles, and one for each other tile."""
    done = 0 if kept is None else kept.shape[1]
    parts = sum(tile.start >= done for tile in operands.tiles) + (kept is not None)
    to_hidden = None if total.hidden is None else total.hidden[rows]
    hidden_sum = to_hidden if to_hidden is None or parts == 1 else operands.new(*to_hidden.shape)
    if kept is not None:  # the kept part is one matrix, so one product is enough
        _multiply(operands, rows, range(done), kept, hidden_sum, True, total)
    for columns, out in recomputed:
        _multiply(operands, rows, columns, out, hidden_sum, columns.start == 0, total)
    if to_hidden is not None and hidden_sum is not None and hidden_sum is not to_hidden:
        to_hidden.copy_(hidden_sum)


def _recomputed(
    pairs: list[Operands],
    rows: slice,
    done: int,
    forward_states: list[ForwardState],
    numbers: list[Tensor],
    others: Tensor | None,
) -> Iterator[tuple[range, Tensor]]:
    """Compute the logits from entry `done` on again, and yield each tile's gradient; the next one overwrites it."""
    operands = pairs[0]
    tiles = [tile for tile in operands.tiles if tile.start >= done]
    if not tiles:
        return
    plan, hopper = operands.config.plan, operands.config.hopper
    new = lambda tokens: operands.new(tokens, plan.columns, dtype=operands.weight.dtype)
    room = new(rows.stop - rows.start)
    further = [new(min(plan.strip, len(room)))] * (len(pairs) - 1)
    buffers = [] if hopper else operands.buffers()
    raw_numbers = hopper_passes.scaled(operands, numbers[0]) if hopper else numbers[0]
    for columns in tiles:
        out = room[:, : len(columns)]
        if hopper:
            hopper_passes.gradient(operands, rows, columns, raw_numbers, out)
            yield columns, out
            continue
        for strip in plan.strips(rows.start, rows.stop):
            local = out[strip.start - rows.start : strip.stop - rows.start]
            rooms = [local, *further]
            for i, (pair, forward_state, weights, to) in enumerate(
                zip(pairs, forward_states, numbers, rooms, strict=True)
            ):
                tile = pair.projected(strip, columns, buffers, policy=i == 0)
                to = to[: len(local), : len(columns)]
                _to_logits(pair, tile, strip, forward_state, 0, weights, None if i else others, None, to)
                if i:
                    local += to
        yield columns, out


def _to_logits(
    operands: Operands,
    tile: Tile,
    rows: slice,
    forward_state: ForwardState,
    first: int,
    numbers: Tensor,
    others: Tensor | None,
    kept: CachedLogits | None,
    out: Tensor,
) -> None:
    """Write the gradient of one tile's raw logits; `first` is the number of its first slice, for kept logits."""
    if others is not None:
        tile = replace(tile, extra=_scattered(operands, tile, operands.config.others[rows], others[rows]))
    operands.config.backend.gradient(tile, numbers[:, rows], forward_state.states[:, :, rows], first, kept, out)


def _multiply(
    operands: Operands,
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
            matmul(to_logits, operands.weight[part], out=hidden_sum)
        else:
            addmm(hidden_sum.zero_() if fresh else hidden_sum, to_logits, operands.weight[part])
    if total.weight is not None:
        if len(operands.chunks) == 1:
            matmul(to_logits.T, operands.hidden[rows], out=total.weight[part])
        else:
            addmm(total.weight[part], to_logits.T, operands.hidden[rows])
    if total.bias is not None:
        total.bias[part] += to_logits.sum(0, dtype=total.bias.dtype)


def _scattered(operands: Operands, tile: Tile, wanted: Tensor, weights: Tensor) -> Tensor:
    """The weights on other entries' log-probs, at their columns of the tile."""
    local, here = tile.locate(wanted)
    extra = torch.zeros_like(operands.new(len(weights), tile.width))
    return extra.scatter_add_(1, local, torch.where(here, weights, 0.0).to(extra.dtype))
