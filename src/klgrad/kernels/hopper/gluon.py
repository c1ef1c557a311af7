"""The kernels for Hopper, in Gluon: a ring of tiles, their formulas, sums and gradients, and how they are started."""

from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..state import FIELDS, LOWEST, NEAR
from ..tiling import LARGEST_KEPT, CachedLogits
from . import HopperOperands

# The products of both models' tiles, with the logits left in registers. In Gluon, for Hopper.
#
# A program has three groups of warps. One warp, the producer, loads tiles of the operands into a ring of shared memory.
# Two consumers of four warps each have 64 of a tile's 128 rows. A consumer multiplies the reference's tile and then the
# policy's tile, and has the logits of both in its registers. While it works on them, the other one multiplies.
#
# A logit has the same bits in every kernel that uses this: the products are added in the same order.

# Triton compiles these functions; they are not run as Python.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false


# Triton 3.9 has other names for these than 3.6.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

ROWS, COLUMNS, DEPTH = 128, 128, 64
PART = 8
"""Columns whose entries are worked on together: a thread has four of them, so that few registers hold results."""
CONSUMER, PRODUCER = 240, 24
"""Registers of a thread: two groups of consumers and one of the producer have 504 together, all that 64 Ki allow."""


@gluon.jit
def place(tile, row_tiles, column_tiles, GROUP):
    """Row and column of a tile: GROUP rows of tiles at a time, column by column, so that operands stay in the cache."""
    per_group = GROUP * column_tiles
    group = tile // per_group
    first = group * GROUP
    rows = gl.minimum(row_tiles - first, GROUP)
    within = tile - group * per_group
    return first + within % rows, within // rows


