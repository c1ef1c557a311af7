"""Tiles in torch: the same as the Triton kernels, for any device and for float64."""

import torch
from torch import Tensor

from . import generators, state, tiling as tiles
from .head import Transform
from .tiling import CachedLogits, Tile


def statistics(tile: Tile, states: Tensor, first: int, picked: Tensor, kept: CachedLogits | None) -> None:
    """Write the tile's state at `states[:, first]`, its targets' logits into `picked`, and its logits into `kept`."""
    z, z_ref = _logits(tile)
    local, here = tile.locate(tile.targets)
    for i, logits in enumerate((z, z_ref)):
        if logits is not None:
            picked[i] = torch.where(here, logits.gather(1, local[:, None])[:, 0], picked[i])
    a, b, states[:, first] = state.of_logits(z, z_ref)
    if kept is not None:
        kept.store(a, b, None if b is None else state.mean_difference(states[:, first])[:, None])


def divergence(tile: Tile, rows: Tensor, sums: Tensor, first: int) -> None:
    """Write the tile's part of the divergence and of its mean slope at `sums[:, first]`, (2, slices, N).

    `rows` are (2, N) log-sum-exp of the policy, and minus it that of the reference.
    """
    logsumexp, lse_difference = rows[..., None]
    z, z_ref = _logits(tile)
    assert z_ref is not None  # a divergence needs a reference
    assert tile.divergence is not None
    log_p, log_ratio = z - logsumexp, z - z_ref - lse_difference
    log_q = z_ref - (logsumexp - lse_difference)
    sums[0, first] = generators.terms(tile.divergence, log_p, log_q, log_ratio).sum(-1)
    sums[1, first] = (log_p.exp() * tile.divergence.slope(log_ratio)).sum(-1)


def gradient(tile: Tile, rows: Tensor, states: Tensor, first: int, kept: CachedLogits | None, out: Tensor) -> None:
    """Write d loss / d raw logit of the tile into `out`, from its logits or from the kept ones."""
    logsumexp, lse_difference = rows[0, :, None], rows[1, :, None]
    pair = None
    if kept is None:
        z, z_ref = _logits(tile)
        if z_ref is not None:
            pair = z - z_ref - lse_difference, z_ref - (logsumexp - lse_difference)
    else:
        top, ref_top, mean = _slice_stats(tile, states, first, kept)
        a, d = kept.load(rows.dtype, mean)
        z = a + top
        if d is not None:
            delta = d + (top - ref_top) - lse_difference
            pair = delta, z - logsumexp - delta
    columns = torch.arange(tile.start, tile.start + tile.width, device=z.device)
    hit = columns == tile.targets[:, None]
    gradient = state.logit_gradient(rows, z - logsumexp, pair, hit, tile.extra, tile.divergence)
    gradient = (gradient * tile.transform.slope(z)).to(out.dtype)
    if tile.places is None:
        out.copy_(gradient)
    else:
        out.index_copy_(0, tile.places, gradient)


def _slice_stats(tile: Tile, states: Tensor, first: int, kept: CachedLogits) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both maxima and the mean of d that the kept logits of a tile are relative to; the last is None for one model."""
    if kept.slice_stats is not None:
        top, ref_top, mean = kept.slice_stats.repeat_interleave(tiles.MARKED, 2)[:, :, : tile.width]
        return top, ref_top, mean
    sums = states[:, first, :, None]
    if kept.delta is None:
        return sums[0], sums[-1], None
    return sums[0], sums[3], state.mean_difference(sums)


def slices(width: int) -> int:
    """The number of states of a tile of this width."""
    return 1


def _logits(tile: Tile) -> tuple[Tensor, Tensor | None]:
    assert tile.raw is not None  # only kept tiles have no logits, and these are read from `kept`
    z = _transformed(tile.raw, tile.bias, tile, tile.transform)
    return z, None if tile.ref_raw is None else _transformed(tile.ref_raw, tile.ref_bias, tile, tile.ref_transform)


def _transformed(raw: Tensor, bias: Tensor | None, tile: Tile, transform: Transform) -> Tensor:
    raw = raw if tile.places is None else raw.index_select(0, tile.places)
    raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
    raw = raw if bias is None else raw + bias[tile.start : tile.start + tile.width]
    return transform.apply(raw).clamp(min=state.LOWEST)
