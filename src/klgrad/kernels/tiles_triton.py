"""Tiles in Triton: one program for each token and slice of the vocabulary, with all sums of a slice in registers.

The formulas are those of `state.py` and `tiles_torch.py`; tests compare the two.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.divergences import Divergence, Kind
from ..core.estimators import MAX_EXPONENT
from . import state
from .tiles_torch import LARGEST_EXPONENT
from .tiling import LARGEST_KEPT, MARKED, CachedLogits, Tile

# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# (Triton compiles the kernels; they are not run as Python)


SLICE = 2048
WARPS = 4

# What the kernels read of the other modules. Triton takes a global number for a constant if it is a `constexpr`.
LOWEST, BANNED, NEAR = (tl.constexpr(x) for x in (state.LOWEST, state.BANNED, state.NEAR[torch.float32]))
LIMIT, CAP, LARGEST = (tl.constexpr(x) for x in (LARGEST_KEPT, MAX_EXPONENT, LARGEST_EXPONENT))


def slices(width: int) -> int:
    """The number of states of a tile of this width."""
    return triton.cdiv(width, SLICE)


def statistics(tile: Tile, states: Tensor, first: int, picked: Tensor, kept: CachedLogits | None) -> None:
    """Write the tile's states from `states[:, first]` on, its targets' logits into `picked`, its logits into `kept`."""
    raw, ref_raw = _present(tile.raw, states), _present(tile.ref_raw, states)
    _launch(
        _statistics_kernel,
        tile,
        raw,
        ref_raw,
        _present(tile.bias, states),
        _present(tile.ref_bias, states),
        tile.targets,
        _present(tile.places, tile.targets),
        states,
        picked,
        states if kept is None else kept.a_or_minus_b,
        states if kept is None or kept.delta is None else kept.delta,
        *(raw.stride(0), ref_raw.stride(0), *states.stride()[:2], 0 if kept is None else kept.a_or_minus_b.stride(0)),
        *(picked.stride(0), *_numbers(tile, first)),
        **_constants(tile),
        PAIRED=tile.ref_raw is not None,
        KEEP=kept is not None,
        TINY=0.0 if kept is None else kept.tiny,
        PLACES=tile.places is not None,
    )


def divergence(tile: Tile, rows: Tensor, sums: Tensor, first: int) -> None:
    """Write the tile's part of the divergence and of its mean slope from `sums[:, first]` on; as in `tiles_torch`."""
    raw, ref_raw = tile.raw, tile.ref_raw
    assert raw is not None
    assert ref_raw is not None  # a divergence needs a reference
    assert tile.divergence is not None
    _launch(
        _divergence_kernel,
        tile,
        raw,
        ref_raw,
        _present(tile.bias, rows),
        _present(tile.ref_bias, rows),
        rows,
        sums,
        *(raw.stride(0), ref_raw.stride(0), rows.stride(0), *sums.stride()[:2]),
        *_numbers(tile, first),
        **_constants(tile),
        PARTS=_parts(tile.divergence),
    )


def gradient(tile: Tile, rows: Tensor, states: Tensor, first: int, kept: CachedLogits | None, out: Tensor) -> None:
    """Write d loss / d raw logit of the tile into `out`; `out` may be the memory of `kept.a_or_minus_b`.

    If kept logits have `slice_stats`, rows of them and of `out` must have room up to a multiple of 8 entries.
    """
    paired = tile.ref_raw is not None if kept is None else kept.delta is not None
    source = _present(tile.raw, rows) if kept is None else kept.a_or_minus_b
    ref_source = _present(tile.ref_raw if kept is None else kept.delta, rows)
    extra = _present(tile.extra, rows)
    weighted = tile.divergence if len(rows) > state.GRADIENT_FIELDS else None
    slice_stats = None if kept is None else kept.slice_stats
    if slice_stats is not None:
        assert source.stride(0) % 8 == ref_source.stride(0) % 8 == out.stride(0) % 8 == 0
        states, first = slice_stats, 0
    _launch(
        _gradient_kernel,
        tile,
        source,
        ref_source,
        _present(tile.bias, rows),
        _present(tile.ref_bias, rows),
        extra,
        tile.targets,
        _present(tile.places, tile.targets),
        rows,
        states,
        out,
        *(source.stride(0), ref_source.stride(0), extra.stride(0), rows.stride(0), *states.stride()[:2], out.stride(0)),
        *_numbers(tile, first),
        **_constants(tile),
        PAIRED=paired,
        EXTRA=tile.extra is not None,
        KEPT=kept is not None,
        MARKED=0 if slice_stats is None else MARKED,
        PLACES=tile.places is not None,
        PARTS=() if weighted is None else _parts(weighted),
    )


