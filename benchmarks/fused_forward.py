"""A forward pass of two heads whose products keep their logits in registers: tried, and slower than the one in use.

Written in Gluon for Hopper. Two programs share a multiprocessor: the sums of one run while the other multiplies. A
program computes the reference's tile of 128 x 128 logits, stores it in a scratch area that fits into the cache, and
computes the policy's tile; then it reads the reference's tile again and adds up the sums of `klgrad.kernels.state` by
rows. `LEVEL` says how much of this is done, to see what each part costs: 0 stores the maxima of rows alone, 2 also
stores and reads the reference's tile, 3 does everything. `bench_fused_forward.py` checks and times it.
"""

# A compiler reads these functions, not Python.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS, COLUMNS, DEPTH, STAGES = 128, 128, 64, 3
FIELDS = 9
"""Numbers per token and tile, in the order of `klgrad.kernels.state`."""
GROUP = 16
"""Rows of tiles that are computed together, so that their operands stay in the cache."""
PROGRAMS = 2 * 132
"""Two for each multiprocessor of an H200."""


@gluon.jit
def _place(tile, row_tiles, column_tiles, GROUP):
    """Row and column of a tile: GROUP rows of tiles at a time, column by column."""
    per_group = GROUP * column_tiles
    group = tile // per_group
    first = group * GROUP
    rows = gl.minimum(row_tiles - first, GROUP)
    within = tile - group * per_group
    return first + within % rows, within // rows


