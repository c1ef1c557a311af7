"""A forward pass of two heads that keeps the logits of both in registers until they are summed. In Gluon, for Hopper.

A program has three groups of warps. One warp loads tiles of the operands into a ring of shared memory. Two consumers of
four warps each have 64 of a tile's 128 rows. A consumer multiplies the reference's tile, then the policy's tile, keeps
both in its registers, and adds up the sums of `klgrad.kernels.state` by rows: no logit is ever stored. The second
consumer starts a tile LAG steps after the first, so that the sums of one run while the other multiplies.

A tile has `COLUMNS` = N1 + N2 columns in one or two accumulators for each model, since the size of a tensor is a power
of two: more columns mean fewer loads per product, and 128 + 64 is the most that 240 registers hold.

For |d| < 1/2 the excess of the reverse KL is p d² S(d) with S(d) = (e^-d - 1 + d) / d², here by a polynomial, and that
of the forward KL is p d² (1 - (1 + d) S(d)). `bench_fused_forward.py` checks and times it.
"""

# A compiler reads these functions, not Python.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false

from dataclasses import dataclass
from typing import Any

from fused_forward import _halves, _own, _place
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

# Triton 3.9 has another name for it than 3.6.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

ROWS, DEPTH, PART = 128, 64, 8
PROGRAMS = 132
"""One for each multiprocessor of an H200."""
CONSUMER, PRODUCER = 240, 24
"""Registers of a thread: two groups of consumers and one of the producer have 504 together, all that 64 Ki allow."""


@dataclass(frozen=True)
class Shape:
    """A variant of the kernel."""

    n1: int = 128
    n2: int = 0
    stages: int = 7
    lag: int = 3

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.n1 + self.n2


NARROW, WIDE = Shape(), Shape(n2=64, stages=5, lag=2)


