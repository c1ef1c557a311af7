"""Both passes by the kernels for Hopper."""

import torch
from torch import Tensor

from .. import tile
from ..inputs import Inputs
from ..tile import Kept
from .models import Models

FIELDS = 9
"""Of a token's state of one tile, in float32: those of `state.State` without the last two, for banned entries."""


def states_of(inputs: Inputs, picked: Tensor, kept: Kept | None) -> Tensor:
    """Compute a few states of every token, (FIELDS, groups, N), over all entries.

    Args:
        inputs: both models.
        picked: (2, N); the logits of the targets that are among the entries are written.
        kept: where the logits are kept whose places it has, or None.
    """
    found = []
    for block in _blocks(inputs, kept):
        parts = [_block(inputs, rows, block, picked[:, rows], kept) for rows in inputs.chunks]
        found.append(torch.cat(parts, 2))
    return torch.cat(found, 1)


def _blocks(inputs: Inputs, kept: Kept | None) -> list[range]:
    """Entries of which all tokens of a chunk have states that fit into the memory of the tiles; all kept, or none."""
    plan = inputs.job.plan
    step = max(plan.tile_bytes // (FIELDS * torch.float32.itemsize * plan.rows), 1) * tile.MARKED
    middle = 0 if kept is None else kept.larger.shape[1]
    cut = lambda start, stop: [range(i, min(i + step, stop)) for i in range(start, stop, step)]
    return cut(0, middle) + cut(middle, len(inputs.weight))


def _block(inputs: Inputs, rows: slice, columns: range, picked: Tensor, kept: Kept | None) -> Tensor:
    from . import launch

    states = inputs.new(FIELDS, -(-len(columns) // tile.MARKED), rows.stop - rows.start)
    own = kept.cut(rows, columns) if kept else None
    launch.sums(_models(inputs, rows, columns), states, picked, own)
    return launch.merge(states, own.marks if own else None)


def gradient(inputs: Inputs, rows: slice, columns: range, numbers: Tensor, out: Tensor) -> None:
    """Write the gradient of the raw logits of some tokens and entries into `out`; `numbers` as `scaled` has them."""
    from . import launch

    launch.gradient(_models(inputs, rows, columns), numbers[:, rows], out)


def scaled(inputs: Inputs, numbers: Tensor) -> Tensor:
    """The numbers of `weights.per_token` for raw logits: all weights times the slope of the policy's transform."""
    slope = inputs.job.transform.slope(numbers)
    return numbers if slope == 1 else torch.cat([numbers[:2], numbers[2:] * slope])


def _models(inputs: Inputs, rows: slice, columns: range) -> Models:
    assert inputs.ref_hidden is not None  # `used_for` requires a reference
    assert inputs.ref_weight is not None
    part = slice(columns.start, columns.stop)
    transforms = (inputs.job.transform, inputs.job.ref_transform)
    return Models(
        inputs.hidden[rows],
        inputs.weight[part],
        inputs.ref_hidden[rows],
        inputs.ref_weight[part],
        (transforms[0].scale / transforms[0].temperature, transforms[1].scale / transforms[1].temperature),
        inputs.job.targets[rows],
        columns.start,
    )