@gluon.jit
def _exp(x):
    """e^x by one multiplication and one instruction; gl.exp also treats results below 1e-38."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _halves(x):
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _own(x):
    """Sums over the columns that a thread holds: (rows, columns) to (rows, 4), without a shuffle."""
    return gl.sum(gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _offsets(rows, LAYOUT: gl.constexpr, WIDTH: gl.constexpr, BN: gl.constexpr):
    r = gl.arange(0, rows, gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return r[:, None] * BN + c[None, :]


@gluon.jit
def _store_row(pointer, values, row0, tokens, BM: gl.constexpr, LAYOUT: gl.constexpr):
    r = row0 + gl.arange(0, BM, LAYOUT)
    gl.store(pointer + r, gl.convert_layout(values, LAYOUT), mask=r < tokens)


@gluon.jit
def _full_part(a, b):
    d = a - b
    p = _exp(a)
    q = _exp(b)
    square = d * d
    near = gl.abs(d) < 0.5
    pd = p * d
    qd = q * d
    even = square * (1 / 2 + square * (1 / 24 + square * (1 / 720)))
    odd = square * d * (1 / 6 + square * (1 / 120 + square * (1 / 5040)))
    reverse = gl.where(near, p * (even - odd), q - p + pd)
    forward = gl.where(near, q * (even + odd), p - q - qd)
    return _own(p), _own(p * a), _own(q), _own(pd), _own(qd), _own(reverse), _own(forward)


@gluon.jit
def _part(x, x_ref, top, ref_top, LEVEL: gl.constexpr):
    """The sums over one part of the columns."""
    L: gl.constexpr = x.type.layout
    a = x - gl.convert_layout(top, gl.SliceLayout(1, L))[:, None]
    b = x_ref - gl.convert_layout(ref_top, gl.SliceLayout(1, L))[:, None]
    if LEVEL == 2:  # noqa: SIM108 (a condition of the compiler)
        s = _own(a), _own(a - b)
    else:
        s = _full_part(a, b)
    return s


@gluon.jit
def _plus(s, t):
    if len(s) == 2:
        r = s[0] + t[0], s[1] + t[1]
    else:
        r = s[0] + t[0], s[1] + t[1], s[2] + t[2], s[3] + t[3], s[4] + t[4], s[5] + t[5], s[6] + t[6]
    return r


@gluon.jit
def _quarters(x):
    x0, x1 = _halves(x)
    x00, x01 = _halves(x0)
    x10, x11 = _halves(x1)
    return x00, x01, x10, x11


@gluon.jit
def _cut(x):
    """Eight parts of the columns, so that few values are in registers at once."""
    x0, x1 = _halves(x)
    return _quarters(x0) + _quarters(x1)


@gluon.jit
def _pointers(x, own, BN: gl.constexpr):
    """Where a part is parked. The parts have the same addresses plus a constant, which needs no registers."""
    L: gl.constexpr = x.type.layout
    return own + _offsets(x.shape[0], L, x.shape[1], BN)


@gluon.jit
def _park(acc, own, BN: gl.constexpr):
    """Store the reference's tile."""
    parts = _cut(acc)
    to = _pointers(parts[0], own, BN)
    for i in gl.static_range(8):
        gl.store(to + i * (BN // 8), parts[i])


@gluon.jit
def _sums(acc, parked, top, ref_top, BN: gl.constexpr, LEVEL: gl.constexpr):
    """All sums, part by part. The barrier keeps the compiler from loading all parts at once, which would spill."""
    parts = _cut(acc)
    pointers = _pointers(parts[0], parked, BN)
    now = gl.load(pointers, cache_modifier=".cg")
    for i in gl.static_range(8):
        if i + 1 < 8:
            after = gl.load(pointers + (i + 1) * (BN // 8), cache_modifier=".cg")
        gl.thread_barrier()
        t = _part(parts[i], now, top, ref_top, LEVEL)
        if i == 0:  # noqa: SIM108
            s = t
        else:
            s = _plus(s, t)
        if i + 1 < 8:
            now = after
    return s


@gluon.jit
def _load(
    left,
    right,
    a,
    b,
    ready,
    row,
    column,
    k,
    index,
    live,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    stage = index % STAGES
    mbarrier.expect(ready.index(stage), (BM + BN) * BK * 2, pred=live)
    tma.async_copy_global_to_shared(left, [row * BM, k * BK], ready.index(stage), a.index(stage), live)
    tma.async_copy_global_to_shared(right, [column * BN, k * BK], ready.index(stage), b.index(stage), live)


@gluon.jit
def _product(
    left,
    right,
    a,
    b,
    ready,
    row,
    column,
    index,
    steps,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """One product whose first STAGES - 1 loads are under way; none is at its end."""
    acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
    for k in range(steps):
        stage = index % STAGES
        mbarrier.wait(ready.index(stage), (index // STAGES) & 1)
        acc = warpgroup_mma(a.index(stage), b.index(stage).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # The stage of the previous step is free now.
        ahead = k + STAGES - 1
        _load(left, right, a, b, ready, row, column, ahead, index + STAGES - 1, ahead < steps, BM, BN, BK, STAGES)
        index += 1
    return warpgroup_mma_wait(0, deps=(acc,)), index


@gluon.jit(do_not_specialize=["tokens", "vocabulary", "hidden", "ref_hidden", "GROUP"])
def _forward(
    h,
    w,
    h_ref,
    w_ref,
    states,
    scratch,
    tokens,
    vocabulary,
    hidden,
    ref_hidden,
    GROUP,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    LEVEL: gl.constexpr,
):
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    R: gl.constexpr = gl.SliceLayout(1, M)
    AHEAD: gl.constexpr = STAGES - 1
    a = gl.allocate_shared_memory(h.dtype, [STAGES, BM, BK], h.layout)
    b = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    row_tiles = gl.cdiv(tokens, BM)
    column_tiles = gl.cdiv(vocabulary, BN)
    steps = gl.cdiv(hidden, BK)
    ref_steps = gl.cdiv(ref_hidden, BK)
    field = column_tiles.to(gl.int64) * tokens
    own = scratch + gl.program_id(0) * (BM * BN)
    index = gl.to_tensor(0)
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        out = states + column.to(gl.int64) * tokens
        row0 = row * BM
        live = vocabulary - column * BN
        columns = gl.arange(0, BN, gl.SliceLayout(0, M))[None, :]
        for k in gl.static_range(AHEAD):
            _load(h_ref, w_ref, a, b, ready, row, column, k, index + k, k < ref_steps, BM, BN, BK, STAGES)
        acc, index = _product(h_ref, w_ref, a, b, ready, row, column, index, ref_steps, BM, BN, BK, STAGES, M)
        if live < BN:
            acc = gl.where(columns < live, acc, -1e30)
        # The policy's first loads run while the reference's tile is stored.
        for k in gl.static_range(AHEAD):
            _load(h, w, a, b, ready, row, column, k, index + k, k < steps, BM, BN, BK, STAGES)
        ref_top = gl.max(acc, 1)
        _store_row(out + 3 * field, ref_top, row0, tokens, BM, R)
        if LEVEL >= 2:
            _park(acc, own, BN)
        acc, index = _product(h, w, a, b, ready, row, column, index, steps, BM, BN, BK, STAGES, M)
        if live < BN:
            acc = gl.where(columns < live, acc, -1e30)
        top = gl.max(acc, 1)
        _store_row(out, top, row0, tokens, BM, R)
        if LEVEL >= 2:
            s = _sums(acc, own, top, ref_top, BN, LEVEL)
            _store_row(out + field, gl.sum(s[0], 1), row0, tokens, BM, R)
            _store_row(out + 2 * field, gl.sum(s[1], 1), row0, tokens, BM, R)
            if LEVEL == 3:
                _store_row(out + 4 * field, gl.sum(s[2], 1), row0, tokens, BM, R)
                _store_row(out + 5 * field, gl.sum(s[3], 1), row0, tokens, BM, R)
                _store_row(out + 6 * field, -gl.sum(s[4], 1), row0, tokens, BM, R)
                _store_row(out + 7 * field, gl.sum(s[5], 1), row0, tokens, BM, R)
                _store_row(out + 8 * field, gl.sum(s[6], 1), row0, tokens, BM, R)


def launch(h: Tensor, w: Tensor, h_ref: Tensor, w_ref: Tensor, states: Tensor, scratch: Tensor, level: int) -> Any:
    """Run the kernel.

    Args:
        h: (N, H) hidden states of the policy, in bf16.
        w: (V, H) its head.
        h_ref: (N, H') hidden states of the reference.
        w_ref: (V, H') its head.
        states: (FIELDS, tiles of the vocabulary, N) float32, which is written.
        scratch: `PROGRAMS` tiles in float32.
        level: 0, 2 or 3, as above.
    """
    shared = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    describe = lambda x, rows: TensorDescriptor.from_tensor(x, [rows, DEPTH], shared)
    given = (describe(h, ROWS), describe(w, COLUMNS), describe(h_ref, ROWS), describe(w_ref, COLUMNS), states, scratch)
    sizes = (len(h), len(w), h.shape[1], h_ref.shape[1], GROUP)
    return _forward[(PROGRAMS,)](*given, *sizes, ROWS, COLUMNS, DEPTH, STAGES, level, num_warps=4)
