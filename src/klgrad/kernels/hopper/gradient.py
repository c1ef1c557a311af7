"""The backward pass over two heads: logits are computed again, and the gradient of the policy's logits is stored."""

# Triton compiles these functions; they are not run as Python.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from . import formula
from .ring import by_row, columns_of, halves, new_ring, place, produce, product, put, side_by_side

STAGES = 6
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
        out = formula.logit_gradient(x * factors[0], y * factors[1], hit, rows).to(DTYPE)
    else:
        x0, x1 = halves(x)
        y0, y1 = halves(y)
        out0 = _gradient(x0, y0, first, target, numbers, factors, DTYPE, WIDTH)
        out1 = _gradient(x1, y1, first + x.shape[1] // 2, target, numbers, factors, DTYPE, WIDTH)
        out = side_by_side(out0, out1)
    return out


@gluon.jit
def _consume(ring, room, inputs, out, sizes, tokens, factors, WHO: gl.constexpr, WIDTH: gl.constexpr):
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
            (_consume, (ring, room, inputs, out, sizes, tokens, factors, 0, WIDTH)),
            (_consume, (ring, room, inputs, out, sizes, tokens, factors, 1, WIDTH)),
            (produce, ((h, w), (h_ref, w_ref), ring, sizes)),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )
