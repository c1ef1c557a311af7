"""How the logits are cut into tiles: a tile, the plan of memory and the operands."""

from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from ..core.divergences import Divergence
from ..errors import KernelInputError
from .head import Transform

# One tile of the logits: some of the tokens times some of the vocabulary entries.


@dataclass(frozen=True, eq=False)
class Tile:
    """Raw logits of both models, before bias and transform, with the tokens' targets.

    Attributes:
        start: the first vocabulary entry of the tile.
        width: number of vocabulary entries.
        targets: (N,) sampled tokens.
        raw: (N, width) logits of the policy in the accumulation dtype, or None if the tile was kept.
        ref_raw: (N, width) logits of the reference, or None if the tile was kept or without a reference.
        bias: (V,) bias of the policy's head, or None.
        ref_bias: (V,) bias of the reference's head, or None.
        transform: of the policy's logits.
        ref_transform: of the reference's logits.
        projected: whether the raw logits are a matrix product; logits that the caller passed may be -inf.
        extra: (N, width) added to the gradient of the logits, for weights on other entries' log-probs.
        places: (N,) the row of each token in `raw`, in `ref_raw` and in the gradient; None if that is its own number.
        divergence: whose sums, or gradient, are wanted beside the rest.
    """

    start: int
    width: int
    targets: Tensor
    raw: Tensor | None
    ref_raw: Tensor | None
    bias: Tensor | None
    ref_bias: Tensor | None
    transform: Transform
    ref_transform: Transform
    projected: bool = True
    extra: Tensor | None = None
    places: Tensor | None = None
    divergence: Divergence | None = None

    @property
    def finite(self) -> bool:
        """Whether all logits are known to be finite: a matrix product is, unless an input is not."""
        return self.projected and self.bias is None and self.ref_bias is None

    def locate(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of vocabulary entries within the tile, clamped to its width, and whether they are in it."""
        local = entries - self.start
        return local.clamp(0, self.width - 1), (local >= 0) & (local < self.width)


LARGEST_KEPT = 60000.0
"""Kept values are clamped to this, so that float16 stays finite: such an entry has no probability."""
MARKED = 128
"""Entries of a slice, where kept logits have statistics of their own slices."""


@dataclass(frozen=True, eq=False)
class CachedLogits:
    """The logits that are kept until the backward pass, in 16 bits for half-precision inputs.

    With a = z - max z and b = z_ref - max z_ref over a slice and d = a - b, an entry is kept as two numbers. Rounding
    changes each of them by at most 2^-11 of its size, so they are chosen to be small where the gradient is large:

    - where d >= 0 (the entry is relatively more likely under the policy): a, and d minus its mean under the policy over
      the slice. The gradient of the reverse KL is p times the distance of d from its mean, so its relative error is
      2^-11. If d itself were kept, the error would be p·|d|·2^-11. For a confident token this is more than the
      gradient, because d is then equal to its mean up to a factor 1 - p.
    - where d < 0: -b, and d. Here |b| + |d| = |a|, so p is as accurate as from a, and q is more accurate.

    The sign of the first number distinguishes the two cases: a <= 0, and -b > 0.

    Attributes:
        a_or_minus_b: (N, columns) a or -b, from the larger one of a and b. The backward pass overwrites it with the
            gradient.
        delta: (N, columns) d or d minus its mean; None without a reference, where `a_or_minus_b` is always a.
        slice_stats: (3, N, slices) max z, max z_ref and the mean of d over slices of `MARKED` entries; None if the
            slices are those of the backend's states. A token's are side by side: a program reads those of one.
    """

    a_or_minus_b: Tensor
    delta: Tensor | None
    slice_stats: Tensor | None = None

    def store(self, a: Tensor, b: Tensor | None, mean: Tensor | None) -> None:
        """Round and store; `mean` is the (N, 1) mean of d over the slice."""
        if self.delta is None or b is None or mean is None:
            self.a_or_minus_b.copy_(a.clamp(min=-LARGEST_KEPT))
            return
        d = a - b
        likelier = d >= 0
        self.a_or_minus_b.copy_(torch.where(likelier, a, (-b).clamp(min=self.tiny)).clamp(-LARGEST_KEPT, LARGEST_KEPT))
        self.delta.copy_(torch.where(likelier, d - mean, d).clamp(-LARGEST_KEPT, LARGEST_KEPT))

    def load(self, dtype: torch.dtype, mean: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a and d, in a wider dtype."""
        a_or_minus_b = self.a_or_minus_b.to(dtype)
        if self.delta is None or mean is None:
            return a_or_minus_b, None
        likelier = a_or_minus_b <= 0
        d = self.delta.to(dtype) + torch.where(likelier, mean, 0.0)
        return torch.where(likelier, a_or_minus_b, d - a_or_minus_b), d

    @property
    def tiny(self) -> float:
        """The smallest value of -b, so that rounding does not change its sign."""
        return torch.finfo(self.a_or_minus_b.dtype).tiny

    def cut(self, rows: slice, columns: range) -> "CachedLogits | None":
        """The part of a tile, or None if the tile is not kept."""
        if columns.start >= self.a_or_minus_b.shape[1]:
            return None
        part = (rows, slice(columns.start, columns.stop))
        slices = slice(columns.start // MARKED, -(-columns.stop // MARKED))
        slice_stats = None if self.slice_stats is None else self.slice_stats[:, rows, slices]
        return CachedLogits(self.a_or_minus_b[part], None if self.delta is None else self.delta[part], slice_stats)


def kept_dtype(inputs: torch.dtype) -> torch.dtype:
    """Float16 for half-precision inputs, else the dtype of the inputs."""
    return torch.float16 if inputs in (torch.bfloat16, torch.float16) else inputs


# Plans how the (tokens x vocabulary) logits are cut into tiles, so that memory stays within a budget.

Mode = Literal["lean", "fast"]
MODES = get_args(Mode)
LEAN_BUDGET = 2 << 30
ROWS = 8192
"""Tokens of a chunk; one matrix product sums the gradient of the head over a chunk."""
STRIP = 4096
"""Tokens of a tile of logits."""
CPU_STRIP = 128
"""Tokens of a tile on a CPU, where each operation on a longer one gets new pages from the system: 2.5 times slower."""
WIDTH = 16384
"""Largest width of a tile: wider tiles are not faster, and leave less memory for kept logits."""
GRANULE = 1024
"""Tile widths are multiples of this."""


@dataclass(frozen=True)
class TilePlan:
    """Sizes of the tiles, and of the memory that they need.

    Attributes:
        rows: tokens of a chunk.
        strip: tokens of a tile.
        columns: vocabulary entries of a tile.
        kept: the logits of this many first entries of every token are kept until the backward pass.
        tile_bytes: memory for tiles, in addition to inputs, outputs and gradients.
        kept_bytes: memory for kept logits.

    Example:
        >>> import torch
        >>> from klgrad.kernels import make_plan
        >>> plan = make_plan(100, 4096, torch.bfloat16, paired=True)
        >>> len(plan.tiles(4096)), plan.kept
        (1, 4096)
    """

    rows: int
    strip: int
    columns: int
    kept: int
    tile_bytes: int
    kept_bytes: int

    def chunks(self, tokens: int) -> list[slice]:
        """The chunks of the tokens."""
        return _cut(0, tokens, self.rows)

    def strips(self, start: int, stop: int) -> list[slice]:
        """The strips of the tokens from `start` to `stop`."""
        return _cut(start, stop, self.strip)

    def tiles(self, vocabulary: int) -> list[range]:
        """The tiles of the vocabulary; each is either kept completely or not at all."""
        parts = _cut(0, self.kept, self.columns) + _cut(self.kept, vocabulary, self.columns)
        return [range(part.start, part.stop) for part in parts]


def _cut(start: int, stop: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, stop)) for i in range(start, stop, step)]


