"""The first pass over the tiles: sums, logits of the wanted entries, and the logits that are kept."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import state, tile as tiles
from .hopper import passes
from .inputs import Inputs
from .state import Finished
from .tile import Kept, Tile, kept_dtype


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
    states = passes.states_of(inputs, picked, kept) if job.hopper else _states_of(inputs, picked, others, kept)
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
