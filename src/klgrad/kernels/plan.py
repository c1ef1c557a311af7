"""How the (tokens x vocabulary) logits are cut into tiles, so that memory stays within a budget."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..errors import KernelInputError
from .tile import kept_dtype

Mode = Literal["lean", "fast"]
MODES = get_args(Mode)
LEAN_BUDGET = 2 << 30
ROWS = 8192
"""Tokens to a chunk, over which gradients to the head are summed inside one matrix product."""
STRIP = 4096
"""Tokens to a tile of logits."""
WIDTH = 16384
"""The widest tile: wider ones do not run faster, and leave less to keep."""
GRANULE = 1024
"""Tile widths are multiples of this."""


@dataclass(frozen=True)
class Plan:
    """Tiles of `strip` tokens x `columns` entries; the first `kept` entries of every token stay until backward.

    `tile_bytes` and `kept_bytes` are what forward and backward take beside their inputs, outputs and gradients.
    """

    rows: int
    strip: int
    columns: int
    kept: int
    tile_bytes: int
    kept_bytes: int

    def chunks(self, tokens: int) -> list[slice]:
        """The tokens, chunk by chunk."""
        return _cut(0, tokens, self.rows)

    def strips(self, start: int, stop: int) -> list[slice]:
        """Some tokens, strip by strip."""
        return _cut(start, stop, self.strip)

    def tiles(self, vocabulary: int) -> list[range]:
        """The vocabulary, tile by tile; none is kept in part."""
        parts = _cut(0, self.kept, self.columns) + _cut(self.kept, vocabulary, self.columns)
        return [range(part.start, part.stop) for part in parts]


def _cut(start: int, stop: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, stop)) for i in range(start, stop, step)]


def make_plan(
    tokens: int, vocabulary: int, dtype: torch.dtype, *, paired: bool, mode: Mode = "lean", budget: int | None = None
) -> Plan:
    """Tiles that fit the budget, and as many logits kept as it leaves room for; the rest is recomputed in backward.

    Args:
        tokens: live ones.
        vocabulary: of this rank's head.
        dtype: of the hidden states.
        paired: whether there is a reference.
        mode: what the budget is by default: `lean` 2 GiB, `fast` no limit.
        budget: bytes for tiles and kept logits together.
    """
    if mode not in MODES:
        raise KernelInputError('`mode` "lean" or "fast"', repr(mode), "lean has a budget of 2 GiB, fast has no limit")
    models = 2 if paired else 1
    accumulate = torch.float64.itemsize if dtype == torch.float64 else torch.float32.itemsize
    rows, strip = min(tokens, ROWS), min(tokens, STRIP)
    per_column = models * accumulate * strip + dtype.itemsize * rows  # logits, and the gradient to the policy's
    limit = LEAN_BUDGET if budget is None and mode == "lean" else budget
    columns = min(-(-vocabulary // GRANULE) * GRANULE, WIDTH)
    if limit is not None:
        columns = min(columns, limit // per_column // GRANULE * GRANULE)
        _check_room(columns, per_column, limit)
    per_kept = models * kept_dtype(dtype).itemsize * tokens
    kept = vocabulary
    if limit is not None:
        kept = min(vocabulary, (limit - columns * per_column) // per_kept // GRANULE * GRANULE)
    return Plan(rows, strip, columns, kept, columns * per_column, kept * per_kept)


def _check_room(columns: int, per_column: int, limit: int) -> None:
    if columns < GRANULE:
        size = lambda count: f"{count:,} bytes ({count / 2**20:.3g} MiB)"
        raise KernelInputError(
            f"a budget of at least {size(per_column * GRANULE)}", size(limit), "raise it, or pass fewer tokens"
        )