@gluon.jit
def _load(left, right, right2, ring, row, column, index, steps, N1: gl.constexpr, N2: gl.constexpr):
    """One model's operands of a tile, step by step."""
    a, b, b2, ready, empty, _lead = ring
    STAGES: gl.constexpr = a.type.shape[0]
    BM: gl.constexpr = a.type.shape[1]
    BK: gl.constexpr = a.type.shape[2]
    for k in range(steps):
        stage = index % STAGES
        full = ready.index(stage)
        mbarrier.wait(empty.index(stage), ((index // STAGES) & 1) ^ 1)
        mbarrier.expect(full, (BM + N1 + N2) * BK * 2)
        _copy(left, [row * BM, k * BK], full, a.index(stage))
        _copy(right, [column * (N1 + N2), k * BK], full, b.index(stage))
        if N2 > 0:
            _copy(right2, [column * (N1 + N2) + N1, k * BK], full, b2.index(stage))
        index += 1
    return index


@gluon.jit
def _produce(policy, reference, ring, sizes, N1: gl.constexpr, N2: gl.constexpr):
    h, w, w2 = policy
    h_ref, w_ref, w_ref2 = reference
    _tokens, _vocabulary, row_tiles, column_tiles, steps, ref_steps, GROUP = sizes
    index = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        index = _load(h_ref, w_ref, w_ref2, ring, row, column, index, ref_steps, N1, N2)
        index = _load(h, w, w2, ring, row, column, index, steps, N1, N2)


@gluon.jit
def _product(ring, index, steps, lead_at, LEADS: gl.constexpr, WHO: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr):
    """One model's tile. A stage is given back one step late, when its product has ended.

    The stage to give back is computed. A name that is set to `stage` before the loop and again at the end of its body
    would not be carried by the loop: the compiler compares values, and takes it for unchanged.
    """
    a, b, b2, ready, empty, lead = ring
    STAGES: gl.constexpr = a.type.shape[0]
    BM: gl.constexpr = a.type.shape[1] // 2
    acc = gl.zeros((BM, N1), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N1, 16]))
    if N2 > 0:
        acc2 = gl.zeros((BM, N2), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N2, 16]))
    for k in range(steps):
        stage = index % STAGES
        mbarrier.wait(ready.index(stage), (index // STAGES) & 1)
        left = a.index(stage).slice(WHO * BM, BM, 0)
        acc = warpgroup_mma(left, b.index(stage).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        if N2 > 0:
            acc2 = warpgroup_mma(left, b2.index(stage).permute((1, 0)), acc2, use_acc=k > 0, is_async=True)
            acc, acc2 = warpgroup_mma_wait(2, deps=(acc, acc2))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((index + STAGES - 1) % STAGES), pred=k > 0)
        if LEADS:
            mbarrier.arrive(lead, pred=k == lead_at)
        index += 1
    if N2 > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=(acc, acc2))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        acc2 = acc
    mbarrier.arrive(empty.index((index + STAGES - 1) % STAGES))
    return acc, acc2, index


@gluon.jit
def _exp(x):
    """e^x by one multiplication and one instruction."""
    scaled = x * 1.4426950408889634
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [scaled], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _terms(x, y, top, ref_top):
    """The terms of the sums at each place. The polynomial is within 1.1e-7 of S(d), relatively, for |d| < 1/2."""
    L: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    a = x - gl.convert_layout(top, L)[:, None]
    b = y - gl.convert_layout(ref_top, L)[:, None]
    p = _exp(a)
    q = _exp(b)
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
def _cut(x, WIDTH: gl.constexpr):
    """Parts of WIDTH columns."""
    if x.shape[1] == WIDTH:
        parts = (x,)
    else:
        x0, x1 = _halves(x)
        parts = _cut(x0, WIDTH) + _cut(x1, WIDTH)
    return parts


@gluon.jit
def _sums(x, y, top, ref_top, WIDTH: gl.constexpr):
    """All sums, place by place over the parts first: a product and its addition are then one instruction."""
    xs = _cut(x, WIDTH)
    ys = _cut(y, WIDTH)
    s = _terms(xs[0], ys[0], top, ref_top)
    for i in gl.static_range(1, len(xs)):
        t = _terms(xs[i], ys[i], top, ref_top)
        s = s[0] + t[0], s[1] + t[1], s[2] + t[2], s[3] + t[3], s[4] + t[4], s[5] + t[5], s[6] + t[6]
    return s


@gluon.jit
def _total(s, t, N2: gl.constexpr, R: gl.constexpr):
    """One sum for each row."""
    total = gl.convert_layout(gl.sum(_own(s), 1), R)
    if N2 > 0:
        total = total + gl.convert_layout(gl.sum(_own(t), 1), R)
    return total


@gluon.jit
def _live(x, live):
    """Columns beyond the vocabulary get logits without probability."""
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    return gl.where(columns < live, x, -1e30)


@gluon.jit
def _finish(x, x2, y, y2, out, field, inside, R: gl.constexpr, N2: gl.constexpr, WIDTH: gl.constexpr):
    """Maxima and sums of a tile's rows."""
    top = gl.max(x, 1)
    ref_top = gl.max(y, 1)
    if N2 > 0:
        top = gl.maximum(top, gl.convert_layout(gl.max(x2, 1), R))
        ref_top = gl.maximum(ref_top, gl.convert_layout(gl.max(y2, 1), R))
    s = _sums(x, y, top, ref_top, WIDTH)
    if N2 > 0:  # noqa: SIM108 (a condition of the compiler)
        t = _sums(x2, y2, top, ref_top, WIDTH)
    else:
        t = s
    gl.store(out, top, mask=inside)
    gl.store(out + field, _total(s[0], t[0], N2, R), mask=inside)
    gl.store(out + 2 * field, _total(s[1], t[1], N2, R), mask=inside)
    gl.store(out + 3 * field, ref_top, mask=inside)
    gl.store(out + 4 * field, _total(s[2], t[2], N2, R), mask=inside)
    gl.store(out + 5 * field, _total(s[3], t[3], N2, R), mask=inside)
    gl.store(out + 6 * field, 0.0 - _total(s[4], t[4], N2, R), mask=inside)
    gl.store(out + 7 * field, _total(s[5], t[5], N2, R), mask=inside)
    gl.store(out + 8 * field, _total(s[6], t[6], N2, R), mask=inside)


@gluon.jit
def _consume(
    ring,
    states,
    sizes,
    WHO: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    LAG: gl.constexpr,
    WIDTH: gl.constexpr,
):
    a, _b, _b2, _ready, _empty, lead = ring
    tokens, vocabulary, row_tiles, column_tiles, steps, ref_steps, GROUP = sizes
    STAGES: gl.constexpr = a.type.shape[0]
    BM: gl.constexpr = a.type.shape[1] // 2
    R: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N1, 16]))
    LEADS: gl.constexpr = LAG > 0 and WHO == 0
    field = column_tiles.to(gl.int64) * tokens
    # With fewer steps the first consumer could be two tiles ahead, and the second would miss a phase of `lead`.
    lagging = (ref_steps >= LAG) & (steps + ref_steps >= 2 * STAGES)
    lead_at = gl.where(lagging, LAG - 1, -1)
    index = 0
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        if LAG > 0 and WHO == 1:
            mbarrier.wait(lead, turn & 1, pred=lagging)
        turn += 1  # noqa: SIM113 (the compiler has no `enumerate`)
        y, y2, index = _product(ring, index, ref_steps, lead_at, LEADS, WHO, N1, N2)
        x, x2, index = _product(ring, index, steps, lead_at, False, WHO, N1, N2)
        live = vocabulary - column * (N1 + N2)
        if live < N1 + N2:
            x = _live(x, live)
            y = _live(y, live)
            if N2 > 0:
                x2 = _live(x2, live - N1)
                y2 = _live(y2, live - N1)
        r = (row * 2 + WHO) * BM + gl.arange(0, BM, R)
        _finish(x, x2, y, y2, states + column.to(gl.int64) * tokens + r, field, r < tokens, R, N2, WIDTH)