def _launch(kernel: triton.JITFunction, tile: Tile, *args: Tensor | float, **constants: object) -> None:
    """Start one program for each token and slice, on the device of the tile: Triton starts them on the current one."""
    device = torch.cuda.device(tile.targets.device) if tile.targets.is_cuda else nullcontext()
    with device:
        kernel[(len(tile.targets), slices(tile.width))](*args, **constants, num_warps=WARPS)


def _constants(tile: Tile) -> dict[str, bool | int]:
    """What a tile says to each of the kernels."""
    return {
        "BIAS": tile.bias is not None,
        "REF_BIAS": tile.ref_bias is not None,
        "SOFTCAP": tile.transform.softcap is not None,
        "REF_SOFTCAP": tile.ref_transform.softcap is not None,
        "EVEN": tile.width % SLICE == 0,
        "FINITE": tile.finite,
        "SLICE": SLICE,
    }


def _present(x: Tensor | None, stand_in: Tensor) -> Tensor:
    """`x`, or another tensor if it is None: a kernel needs a valid pointer even if it does not read it."""
    return stand_in if x is None else x


def _parts(divergence: Divergence) -> tuple[tuple[float, int, float], ...]:
    """Weight, kind and parameter of each generator, as a kernel reads them."""
    return tuple((part.weight, KINDS[part.kind], part.parameter) for part in divergence.parts)


ALPHA, JENSEN_SHANNON, TOTAL_VARIATION, HUBER = (tl.constexpr(i) for i in range(4))
KINDS: dict[Kind, int] = {"alpha": 0, "jensen-shannon": 1, "total-variation": 2, "huber": 3}
"""Kinds by number: Triton 3.6 takes a string among a kernel's constants for a tensor."""


def _numbers(tile: Tile, first: int) -> tuple[float, ...]:
    """The place of a tile, the number of its first slice, and both transforms, as each of the kernels takes them."""
    transforms = [(x.scale, x.softcap or 1.0, 1 / x.temperature) for x in (tile.transform, tile.ref_transform)]
    return (tile.start, tile.width, first, *transforms[0], *transforms[1])


@triton.jit
def _transformed(raw, scale, cap, inverse_temperature, SOFTCAP: tl.constexpr):
    z = raw * scale
    if SOFTCAP:
        z = cap * (1 - 2 / (tl.exp(2 * (z / cap)) + 1))  # tanh
    return z * inverse_temperature


@triton.jit
def _logits(
    raw_ptr,
    bias_ptr,
    columns,
    live,
    scale,
    cap,
    inverse_temperature,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
):
    if EVEN:
        raw = tl.load(raw_ptr + columns).to(tl.float32)
    else:
        raw = tl.load(raw_ptr + columns, mask=live, other=0.0).to(tl.float32)
    if BIAS:
        raw += tl.load(bias_ptr + columns, mask=live, other=0.0).to(tl.float32)
    z = _transformed(raw, scale, cap, inverse_temperature, SOFTCAP)
    if not FINITE:
        z = tl.where(z < LOWEST, LOWEST, z)  # not tl.maximum, which would turn NaN into banned
    if not EVEN:
        z = tl.where(live, z, LOWEST)
    return z


@triton.jit
def _sum7(a, b, c, d, e, f, g, a2, b2, c2, d2, e2, f2, g2):
    return a + a2, b + b2, c + c2, d + d2, e + e2, f + f2, g + g2


@triton.jit
def _max2(a, b, a2, b2):
    return tl.maximum(a, a2), tl.maximum(b, b2)