@gluon.jit
def new_ring(h, w, STAGES: gl.constexpr):
    """Shared memory for both operands of STAGES steps, and barriers that say which of them are loaded and free."""
    a = gl.allocate_shared_memory(h.dtype, [STAGES, h.block_type.shape[0], h.block_type.shape[1]], h.layout)
    b = gl.allocate_shared_memory(w.dtype, [STAGES, w.block_type.shape[0], w.block_type.shape[1]], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return a, b, ready, empty


@gluon.jit
def _load_model(left, right, ring, row, column, index, steps):
    """Load one model's operands of a tile, step by step."""
    a, b, ready, empty = ring
    STAGES: gl.constexpr = a.type.shape[0]
    M: gl.constexpr = a.type.shape[1]
    N: gl.constexpr = b.type.shape[1]
    K: gl.constexpr = a.type.shape[2]
    for k in range(steps):
        stage = index % STAGES
        full = ready.index(stage)
        mbarrier.wait(empty.index(stage), ((index // STAGES) & 1) ^ 1)
        mbarrier.expect(full, (M + N) * K * 2)
        _load(left, [row * M, k * K], full, a.index(stage))
        _load(right, [column * N, k * K], full, b.index(stage))
        index += 1
    return index


@gluon.jit
def produce(policy, reference, ring, sizes):
    """Load the operands of all tiles of this program."""
    row_tiles, column_tiles, steps, ref_steps, GROUP = sizes
    index = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        index = _load_model(reference[0], reference[1], ring, row, column, index, ref_steps)
        index = _load_model(policy[0], policy[1], ring, row, column, index, steps)


@gluon.jit
def product(ring, index, steps, WHO: gl.constexpr):
    """One model's tile, and the next index. A stage is given back one step late, when its product has ended.

    The stage to give back is computed. A name that is set to `stage` before the loop and again at the end of its body
    would not be carried by the loop: the compiler compares values, and takes it for unchanged.
    """
    a, b, ready, empty = ring
    STAGES: gl.constexpr = a.type.shape[0]
    M: gl.constexpr = a.type.shape[1] // 2
    N: gl.constexpr = b.type.shape[1]
    acc = gl.zeros((M, N), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    for k in range(steps):
        stage = index % STAGES
        mbarrier.wait(ready.index(stage), (index // STAGES) & 1)
        left = a.index(stage).slice(WHO * M, M, 0)
        acc = warpgroup_mma(left, b.index(stage).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((index + STAGES - 1) % STAGES), pred=k > 0)
        index += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((index + STAGES - 1) % STAGES))
    return acc, index


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def side_by_side(x, y):
    """The inverse of `halves`."""
    return gl.join(x, y).permute((0, 2, 1)).reshape([x.shape[0], 2 * x.shape[1]])


@gluon.jit
def by_row(value, x):
    """One number for each row, to combine with the entries of `x`."""
    return gl.convert_layout(value, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def columns_of(x, first):
    """The numbers of the columns of `x`, from `first` on."""
    return first + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]


@gluon.jit
def put(x, room, target, row, column, PENDING: gl.constexpr):
    """Store a tile through shared memory, of which PENDING stores may still read other parts.

    Rows outside of the target are not written; the last store of a row ends at a multiple of 16 bytes.
    """
    tma.store_wait(PENDING)
    room.store(gl.convert_layout(x, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1], 16])))
    fence_async_shared()
    store(target, [row, column], room)


# The formulas of `state.py` and `CachedLogits` at each entry, for kernels in Gluon.
#
# They have no layout and no memory, so that tests run them on a CPU with torch in place of `gl`, and compare the two.
#
# For |d| < 1/2 the Bregman term of the reverse KL is p d² S(d) with S(d) = (e^-d - 1 + d) / d², here by a polynomial
# that is within 1.1e-7 of it, relatively; that of the forward KL is p d² (1 - (1 + d) S(d)), which needs no second
# polynomial.


@gluon.jit
def exp(x):
    """e^x by one multiplication and one instruction; gl.exp also treats results below 1e-38."""
    scaled = x * 1.4426950408889634
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [scaled], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def terms(a, b):
    """The terms of a state's seven sums, in the order p, p a, q, p d, q d, reverse, forward; no entry is banned."""
    p = exp(a)
    q = exp(b)
    d = a - b
    pd = p * d
    square = pd * d
    tail = 0.04166579246520996 + d * (-0.008333181962370872 + d * (0.0013982197269797325 - d * 0.00019962186343036592))
    reverse = square * (0.5 + d * (-0.1666666716337204 + d * tail))
    forward = (square - reverse) - reverse * d
    near = gl.abs(d) < 0.5
    fall = p - q
    return p, p * a, q, pd, q * d, gl.where(near, reverse, pd - fall), gl.where(near, forward, fall - q * d)


@gluon.jit
def kept_pair(a, b, mean, tiny, limit):
    """The two numbers of `CachedLogits.store`. With a factor of the logits, a can be above 0 by rounding."""
    a = gl.minimum(a, 0.0)
    d = a - b
    own = d >= 0
    a_or_minus_b = gl.where(own, a, gl.maximum(0.0 - b, tiny))
    delta = gl.where(own, d - mean, d)
    return gl.minimum(gl.maximum(a_or_minus_b, 0.0 - limit), limit), gl.minimum(gl.maximum(delta, 0.0 - limit), limit)


@gluon.jit
def logit_gradient(z, z_ref, hit, numbers):
    """The same as `state.logit_gradient`, from its numbers; `hit` marks the sampled token."""
    logsumexp, lse_difference, alpha, w_reverse, minus_w_entropy, w_forward, w_logp = numbers
    log_p = z - logsumexp
    log_q = z_ref - (logsumexp - lse_difference)
    delta = (z - z_ref) - lse_difference
    inner = (alpha + minus_w_entropy * log_p) + w_reverse * delta
    return (gl.where(hit, w_logp, 0.0) - w_forward * exp(log_q)) + exp(log_p) * inner


# The forward pass over two heads: the state of every token and tile of 128 entries, and the targets' logits.
#
# No logit is stored unless it is kept for the backward pass; then the two 16-bit numbers of `CachedLogits` are.

STAGES, KEEPING_STAGES = 7, 5
"""Steps of the ring; the tiles of kept numbers take the shared memory of two."""


@gluon.jit
def _cut(x, WIDTH: gl.constexpr):
    """Parts of WIDTH columns."""
    if x.shape[1] == WIDTH:
        parts = (x,)
    else:
        x0, x1 = halves(x)
        parts = _cut(x0, WIDTH) + _cut(x1, WIDTH)
    return parts


@gluon.jit
def _terms(x, y, tops, factors):
    a = x * factors[0] - by_row(tops[0], x)
    b = y * factors[1] - by_row(tops[1], y)
    return terms(a, b)


@gluon.jit
def _sums(x, y, tops, factors, WIDTH: gl.constexpr):
    """All sums, place by place over the parts first: a product and its addition are then one instruction."""
    xs = _cut(x, WIDTH)
    ys = _cut(y, WIDTH)
    s = _terms(xs[0], ys[0], tops, factors)
    for i in gl.static_range(1, len(xs)):
        t = _terms(xs[i], ys[i], tops, factors)
        s = s[0] + t[0], s[1] + t[1], s[2] + t[2], s[3] + t[3], s[4] + t[4], s[5] + t[5], s[6] + t[6]
    return s


@gluon.jit
def _total(s, R: gl.constexpr):
    """One sum for each row: over the columns that a thread holds first, without a shuffle."""
    own = gl.sum(gl.sum(s.reshape([s.shape[0], s.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(gl.sum(own, 1), R)


@gluon.jit
def _kept(x, y, tops, mean, factors, tiny, limit, WIDTH: gl.constexpr):
    """Both kept numbers of all entries, part by part."""
    if x.shape[1] == WIDTH:
        a = x * factors[0] - by_row(tops[0], x)
        b = y * factors[1] - by_row(tops[1], y)
        a_or_minus_b, delta = kept_pair(a, b, by_row(mean, x), tiny, limit)
        a_or_minus_b = a_or_minus_b.to(gl.float16)
        delta = delta.to(gl.float16)
    else:
        x0, x1 = halves(x)
        y0, y1 = halves(y)
        a_or_minus_b0, delta0 = _kept(x0, y0, tops, mean, factors, tiny, limit, WIDTH)
        a_or_minus_b1, delta1 = _kept(x1, y1, tops, mean, factors, tiny, limit, WIDTH)
        a_or_minus_b = side_by_side(a_or_minus_b0, a_or_minus_b1)
        delta = side_by_side(delta0, delta1)
    return a_or_minus_b, delta


@gluon.jit
def _pick(x, target, hit, factor, out):
    """Store the logits of the targets that are in this tile."""
    chosen = gl.sum(gl.where(columns_of(x, 0) == target[:, None], x, 0.0), 1)
    gl.store(out, chosen * factor, mask=hit)


@gluon.jit
def _consume_sums(
    ring, room, outputs, sizes, limits, factors, WHO: gl.constexpr, WIDTH: gl.constexpr, KEEP: gl.constexpr
):
    targets, states, picked, picked_stride, a_or_minus_b, delta = outputs
    row_tiles, column_tiles, steps, ref_steps, GROUP = sizes
    tokens, vocabulary, first, tiny, limit = limits
    M: gl.constexpr = ring[0].type.shape[1] // 2
    N: gl.constexpr = ring[1].type.shape[1]
    R: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    field = column_tiles.to(gl.int64) * tokens
    index = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        r = (row * 2 + WHO) * M + gl.arange(0, M, R)
        inside = r < tokens
        target = gl.load(targets + r, mask=inside, other=-1) - (first + column * N)
        live = vocabulary - column * N
        y, index = product(ring, index, ref_steps, WHO)
        x, index = product(ring, index, steps, WHO)
        hit = (target >= 0) & (target < gl.minimum(live, N)) & inside
        if gl.max(hit.to(gl.int32), 0) > 0:
            _pick(x, target.to(gl.int32), hit, factors[0], picked + r)
            _pick(y, target.to(gl.int32), hit, factors[1], picked + picked_stride + r)
        if live < N:  # columns beyond the vocabulary have no probability
            x = gl.where(columns_of(x, 0) < live, x, -1e30)
            y = gl.where(columns_of(y, 0) < live, y, -1e30)
        tops = gl.max(x, 1) * factors[0], gl.max(y, 1) * factors[1]
        s = _sums(x, y, tops, factors, WIDTH)
        mass = _total(s[0], R)
        sum_p_delta = _total(s[3], R)
        out = states + column.to(gl.int64) * tokens + r
        gl.store(out, tops[0], mask=inside)
        gl.store(out + field, mass, mask=inside)
        gl.store(out + 2 * field, _total(s[1], R), mask=inside)
        gl.store(out + 3 * field, tops[1], mask=inside)
        gl.store(out + 4 * field, _total(s[2], R), mask=inside)
        gl.store(out + 5 * field, sum_p_delta, mask=inside)
        gl.store(out + 6 * field, 0.0 - _total(s[4], R), mask=inside)
        gl.store(out + 7 * field, _total(s[5], R), mask=inside)
        gl.store(out + 8 * field, _total(s[6], R), mask=inside)
        if KEEP:
            u, v = _kept(x, y, tops, sum_p_delta / mass, factors, tiny, limit, WIDTH)
            put(u, room.index(2 * WHO), a_or_minus_b, (row * 2 + WHO) * M, column * N, 1)
            put(v, room.index(2 * WHO + 1), delta, (row * 2 + WHO) * M, column * N, 1)
    if KEEP:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "vocabulary", "first", "hidden", "ref_hidden", "GROUP", "picked_stride"])
def sums_kernel(
    h,
    w,
    h_ref,
    w_ref,
    a_or_minus_b,
    delta,
    targets,
    states,
    picked,
    picked_stride,
    tokens,
    vocabulary,
    first,
    hidden,
    ref_hidden,
    GROUP,
    factor,
    ref_factor,
    tiny,
    limit,
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,
    KEEP: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """Write the states of all tiles. Arguments are those of `launch.sums`."""
    ring = new_ring(h, w, STAGES)
    room = ring[0]
    if KEEP:
        room = gl.allocate_shared_memory(
            a_or_minus_b.dtype,
            [4, a_or_minus_b.block_type.shape[0], a_or_minus_b.block_type.shape[1]],
            a_or_minus_b.layout,
        )
    M: gl.constexpr = h.block_type.shape[0]
    N: gl.constexpr = w.block_type.shape[0]
    K: gl.constexpr = h.block_type.shape[1]
    sizes = (gl.cdiv(tokens, M), gl.cdiv(vocabulary, N), gl.cdiv(hidden, K), gl.cdiv(ref_hidden, K), GROUP)
    limits = (tokens, vocabulary, first, tiny, limit)
    outputs = (targets, states, picked, picked_stride, a_or_minus_b, delta)
    factors = (factor, ref_factor)
    gl.warp_specialize(
        [
            (_consume_sums, (ring, room, outputs, sizes, limits, factors, 0, WIDTH, KEEP)),
            (_consume_sums, (ring, room, outputs, sizes, limits, factors, 1, WIDTH, KEEP)),
            (produce, ((h, w), (h_ref, w_ref), ring, sizes)),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )


# The backward pass over two heads: logits are computed again, and the gradient of the policy's logits is stored.

GRADIENT_STAGES = 6
"""Steps of the ring; the tile of the gradient takes the shared memory of one."""


@gluon.jit
def _numbers(at, stride, inside):
    """The seven numbers of each row."""
    n0 = gl.load(at, mask=inside, other=0.0)
    n1 = gl.load(at + stride, mask=inside, other=0.0)
    n2 = gl.load(at + 2 * stride, mask=inside, other=0.0)
    n3 = gl.load(at + 3 * stride, mask=inside, other=0.0)
    n4 = gl.load(at + 4 * stride, mask=inside, other=0.0)
    n5 = gl.load(at + 5 * stride, mask=inside, other=0.0)
    n6 = gl.load(at + 6 * stride, mask=inside, other=0.0)
    return n0, n1, n2, n3, n4, n5, n6


@gluon.jit
def _by_row(n, x):
    return (
        by_row(n[0], x),
        by_row(n[1], x),
        by_row(n[2], x),
        by_row(n[3], x),
        by_row(n[4], x),
        by_row(n[5], x),
        by_row(n[6], x),
    )


@gluon.jit
def _gradient(x, y, first: gl.constexpr, target, numbers, factors, DTYPE: gl.constexpr, WIDTH: gl.constexpr):
    """The gradient at all entries, part by part; `first` is the number of the first column."""
    if x.shape[1] == WIDTH:
        rows = _by_row(numbers, x)
        hit = columns_of(x, first) == by_row(target, x)
        out = logit_gradient(x * factors[0], y * factors[1], hit, rows).to(DTYPE)
    else:
        x0, x1 = halves(x)
        y0, y1 = halves(y)
        out0 = _gradient(x0, y0, first, target, numbers, factors, DTYPE, WIDTH)
        out1 = _gradient(x1, y1, first + x.shape[1] // 2, target, numbers, factors, DTYPE, WIDTH)
        out = side_by_side(out0, out1)
    return out


@gluon.jit
def _consume_gradient(ring, room, inputs, out, sizes, tokens, factors, WHO: gl.constexpr, WIDTH: gl.constexpr):
    targets, numbers, stride, first = inputs
    row_tiles, column_tiles, steps, ref_steps, GROUP = sizes
    M: gl.constexpr = ring[0].type.shape[1] // 2
    N: gl.constexpr = ring[1].type.shape[1]
    R: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    index = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        r = (row * 2 + WHO) * M + gl.arange(0, M, R)
        inside = r < tokens
        # Loaded before the products, which take longer than the loads.
        given = _numbers(numbers + r, stride, inside)
        target = gl.load(targets + r, mask=inside, other=-1) - (first + column * N)
        target = gl.where((target >= 0) & (target < N), target, -1).to(gl.int32)
        y, index = product(ring, index, ref_steps, WHO)
        x, index = product(ring, index, steps, WHO)
        tile_gradient = _gradient(x, y, 0, target, given, factors, out.dtype, WIDTH)
        put(tile_gradient, room.index(WHO), out, (row * 2 + WHO) * M, column * N, 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "vocabulary", "first", "hidden", "ref_hidden", "GROUP", "stride"])
def gradient_kernel(
    h,
    w,
    h_ref,
    w_ref,
    out,
    targets,
    numbers,
    stride,
    tokens,
    vocabulary,
    first,
    hidden,
    ref_hidden,
    GROUP,
    factor,
    ref_factor,
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """Write the gradient of all tiles. Arguments are those of `launch.gradient`."""
    ring = new_ring(h, w, STAGES)
    room = gl.allocate_shared_memory(out.dtype, [2, out.block_type.shape[0], out.block_type.shape[1]], out.layout)
    M: gl.constexpr = h.block_type.shape[0]
    N: gl.constexpr = w.block_type.shape[0]
    K: gl.constexpr = h.block_type.shape[1]
    sizes = (gl.cdiv(tokens, M), gl.cdiv(vocabulary, N), gl.cdiv(hidden, K), gl.cdiv(ref_hidden, K), GROUP)
    inputs = (targets, numbers, stride, first)
    factors = (factor, ref_factor)
    gl.warp_specialize(
        [
            (_consume_gradient, (ring, room, inputs, out, sizes, tokens, factors, 0, WIDTH)),
            (_consume_gradient, (ring, room, inputs, out, sizes, tokens, factors, 1, WIDTH)),
            (produce, ((h, w), (h_ref, w_ref), ring, sizes)),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )


# Merge the states of a token's many tiles of 128 entries into a few, and write their `slice_stats`, in Triton.

GROUPS, TOKENS, PARTS = 8, 32, 16
"""States of a token that are left; tokens of a program; states that it reads at a time."""


# A number that is 1 would be a constant of the compiler, which has no type.
@triton.jit(do_not_specialize=["parts"])
def _merge_kernel(
    states,
    out,
    slice_stats,
    parts,
    per_program,
    tokens,
    mark_field,
    mark_stride,
    MARKS: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    LOWEST: tl.constexpr,
    NEAR: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < tokens
    first = tl.program_id(1) * per_program
    last = tl.minimum(first + per_program, parts)
    field = parts.to(tl.int64) * tokens
    high = tl.full((R,), LOWEST, tl.float32)
    ref_high = tl.full((R,), LOWEST, tl.float32)
    for i in range(first, last, P):
        part = i + tl.arange(0, P)
        live = (part < last)[:, None] & inside[None, :]
        at = states + part.to(tl.int64)[:, None] * tokens + rows[None, :]
        high = tl.maximum(high, tl.max(tl.load(at, mask=live, other=LOWEST), 0))
        ref_high = tl.maximum(ref_high, tl.max(tl.load(at + 3 * field, mask=live, other=LOWEST), 0))
    mass_sum = tl.zeros((R,), tl.float32)
    p_logit_total = tl.zeros((R,), tl.float32)
    ref_mass_sum = tl.zeros((R,), tl.float32)
    p_delta_total = tl.zeros((R,), tl.float32)
    ref_p_delta_total = tl.zeros((R,), tl.float32)
    reverse_sum = tl.zeros((R,), tl.float32)
    forward_sum = tl.zeros((R,), tl.float32)
    for i in range(first, last, P):
        part = i + tl.arange(0, P)
        live = (part < last)[:, None] & inside[None, :]
        at = states + part.to(tl.int64)[:, None] * tokens + rows[None, :]
        top = tl.load(at, mask=live, other=LOWEST)
        ref_top = tl.load(at + 3 * field, mask=live, other=LOWEST)
        mass = tl.load(at + field, mask=live, other=0.0)
        sum_p_logit = tl.load(at + 2 * field, mask=live, other=0.0)
        ref_mass = tl.load(at + 4 * field, mask=live, other=0.0)
        sum_p_delta = tl.load(at + 5 * field, mask=live, other=0.0)
        ref_sum_p_delta = tl.load(at + 6 * field, mask=live, other=0.0)
        if MARKS:
            mark = slice_stats + rows.to(tl.int64)[None, :] * mark_stride + part[:, None]
            tl.store(mark, top, mask=live)
            tl.store(mark + mark_field, ref_top, mask=live)
            tl.store(mark + 2 * mark_field, sum_p_delta / mass, mask=live)
        drop = top - high[None, :]
        ref_drop = ref_top - ref_high[None, :]
        p = tl.exp(drop)
        q = tl.exp(ref_drop)
        d = tl.where(live, drop - ref_drop, 0.0)
        square = d * d
        even = square * (1 / 2 + square * (1 / 24 + square * (1 / 720)))
        odd = square * d * (1 / 6 + square * (1 / 120 + square * (1 / 5040)))
        near = tl.abs(d) < NEAR
        reverse = tl.where(near, p * (even - odd), q - p + p * d)
        forward = tl.where(near, q * (even + odd), p - q - q * d)
        mass_sum += tl.sum(p * mass, 0)
        p_logit_total += tl.sum(tl.where(live, p * (sum_p_logit + drop * mass), 0.0), 0)
        ref_mass_sum += tl.sum(q * ref_mass, 0)
        p_delta_total += tl.sum(p * (sum_p_delta + d * mass), 0)
        ref_p_delta_total += tl.sum(q * (ref_sum_p_delta - d * ref_mass), 0)
        own_reverse = tl.load(at + 7 * field, mask=live, other=0.0)
        own_forward = tl.load(at + 8 * field, mask=live, other=0.0)
        reverse_sum += tl.sum(q * own_reverse + reverse * mass + (p - q) * sum_p_delta, 0)
        forward_sum += tl.sum(p * own_forward + forward * ref_mass - (p - q) * ref_sum_p_delta, 0)
    to = out + tl.program_id(1).to(tl.int64) * tokens + rows
    step = tl.num_programs(1).to(tl.int64) * tokens
    tl.store(to, high, mask=inside)
    tl.store(to + step, mass_sum, mask=inside)
    tl.store(to + 2 * step, p_logit_total, mask=inside)
    tl.store(to + 3 * step, ref_high, mask=inside)
    tl.store(to + 4 * step, ref_mass_sum, mask=inside)
    tl.store(to + 5 * step, p_delta_total, mask=inside)
    tl.store(to + 6 * step, ref_p_delta_total, mask=inside)
    tl.store(to + 7 * step, reverse_sum, mask=inside)
    tl.store(to + 8 * step, forward_sum, mask=inside)


def merge(states: Tensor, slice_stats: Tensor | None) -> Tensor:
    """Merge (9, parts, N) states, in which no entry is banned, into at most GROUPS, (FIELDS, groups, N).

    The states' maxima and means of d are written into `slice_stats`, (3, N, parts), unless it is None.
    """
    _, parts, tokens = states.shape
    per_group = triton.cdiv(parts, GROUPS)
    groups = triton.cdiv(parts, per_group)  # no group is empty
    out = states.new_zeros(FIELDS, groups, tokens)
    grid = (triton.cdiv(tokens, TOKENS), groups)
    to = states if slice_stats is None else slice_stats  # a kernel needs a valid pointer even if it writes nothing
    given = (states, out, to, parts, per_group, tokens, *to.stride()[:2], slice_stats is not None)
    with torch.cuda.device(states.device) if states.is_cuda else nullcontext():
        _merge_kernel[grid](*given, PARTS, TOKENS, LOWEST, NEAR[torch.float32])
    return out


# Start the kernels for Hopper.

SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
GROUP = 16
"""Rows of tiles that are computed together."""


def sums(models: HopperOperands, states: Tensor, picked: Tensor, kept: CachedLogits | None) -> None:
    """Compute the states of tiles of 128 entries, and the targets' logits, of all tokens of two models.

    Args:
        models: both models' operands.
        states: (9, tiles, N) float32, which is written.
        picked: (2, N) float32; the logits of the targets that are among the entries are written.
        kept: (N, entries) where the logits are kept, or None.
    """
    given = (*_operands(models), *((_out(kept.a_or_minus_b), _out(kept.delta)) if kept else (None, None)))
    numbers = (*_sizes(models), *models.factors, kept.tiny if kept else 0.0, LARGEST_KEPT)
    stages = KEEPING_STAGES if kept else STAGES
    _start(
        sums_kernel,
        models,
        *(*given, models.targets, states, picked, picked.stride(0), *numbers),
        *(stages, PART, kept is not None, CONSUMER, PRODUCER),
    )


def gradient(models: HopperOperands, numbers: Tensor, out: Tensor) -> None:
    """Compute the logits again, and write the gradient of the policy's raw logits.

    Args:
        models: both models' operands.
        numbers: (7, N) of `state.gradient_numbers`, float32, from the third on times the slope of the transform.
        out: (N, entries), which is written.
    """
    _start(
        gradient_kernel,
        models,
        *(*_operands(models), _out(out), models.targets, numbers, numbers.stride(0)),
        *(*_sizes(models), *models.factors),
        *(GRADIENT_STAGES, PART, CONSUMER, PRODUCER),
    )


def _start(kernel: triton.JITFunction, models: HopperOperands, *arguments: object) -> None:
    """One program for each multiprocessor, on the device of the tensors: Triton starts kernels on the current one."""
    device = models.hidden.device
    with torch.cuda.device(device):
        kernel[(_multiprocessors(device),)](*arguments, num_warps=4)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _operands(models: HopperOperands) -> list[TensorDescriptor]:
    pairs = ((models.hidden, ROWS), (models.weight, COLUMNS), (models.ref_hidden, ROWS), (models.ref_weight, COLUMNS))
    return [TensorDescriptor.from_tensor(x, [rows, DEPTH], SHARED) for x, rows in pairs]


def _out(x: Tensor | None) -> TensorDescriptor:
    """What one consumer stores. Stores end at a multiple of 16 bytes, so each row needs memory up to there."""
    assert x is not None
    return TensorDescriptor.from_tensor(x, [ROWS // 2, COLUMNS], SHARED)


def _sizes(models: HopperOperands) -> tuple[int, ...]:
    widths = (models.hidden.shape[1], models.ref_hidden.shape[1])
    return (len(models.hidden), len(models.weight), models.start, *widths, GROUP)