@gluon.jit(do_not_specialize=["tokens", "vocabulary", "hidden", "ref_hidden", "GROUP"])
def _forward(
    h,
    w,
    w2,
    h_ref,
    w_ref,
    w_ref2,
    states,
    tokens,
    vocabulary,
    hidden,
    ref_hidden,
    GROUP,
    BM: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
    WIDTH: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    a = gl.allocate_shared_memory(h.dtype, [STAGES, BM, BK], h.layout)
    b = gl.allocate_shared_memory(w.dtype, [STAGES, N1, BK], w.layout)
    b2 = b
    if N2 > 0:
        b2 = gl.allocate_shared_memory(w.dtype, [STAGES, N2, BK], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lead, count=1)
    fence_async_shared()
    ring = (a, b, b2, ready, empty, lead)
    tiles = (gl.cdiv(tokens, BM), gl.cdiv(vocabulary, N1 + N2))
    sizes = (tokens, vocabulary, tiles[0], tiles[1], gl.cdiv(hidden, BK), gl.cdiv(ref_hidden, BK), GROUP)
    gl.warp_specialize(
        [
            (_consume, (ring, states, sizes, 0, N1, N2, LAG, WIDTH)),
            (_consume, (ring, states, sizes, 1, N1, N2, LAG, WIDTH)),
            (_produce, ((h, w, w2), (h_ref, w_ref, w_ref2), ring, sizes, N1, N2)),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )


def launch(
    h: Tensor, w: Tensor, h_ref: Tensor, w_ref: Tensor, states: Tensor, shape: Shape = NARROW, group: int = 16
) -> Any:
    """Run the kernel.

    Args:
        h: (N, H) hidden states of the policy, in bf16.
        w: (V, H) its head.
        h_ref: (N, H') hidden states of the reference.
        w_ref: (V, H') its head.
        states: (9, tiles of the vocabulary, N) float32, which is written.
        shape: the columns of a tile, and the ring.
        group: rows of tiles that are computed together, so that their operands stay in the cache.
    """
    shared = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    describe = lambda x, rows: TensorDescriptor.from_tensor(x, [rows, DEPTH], shared)
    heads = lambda x: (describe(x, shape.n1), describe(x, shape.n2 or shape.n1))
    given = (describe(h, ROWS), *heads(w), describe(h_ref, ROWS), *heads(w_ref), states)
    sizes = (len(h), len(w), h.shape[1], h_ref.shape[1], group)
    constants = (ROWS, shape.n1, shape.n2, DEPTH, shape.stages, shape.lag, PART, CONSUMER, PRODUCER)
    return _forward[(PROGRAMS,)](*given, *sizes, *constants, num_warps=4)