@triton.jit
def _sum2(a, b, a2, b2):
    return a + a2, b + b2


@triton.jit
def _statistics_kernel(
    raw_ptr,
    ref_raw_ptr,
    bias_ptr,
    ref_bias_ptr,
    targets_ptr,
    places_ptr,
    states_ptr,
    picked_ptr,
    a_or_minus_b_ptr,
    delta_ptr,
    raw_stride,
    ref_raw_stride,
    field_stride,
    slice_stride,
    kept_stride,
    picked_stride,
    start,
    width,
    first,
    scale,
    cap,
    inverse_temperature,
    ref_scale,
    ref_cap,
    ref_inverse_temperature,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    REF_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    REF_SOFTCAP: tl.constexpr,
    KEEP: tl.constexpr,
    TINY: tl.constexpr,
    PLACES: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    SLICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * SLICE + tl.arange(0, SLICE)
    live = columns < width
    field_stride = tl.cast(field_stride, tl.int64)  # ten times this does not fit into 32 bits for 3 million tokens
    state = states_ptr + (first + part) * slice_stride + row
    place = tl.load(places_ptr + row) if PLACES else row

    z = _logits(
        raw_ptr + place * raw_stride,
        bias_ptr + start,
        columns,
        live,
        *(scale, cap, inverse_temperature, BIAS, SOFTCAP, EVEN, FINITE),
    )
    target = tl.load(targets_ptr + row) - start
    mine = (target >= part * SLICE) & (target < tl.minimum((part + 1) * SLICE, width))
    if mine:
        chosen = _logits(
            raw_ptr + place * raw_stride,
            bias_ptr + start,
            target,
            mine,
            *(scale, cap, inverse_temperature, BIAS, SOFTCAP, True, FINITE),
        )
        tl.store(picked_ptr + row, chosen)
    if PAIRED:
        z_ref = _logits(
            ref_raw_ptr + place * ref_raw_stride,
            ref_bias_ptr + start,
            columns,
            live,
            *(ref_scale, ref_cap, ref_inverse_temperature, REF_BIAS, REF_SOFTCAP, EVEN, FINITE),
        )
        if mine:
            chosen = _logits(
                ref_raw_ptr + place * ref_raw_stride,
                ref_bias_ptr + start,
                target,
                mine,
                *(ref_scale, ref_cap, ref_inverse_temperature, REF_BIAS, REF_SOFTCAP, True, FINITE),
            )
            tl.store(picked_ptr + picked_stride + row, chosen)
        top, ref_top = tl.reduce((z, z_ref), 0, _max2)
        a = z - top
        b = z_ref - ref_top
        d = a - b
        p = tl.exp(a)
        q = tl.exp(b)
        delta = d
        near = tl.abs(d) < NEAR
        if FINITE:
            banned_mass = 0.0
            ref_banned_mass = 0.0
        else:
            banned_mass, ref_banned_mass = tl.reduce(
                (tl.where(d > BANNED, p, 0.0), tl.where(d < -BANNED, q, 0.0)), 0, _sum2
            )
            d = tl.where(tl.abs(d) > BANNED, 0.0, d)
        square = d * d
        even = square * (1 / 2 + square * (1 / 24 + square * (1 / 720)))
        odd = square * d * (1 / 6 + square * (1 / 120 + square * (1 / 5040)))
        reverse = tl.where(near, p * (even - odd), q - p + p * d)
        forward = tl.where(near, q * (even + odd), p - q - q * d)
        mass, sum_p_logit, ref_mass, sum_p_delta, ref_sum_p_delta, reverse, forward = tl.reduce(
            (p, p * a, q, p * d, q * d, reverse, forward), 0, _sum7
        )
        tl.store(state + 3 * field_stride, ref_top)
        tl.store(state + 4 * field_stride, ref_mass)
        tl.store(state + 5 * field_stride, sum_p_delta)
        tl.store(state + 6 * field_stride, -ref_sum_p_delta)
        tl.store(state + 7 * field_stride, reverse)
        tl.store(state + 8 * field_stride, forward)
        tl.store(state + 9 * field_stride, banned_mass)
        tl.store(state + 10 * field_stride, ref_banned_mass)
        if KEEP:  # the same as CachedLogits.store
            own = delta >= 0
            a_or_minus_b = tl.where(own, a, tl.maximum(-b, TINY))
            delta = tl.where(own, delta - sum_p_delta / mass, delta)
            delta = tl.minimum(tl.maximum(delta, -LIMIT), LIMIT)
            tl.store(delta_ptr + row * kept_stride + columns, delta, mask=live)
    else:
        top = tl.max(z, 0)
        a = z - top
        p = tl.exp(a)
        mass, sum_p_logit = tl.reduce((p, p * a), 0, _sum2)
        a_or_minus_b = a
    tl.store(state, top)
    tl.store(state + field_stride, mass)
    tl.store(state + 2 * field_stride, sum_p_logit)
    if KEEP:
        a_or_minus_b = tl.minimum(tl.maximum(a_or_minus_b, -LIMIT), LIMIT)
        tl.store(a_or_minus_b_ptr + row * kept_stride + columns, a_or_minus_b, mask=live)


@triton.jit
def _phi_series(x):
    """e^x - 1 - x for a small |x|."""
    series = 1 / 720 + x * (1 / 5040 + x * (1 / 40320 + x * (1 / 362880)))
    return x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * series))))


