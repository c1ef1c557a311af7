"""Tiles in torch, for any device and for float64, and the f-divergences of their entries; as the Triton kernels do.

`tiles_triton.py` has the same formulas and functions of the same names.
"""

import math

import torch
from torch import Tensor

from ..core.divergences import Divergence
from . import state, tiling
from .head import Transform
from .state import NEAR
from .tiling import CachedLogits, Tile

# f-divergences over a whole vocabulary: the term of one entry, without overflow and without cancellation.
#
# With p, q the two probabilities of an entry, l = log p/q, c the slope and φ(x) = e^x - 1 - x, a divergence and its
# gradient by the logit of entry v are
#
#     D_f = Σ p f(u)/u    dD_f/dz_v = p_v (c(l_v) - Σ_w p_w c(l_w))
#
# The excess f(u)/u of `core.divergences` is that of a sample of π: it saturates where π is e^30 times less likely than
# ref, which no sample of π shows. In the sum over all entries these may have all of the mass of ref, so the term of an
# entry is computed from both probabilities: far from the reference by the first formula, near it by the second, where
# φ is its series.
#
#     reverse KL                  q - p + p l                                p φ(-l)
#     forward KL                  p - q - q l                                q φ(l)
#     α-divergence, s = 1 - α     (s q + α p - p^α q^s) / (s α)              p (s φ(-l) - φ(-s l)) / (s α)
#     Jensen-Shannon, r = 1 - β   r p log p/m - β q log m/q                  r p φ(log m/p) + β q φ(log m/q)
#     total variation             |p - q|                                    p |φ(-l) - l|
#     Huber, n = clip(l, -c, c)   p n + q e^n (φ(-n) - n), with φ as it is near and far

LARGEST_EXPONENT = 70.0
"""Of a term: the sum of e^70 over any vocabulary is a float32."""


def terms(divergence: Divergence, log_p: Tensor, log_q: Tensor, log_ratio: Tensor) -> Tensor:
    """Compute p f(u)/u of each entry."""
    if not divergence.parts:
        return log_p.exp() * divergence.excess(log_ratio)
    total = torch.zeros_like(log_p)
    for weight, kind, parameter in divergence.parts:
        total = total + weight * TERMS[kind](log_p, log_q, log_ratio, parameter)
    return total


def _alpha_term(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, order: float) -> Tensor:
    p, q, rest = log_p.exp(), log_q.exp(), 1 - order
    if rest == 0:
        return torch.where(_near(log_ratio), p * _phi_series(-log_ratio), q - p + p * log_ratio)
    if order == 0:
        return torch.where(_near(log_ratio), q * _phi_series(log_ratio), p - q - q * log_ratio)
    product = (order * log_p + rest * log_q).clamp(max=LARGEST_EXPONENT).exp()
    near = p * (rest * _phi_series(-log_ratio) - _phi_series(-rest * log_ratio))
    is_near = _near(log_ratio * max(1.0, abs(rest)))
    return torch.where(is_near, near, rest * q + order * p - product) / (rest * order)


def _jensen_shannon_term(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    p, q, rest = log_p.exp(), log_q.exp(), 1 - beta
    positive = log_ratio > 0
    shrunk = torch.expm1(-log_ratio.abs())
    small = torch.log1p(torch.where(positive, beta * shrunk, rest * shrunk))
    mixture_by_q = torch.where(positive, log_ratio + small, small)  # log m/q
    p_by_mixture = torch.where(positive, -small, log_ratio - small)
    near = rest * p * _phi_series(-p_by_mixture) + beta * q * _phi_series(mixture_by_q)
    return torch.where(_near(log_ratio), near, rest * p * p_by_mixture - beta * q * mixture_by_q)


def _total_variation_term(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, _: float) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    return torch.where(_near(log_ratio), p * (_phi_series(-log_ratio) - log_ratio).abs(), (p - q).abs())


def _huber_term(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, bound: float) -> Tensor:
    clipped = log_ratio.clamp(-bound, bound)
    share = torch.where(log_ratio.abs() <= bound, log_p, log_q + clipped).exp()  # p e^(n - l)
    phi = torch.where(_near(clipped), _phi_series(-clipped), torch.expm1(-clipped) + clipped)
    return share * phi + clipped * (log_p.exp() - share)


TERMS = {
    "alpha": _alpha_term,
    "jensen-shannon": _jensen_shannon_term,
    "total-variation": _total_variation_term,
    "huber": _huber_term,
}


def _near(x: Tensor) -> Tensor:
    return x.abs() < NEAR[x.dtype]


def _phi_series(x: Tensor) -> Tensor:
    """e^x - 1 - x for |x| below `NEAR`; 0 stands for others, whose powers might overflow."""
    small = torch.where(_near(x), x, 0.0)
    series = torch.full_like(x, 1 / math.factorial(9))
    for power in range(8, 1, -1):
        series = series * small + 1 / math.factorial(power)
    return small * small * series


# The functions of a backend.


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
    sums[0, first] = terms(tile.divergence, log_p, log_q, log_ratio).sum(-1)
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
        top, ref_top, mean = kept.slice_stats.repeat_interleave(tiling.MARKED, 2)[:, :, : tile.width]
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
