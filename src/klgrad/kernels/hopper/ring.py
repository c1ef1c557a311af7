"""The products of both models' tiles, with the logits left in registers. In Gluon, for Hopper.

A program has three groups of warps. One warp, the producer, loads tiles of the operands into a ring of shared memory.
Two consumers of four warps each have 64 of a tile's 128 rows. A consumer multiplies the reference's tile and then the
policy's tile, and has the logits of both in its registers. While it works on them, the other one multiplies.

A logit has the same bits in every kernel that uses this: the products are added in the same order.
"""

# Triton compiles these functions; they are not run as Python.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