def make_plan(
    tokens: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    paired: bool,
    mode: Mode = "lean",
    budget: int | None = None,
    hopper: bool = False,
) -> TilePlan:
    """Choose tiles that fit into the budget.

    The remaining budget is used to keep logits; the other logits are recomputed in the backward pass.

    Args:
        tokens: number of live tokens.
        vocabulary: number of entries of the head.
        dtype: of the hidden states.
        paired: whether there is a reference.
        mode: the default of the budget: `lean` is 2 GiB, `fast` is no limit.
        budget: bytes for tiles and kept logits together.
        hopper: whether the kernels for Hopper compute the logits, so that tiles hold the gradient alone.

    Returns:
        The plan.

    Example:
        >>> import torch
        >>> from klgrad.kernels import make_plan
        >>> plan = make_plan(8192, 131072, torch.bfloat16, paired=True)
        >>> plan.tile_bytes + plan.kept_bytes <= 2 << 30
        True
        >>> make_plan(8192, 131072, torch.bfloat16, paired=True, mode="fast").kept  # all of them
        131072
    """
    if mode not in MODES:
        raise KernelInputError('`mode` "lean" or "fast"', repr(mode), "lean has a budget of 2 GiB, fast has no limit")
    models = 2 if paired else 1
    accumulate = torch.float64.itemsize if dtype == torch.float64 else torch.float32.itemsize
    rows, strip = min(tokens, ROWS), min(tokens, STRIP)
    logits = 0 if hopper else models * accumulate * strip
    per_column = logits + dtype.itemsize * rows  # with the gradient of the policy's logits
    limit = LEAN_BUDGET if budget is None and mode == "lean" else budget
    columns = min(-(-vocabulary // GRANULE) * GRANULE, WIDTH)
    if limit is not None:
        columns = min(columns, limit // per_column // GRANULE * GRANULE)
        if columns < GRANULE:
            size = lambda count: f"{count:,} bytes ({count / 2**20:.3g} MiB)"
            least = f"a budget of at least {size(per_column * GRANULE)}"
            raise KernelInputError(least, size(limit), "raise the budget, or pass fewer tokens")
    per_kept = models * kept_dtype(dtype).itemsize * tokens
    kept = vocabulary
    # The `slice_stats` of a slice are three float32 numbers of a token.
    stats_bytes = 3 * torch.float32.itemsize * tokens * (GRANULE // MARKED) if hopper else 0
    if limit is not None:
        kept = min(vocabulary, (limit - columns * per_column) // (GRANULE * per_kept + stats_bytes) * GRANULE)
    kept_bytes = kept * per_kept + -(-kept // GRANULE) * stats_bytes
    return TilePlan(rows, strip, columns, kept, columns * per_column, kept_bytes)


# Matrix products that accumulate in float32 (or wider) for every input dtype.

HALVES = (torch.bfloat16, torch.float16)
HAS_OUT_DTYPE = all("dtype_out" in op.overloads() for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
"""Whether torch has products of half-precision matrices without rounding to half precision (2.8 and newer)."""


def matmul_t(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write hidden @ weight.T into `out`, whose dtype must not be narrower."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.T, out=out)
    elif hidden.dtype in HALVES and hidden.is_cuda and HAS_OUT_DTYPE:
        torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)
    else:
        torch.mm(hidden.to(out.dtype), weight.T.to(out.dtype), out=out)


def addmm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` in the dtype of `total`."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif a.dtype in HALVES and a.is_cuda and HAS_OUT_DTYPE:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)


def matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b into `out`, rounded once to its dtype."""
    if a.is_cuda or a.dtype not in HALVES:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a.float() @ b.float())


# The hidden states and heads of both models, and the settings of a pass over their tiles.


@dataclass(frozen=True, eq=False)
class PassConfig:
    """The inputs that are not differentiated: targets and settings.

    Attributes:
        targets: (N,) sampled tokens.
        others: (N, k) further vocabulary entries whose log-probs are computed.
        plan: the sizes of tiles.
        transform: of the policy's logits.
        ref_transform: of the reference's logits.
        backend: the module that computes tiles, `tiles_torch` or `tiles_triton`.
        hopper: whether the kernels for Hopper compute the logits, and not the backend.
        divergence: computed by a second pass over the tiles, or None.
    """

    targets: Tensor
    others: Tensor
    plan: TilePlan
    transform: Transform
    ref_transform: Transform
    backend: ModuleType
    hopper: bool = False
    divergence: Divergence | None = None


@dataclass(frozen=True, eq=False)
class Operands:
    """Tensors of the policy, of the reference (or None), and the settings."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ref_hidden: Tensor | None
    ref_weight: Tensor | None
    ref_bias: Tensor | None
    config: PassConfig

    @property
    def paired(self) -> bool:
        return self.ref_hidden is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which sums are accumulated."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def tiles(self) -> list[range]:
        return self.config.plan.tiles(len(self.weight))

    @property
    def chunks(self) -> list[slice]:
        return self.config.plan.chunks(len(self.hidden))

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.hidden.device)

    def buffers(self) -> list[Tensor]:
        """Buffers for the raw logits of one tile, one for each model."""
        plan = self.config.plan
        return [self.new(min(plan.strip, len(self.hidden)), plan.columns) for _ in range(2 if self.paired else 1)]

    def projected(self, rows: slice, columns: range, buffers: list[Tensor], policy: bool = True) -> Tile:
        """The tile, with raw logits computed into the buffers; without `policy` the policy's are there already."""
        raw = [buffer[: rows.stop - rows.start, : len(columns)] for buffer in buffers]
        part = slice(columns.start, columns.stop)
        if policy:
            matmul_t(self.hidden[rows], self.weight[part], raw[0])
        if self.ref_hidden is not None and self.ref_weight is not None:
            matmul_t(self.ref_hidden[rows], self.ref_weight[part], raw[1])
        return self.tile(rows, columns, *raw)

    def tile(self, rows: slice, columns: range, raw: Tensor | None = None, ref_raw: Tensor | None = None) -> Tile:
        """A tile with given logits, or without logits if they were kept."""
        return Tile(
            columns.start,
            len(columns),
            self.config.targets[rows],
            raw,
            ref_raw,
            self.bias,
            self.ref_bias,
            self.config.transform,
            self.config.ref_transform,
            divergence=self.config.divergence,
        )