@triton.jit
def _expm1(x):
    return tl.where(tl.abs(x) < NEAR, x + _phi_series(x), tl.exp(x) - 1)


@triton.jit
def _mixture(log_ratio, BETA: tl.constexpr):
    """Log p/m and log m/q, m = β q + (1 - β) p."""
    positive = log_ratio > 0
    # log1p of it; near 0 by the series of 2 artanh(half)
    x = tl.where(positive, BETA, 1 - BETA) * _expm1(-tl.abs(log_ratio))
    half = x / (2 + x)
    square = half * half
    series = 1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9 + square * (1 / 11)))))
    small = tl.where(tl.abs(log_ratio) < NEAR, 2 * half * series, tl.log(1 + x))
    return tl.where(positive, -small, log_ratio - small), tl.where(positive, log_ratio + small, small)


@triton.jit
def _slope(log_ratio, KIND: tl.constexpr, PARAMETER: tl.constexpr):
    """f'(u) of one generator."""
    if KIND == ALPHA:
        slope = log_ratio
        if PARAMETER != 1:
            slope = -_expm1(tl.minimum((PARAMETER - 1) * log_ratio, CAP)) / (1 - PARAMETER)
    elif KIND == JENSEN_SHANNON:
        p_by_mixture, _ = _mixture(log_ratio, PARAMETER)
        slope = (1 - PARAMETER) * p_by_mixture
    elif KIND == TOTAL_VARIATION:
        slope = tl.where(log_ratio > 0, 1.0, tl.where(log_ratio < 0, -1.0, 0.0))
    else:
        tl.static_assert(KIND == HUBER)
        slope = tl.minimum(tl.maximum(log_ratio, -PARAMETER), PARAMETER)
    return slope


@triton.jit
def _term(log_p, log_q, log_ratio, KIND: tl.constexpr, PARAMETER: tl.constexpr):
    """Compute p f(u)/u of one generator."""
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    near = tl.abs(log_ratio) < NEAR
    if KIND == ALPHA:
        if PARAMETER == 1:
            term = tl.where(near, p * _phi_series(-log_ratio), q - p + p * log_ratio)
        elif PARAMETER == 0:
            term = tl.where(near, q * _phi_series(log_ratio), p - q - q * log_ratio)
        else:
            rest: tl.constexpr = 1 - PARAMETER
            near = near & (tl.abs(rest * log_ratio) < NEAR)
            product = tl.exp(tl.minimum(PARAMETER * log_p + rest * log_q, LARGEST))
            close = p * (rest * _phi_series(-log_ratio) - _phi_series(-rest * log_ratio))
            term = tl.where(near, close, rest * q + PARAMETER * p - product) / (rest * PARAMETER)
    elif KIND == JENSEN_SHANNON:
        p_by_mixture, mixture_by_q = _mixture(log_ratio, PARAMETER)
        close = (1 - PARAMETER) * p * _phi_series(-p_by_mixture) + PARAMETER * q * _phi_series(mixture_by_q)
        term = tl.where(near, close, (1 - PARAMETER) * p * p_by_mixture - PARAMETER * q * mixture_by_q)
    elif KIND == TOTAL_VARIATION:
        term = tl.where(near, p * tl.abs(_phi_series(-log_ratio) - log_ratio), tl.abs(p - q))
    else:
        tl.static_assert(KIND == HUBER)
        clipped = tl.minimum(tl.maximum(log_ratio, -PARAMETER), PARAMETER)
        share = tl.exp(tl.where(tl.abs(log_ratio) <= PARAMETER, log_p, log_q + clipped))
        phi = tl.where(tl.abs(clipped) < NEAR, _phi_series(-clipped), tl.exp(-clipped) - 1 + clipped)
        term = share * phi + clipped * (p - share)
    return term


