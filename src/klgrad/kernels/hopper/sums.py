"""The forward pass over two heads: the state of every token and tile of 128 entries, and the targets' logits.

No logit is stored unless it is kept for the backward pass; then the two 16-bit numbers of `Kept` are.
"""

# Triton compiles these functions; they are not run as Python.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from . import formula
from .ring import by_row, columns_of, halves, new_ring, place, produce, product, put, side_by_side

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
    return formula.terms(a, b)


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
        larger, apart = formula.kept_pair(a, b, by_row(mean, x), tiny, limit)
        larger = larger.to(gl.float16)
        apart = apart.to(gl.float16)
    else:
        x0, x1 = halves(x)
        y0, y1 = halves(y)
        larger0, apart0 = _kept(x0, y0, tops, mean, factors, tiny, limit, WIDTH)
        larger1, apart1 = _kept(x1, y1, tops, mean, factors, tiny, limit, WIDTH)
        larger = side_by_side(larger0, larger1)
        apart = side_by_side(apart0, apart1)
    return larger, apart


@gluon.jit
def _pick(x, target, hit, factor, out):
    """Store the logits of the targets that are in this tile."""
    chosen = gl.sum(gl.where(columns_of(x, 0) == target[:, None], x, 0.0), 1)
    gl.store(out, chosen * factor, mask=hit)


@gluon.jit
def _consume(ring, room, outputs, sizes, limits, factors, WHO: gl.constexpr, WIDTH: gl.constexpr, KEEP: gl.constexpr):
    targets, states, picked, picked_stride, larger, apart = outputs
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
        gap = _total(s[3], R)
        out = states + column.to(gl.int64) * tokens + r
        gl.store(out, tops[0], mask=inside)
        gl.store(out + field, mass, mask=inside)
        gl.store(out + 2 * field, _total(s[1], R), mask=inside)
        gl.store(out + 3 * field, tops[1], mask=inside)
        gl.store(out + 4 * field, _total(s[2], R), mask=inside)
        gl.store(out + 5 * field, gap, mask=inside)
        gl.store(out + 6 * field, 0.0 - _total(s[4], R), mask=inside)
        gl.store(out + 7 * field, _total(s[5], R), mask=inside)
        gl.store(out + 8 * field, _total(s[6], R), mask=inside)
        if KEEP:
            u, v = _kept(x, y, tops, gap / mass, factors, tiny, limit, WIDTH)
            put(u, room.index(2 * WHO), larger, (row * 2 + WHO) * M, column * N, 1)
            put(v, room.index(2 * WHO + 1), apart, (row * 2 + WHO) * M, column * N, 1)
    if KEEP:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "vocabulary", "first", "hidden", "ref_hidden", "GROUP", "picked_stride"])
def sums_kernel(
    h,
    w,
    h_ref,
    w_ref,
    larger,
    apart,
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
            larger.dtype, [4, larger.block_type.shape[0], larger.block_type.shape[1]], larger.layout
        )
    M: gl.constexpr = h.block_type.shape[0]
    N: gl.constexpr = w.block_type.shape[0]
    K: gl.constexpr = h.block_type.shape[1]
    sizes = (gl.cdiv(tokens, M), gl.cdiv(vocabulary, N), gl.cdiv(hidden, K), gl.cdiv(ref_hidden, K), GROUP)
    limits = (tokens, vocabulary, first, tiny, limit)
    outputs = (targets, states, picked, picked_stride, larger, apart)
    factors = (factor, ref_factor)
    gl.warp_specialize(
        [
            (_consume, (ring, room, outputs, sizes, limits, factors, 0, WIDTH, KEEP)),
            (_consume, (ring, room, outputs, sizes, limits, factors, 1, WIDTH, KEEP)),
            (produce, ((h, w), (h_ref, w_ref), ring, sizes)),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )
