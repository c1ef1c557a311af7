"""The kernels for Hopper GPUs: when they are used, and both passes by them."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature

import torch
from torch import Tensor

from .. import tiling
from ..head import Transform
from ..tiling import HALVES, CachedLogits, Operands

# What the kernels for Hopper read: some tokens and some entries of both models.


@dataclass(frozen=True, eq=False)
class HopperOperands:
    """Operands of the products: (N, H) hidden states and (entries, H) weights of both models, whose widths may differ.

    `factors` of the logits are scale / temperature. `targets` and `start`, the first entry, count from the start of the
    head.
    """

    hidden: Tensor
    weight: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    factors: tuple[float, float]
    targets: Tensor
    start: int


# Whether the kernels for Hopper do a computation.

USED = True
"""If False, a Hopper GPU uses the kernels of the other GPUs."""
FACTORS = (1e-6, 1e6)
"""Bounds of scale / temperature: beyond them the mark of a missing entry could be infinite."""

Model = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Hidden states, weight and bias."""


def used_for(policy: Model, reference: Model, transforms: tuple[Transform, Transform], entries: int) -> bool:
    """Whether the kernels do this computation; they do all of it or none, and compute no further `entries`.

    The two kinds of products round differently, and the gradient at a confident token is proportional to 1 - p: with
    logits of one kind and log-sum-exps of the other it would be wrong by much more than its rounding.
    """
    if (
        not USED
        or entries
        or not all(t.softcap is None and FACTORS[0] < t.scale / t.temperature < FACTORS[1] for t in transforms)
    ):
        return False
    operands = [x for x in (*policy[:2], *reference[:2]) if x is not None]
    biased = policy[2] is not None or reference[2] is not None
    return len(operands) == 4 and not biased and _readable(operands) and runs_on(operands[0].device)


def _readable(operands: list[Tensor]) -> bool:
    """Whether the copy engine can read all: 16-bit numbers of one type, in rows of multiples of 16 bytes."""
    one_kind = len({(x.dtype, x.device) for x in operands}) == 1 and operands[0].dtype in HALVES
    return one_kind and all(
        x.numel() > 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in operands
    )


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the device has the instructions, and Triton a compiler for them."""
    if device.type != "cuda" or torch.version.hip is not None:  # some AMD GPUs say that they are 9.0 too
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and _importable()


@cache
def _importable() -> bool:
    try:
        import_module(".gluon", __package__)
        language = import_module("triton.experimental.gluon.language")
    except (ImportError, AttributeError):  # no Triton, or one without the names of Gluon that are used
        return False
    # Triton 3.5 has the same names, and other arguments.
    return "functions_and_args" in signature(language.warp_specialize).parameters


# Both passes by the kernels for Hopper.

FIELDS = 9
"""Of a token's state of one tile, in float32: those of `state.State` without the last two, for banned entries."""


def states_of(operands: Operands, picked: Tensor, kept: CachedLogits | None) -> Tensor:
    """Compute a few states of every token, (FIELDS, groups, N), over all entries.

    The logits of the targets are written into `picked`, (2, N), and those for which `kept` has places into it.
    """
    strips = []
    for block in _blocks(operands, kept):
        parts = [_block(operands, rows, block, picked[:, rows], kept) for rows in operands.chunks]
        strips.append(torch.cat(parts, 2))
    return torch.cat(strips, 1)


def _blocks(operands: Operands, kept: CachedLogits | None) -> list[range]:
    """Entries of which all tokens of a chunk have states that fit into the memory of the tiles; all kept, or none."""
    plan = operands.config.plan
    step = max(plan.tile_bytes // (FIELDS * torch.float32.itemsize * plan.rows), 1) * tiling.MARKED
    middle = 0 if kept is None else kept.a_or_minus_b.shape[1]
    cut = lambda start, stop: [range(i, min(i + step, stop)) for i in range(start, stop, step)]
    return cut(0, middle) + cut(middle, len(operands.weight))


def _block(operands: Operands, rows: slice, columns: range, picked: Tensor, kept: CachedLogits | None) -> Tensor:
    from . import gluon as launch

    states = operands.new(FIELDS, -(-len(columns) // tiling.MARKED), rows.stop - rows.start)
    own = kept.cut(rows, columns) if kept else None
    launch.sums(_models(operands, rows, columns), states, picked, own)
    return launch.merge(states, own.slice_stats if own else None)


def gradient(operands: Operands, rows: slice, columns: range, numbers: Tensor, out: Tensor) -> None:
    """Write the gradient of the raw logits of some tokens and entries into `out`; `numbers` as `scaled` has them."""
    from . import gluon as launch

    launch.gradient(_models(operands, rows, columns), numbers[:, rows], out)


def scaled(operands: Operands, numbers: Tensor) -> Tensor:
    """The numbers of `state.gradient_numbers` for raw logits: all weights times the slope of the policy's transform."""
    slope = operands.config.transform.slope(numbers)
    return numbers if slope == 1 else torch.cat([numbers[:2], numbers[2:] * slope])


def _models(operands: Operands, rows: slice, columns: range) -> HopperOperands:
    assert operands.ref_hidden is not None  # `used_for` requires a reference
    assert operands.ref_weight is not None
    part = slice(columns.start, columns.stop)
    transforms = (operands.config.transform, operands.config.ref_transform)
    return HopperOperands(
        operands.hidden[rows],
        operands.weight[part],
        operands.ref_hidden[rows],
        operands.ref_weight[part],
        (transforms[0].scale / transforms[0].temperature, transforms[1].scale / transforms[1].temperature),
        operands.config.targets[rows],
        columns.start,
    )