@triton.jit
def _divergence_kernel(
    raw_ptr,
    ref_raw_ptr,
    bias_ptr,
    ref_bias_ptr,
    rows_ptr,
    sums_ptr,
    raw_stride,
    ref_raw_stride,
    rows_stride,
    field_stride,
    slice_stride,
    start,
    width,
    first,
    scale,
    cap,
    inverse_temperature,
    ref_scale,
    ref_cap,
    ref_inverse_temperature,
    BIAS: tl.constexpr,
    REF_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    REF_SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * SLICE + tl.arange(0, SLICE)
    live = columns < width
    z = _logits(
        raw_ptr + row * raw_stride,
        bias_ptr + start,
        columns,
        live,
        *(scale, cap, inverse_temperature, BIAS, SOFTCAP, EVEN, FINITE),
    )
    z_ref = _logits(
        ref_raw_ptr + row * ref_raw_stride,
        ref_bias_ptr + start,
        columns,
        live,
        *(ref_scale, ref_cap, ref_inverse_temperature, REF_BIAS, REF_SOFTCAP, EVEN, FINITE),
    )
    logsumexp = tl.load(rows_ptr + row)
    lse_difference = tl.load(rows_ptr + rows_stride + row)
    log_p = z - logsumexp
    log_q = z_ref - (logsumexp - lse_difference)
    log_ratio = z - z_ref - lse_difference
    term = tl.zeros_like(log_p)
    slope = tl.zeros_like(log_p)
    for i in tl.static_range(len(PARTS)):
        term += PARTS[i][0] * _term(log_p, log_q, log_ratio, PARTS[i][1], PARTS[i][2])
        slope += PARTS[i][0] * _slope(log_ratio, PARTS[i][1], PARTS[i][2])
    # Entries beyond the width have no probability under either model, so all their terms are 0.
    value, mean_slope = tl.reduce((term, tl.exp(log_p) * slope), 0, _sum2)
    out = sums_ptr + (first + part) * slice_stride + row
    tl.store(out, value)
    tl.store(out + tl.cast(field_stride, tl.int64), mean_slope)


@triton.jit
def _gradient_kernel(
    source_ptr,
    ref_source_ptr,
    bias_ptr,
    ref_bias_ptr,
    extra_ptr,
    targets_ptr,
    places_ptr,
    rows_ptr,
    states_ptr,
    out_ptr,
    source_stride,
    ref_source_stride,
    extra_stride,
    rows_stride,
    field_stride,
    state_stride,
    out_stride,
    start,
    width,
    first,
    scale,
    cap,
    inverse_temperature,
    ref_scale,
    ref_cap,
    ref_inverse_temperature,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    REF_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    REF_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    KEPT: tl.constexpr,
    MARKED: tl.constexpr,
    PLACES: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if MARKED > 0:  # one row for each slice, so that a thread loads few of them
        within = tl.arange(0, SLICE // MARKED)
        columns = part * SLICE + within[:, None] * MARKED + tl.arange(0, MARKED)[None, :]
        # Rows are multiples of 16 bytes, and what they have beyond the last entry may be overwritten. The compiler sees
        # it here, and loads and stores 16 bytes at a time whatever the vocabulary.
        width = (width + 7) // 8 * 8
        source_stride = source_stride // 8 * 8
        ref_source_stride = ref_source_stride // 8 * 8
        out_stride = out_stride // 8 * 8
    else:
        columns = part * SLICE + tl.arange(0, SLICE)
    live = columns < width
    numbers = rows_ptr + row
    place = tl.load(places_ptr + row) if PLACES else row
    logsumexp = tl.load(numbers)
    lse_difference = tl.load(numbers + rows_stride)
    alpha = tl.load(numbers + 2 * rows_stride)
    w_reverse = tl.load(numbers + 3 * rows_stride)
    minus_w_entropy = tl.load(numbers + 4 * rows_stride)
    w_forward = tl.load(numbers + 5 * rows_stride)
    w_logp = tl.load(numbers + 6 * rows_stride)
    target = tl.load(targets_ptr + row) - start
    # It is compared with every column, for which 32 bits are faster than 64.
    target = tl.where((target >= 0) & (target < width), target, -1).to(tl.int32)

    if KEPT:
        field_stride = tl.cast(field_stride, tl.int64)
        if MARKED > 0:
            mark = part * (SLICE // MARKED) + within
            state = (
                states_ptr + row * state_stride + mark
            )  # a row of slice_stats is a token, and a row of states a slice
            top = tl.load(state, mask=mark * MARKED < width, other=0.0)[:, None]
            ref_top = tl.load(state + field_stride, mask=mark * MARKED < width, other=0.0)[:, None]
            mean = tl.load(state + 2 * field_stride, mask=mark * MARKED < width, other=0.0)[:, None]
        else:
            state = states_ptr + (first + part) * state_stride + row
            top = tl.load(state)
            if PAIRED:
                ref_top = tl.load(state + 3 * field_stride)
                mean = tl.load(state + 5 * field_stride) / tl.load(state + field_stride)
        a = tl.load(source_ptr + row * source_stride + columns, mask=live, other=0.0).to(tl.float32)
        if PAIRED:  # the same as CachedLogits.load
            own = a <= 0
            d = tl.load(ref_source_ptr + row * ref_source_stride + columns, mask=live, other=0.0).to(tl.float32)
            d = tl.where(own, d + mean, d)
            a = tl.where(own, a, d - a)
        z = a + top
    else:
        z = _logits(
            source_ptr + place * source_stride,
            bias_ptr + start,
            columns,
            live,
            *(scale, cap, inverse_temperature, BIAS, SOFTCAP, EVEN, FINITE),
        )
    log_p = z - logsumexp
    p = tl.exp(log_p)
    inner = alpha + minus_w_entropy * log_p
    gradient = tl.where(columns == target, w_logp, 0.0)
    if PAIRED:
        if KEPT:
            delta = d + (top - ref_top - lse_difference)
            log_q = log_p - delta
        else:
            z_ref = _logits(
                ref_source_ptr + place * ref_source_stride,
                ref_bias_ptr + start,
                columns,
                live,
                *(ref_scale, ref_cap, ref_inverse_temperature, REF_BIAS, REF_SOFTCAP, EVEN, FINITE),
            )
            delta = z - z_ref - lse_difference
            log_q = z_ref - (logsumexp - lse_difference)
        inner += w_reverse * delta
        if len(PARTS) > 0:
            w_divergence = tl.load(numbers + 7 * rows_stride)
            for i in tl.static_range(len(PARTS)):
                inner += w_divergence * PARTS[i][0] * _slope(delta, PARTS[i][1], PARTS[i][2])
        gradient -= w_forward * tl.exp(log_q)
    gradient += p * inner
    if EXTRA:
        gradient += tl.load(extra_ptr + row * extra_stride + columns, mask=live, other=0.0)
    slope = scale * inverse_temperature
    if SOFTCAP:
        capped = z / (cap * inverse_temperature)
        slope = slope * (1 - capped * capped)
    tl.store(out_ptr + place * out_stride + columns, (gradient * slope).to(out_ptr.dtype.element_ty), mask=live)
