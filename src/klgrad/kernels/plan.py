"""Plans how the (tokens x vocabulary) logits are cut into tiles, so that memory stays within a budget."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..errors import KernelInputError
from .tile import MARKED, kept_dtype

Mode = Literal["lean", "fast"]
MODES = get_args(Mode)
LEAN_BUDGET = 2 << 30
ROWS = 8192
"""Tokens of a chunk; one matrix product sums the gradient of the head over a chunk."""
STRIP = 4096
"""Tokens of a tile of logits."""
WIDTH = 16384
"""Largest width of a tile: wider tiles are not faster, and leave less memory for kept logits."""
GRANULE = 1024
"""Tile widths are multiples of this."""


@dataclass(frozen=True)
class Plan:
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
) -> Plan:
    """Choose tiles that fit into the budget.

    The remaining budget is used to keep logits; the other logits are recomputed in the backward pass.

    Args:
        tokens: number of live tokens.
        vocabulary: number of entries of this rank's head.
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
        _check_room(columns, per_column, limit)
    per_kept = models * kept_dtype(dtype).itemsize * tokens
    kept = vocabulary
    # A slice's marks are three float32 numbers of a token.
    marks = 3 * torch.float32.itemsize * tokens * (GRANULE // MARKED) if hopper else 0
    if limit is not None:
        kept = min(vocabulary, (limit - columns * per_column) // (GRANULE * per_kept + marks) * GRANULE)
    kept_bytes = kept * per_kept + -(-kept // GRANULE) * marks
    return Plan(rows, strip, columns, kept, columns * per_column, kept_bytes)


def _check_room(columns: int, per_column: int, limit: int) -> None:
    if columns < GRANULE:
        size = lambda count: f"{count:,} bytes ({count / 2**20:.3g} MiB)"
        raise KernelInputError(
            f"a budget of at least {size(per_column * GRANULE)}", size(limit), "raise the budget, or pass fewer tokens"
        )
