"""Start the kernels for Hopper."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..tile import LARGEST_KEPT, Kept
from . import gradient as backward, merge as merging, sums as forward
from .models import Models
from .ring import COLUMNS, CONSUMER, DEPTH, PART, PRODUCER, ROWS

SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
GROUP = 16
"""Rows of tiles that are computed together."""


def sums(models: Models, states: Tensor, picked: Tensor, kept: Kept | None) -> None:
    """Compute the states of tiles of 128 entries, and the targets' logits, of all tokens of two models.

    Args:
        models: both models' operands.
        states: (9, tiles, N) float32, which is written.
        picked: (2, N) float32; the logits of the targets that are among the entries are written.
        kept: (N, entries) where the logits are kept, or None.
    """
    given = (*_operands(models), *((_out(kept.larger), _out(kept.apart)) if kept else (None, None)))
    numbers = (*_sizes(models), *models.factors, kept.tiny if kept else 0.0, LARGEST_KEPT)
    stages = forward.KEEPING_STAGES if kept else forward.STAGES
    _start(
        forward.sums_kernel,
        models,
        *(*given, models.targets, states, picked, picked.stride(0), *numbers),
        *(stages, PART, kept is not None, CONSUMER, PRODUCER),
    )


def gradient(models: Models, numbers: Tensor, out: Tensor) -> None:
    """Compute the logits again, and write the gradient of the policy's raw logits.

    Args:
        models: both models' operands.
        numbers: (7, N) of `weights.per_token`, float32, times the slope of the policy's transform from the third on.
        out: (N, entries), which is written.
    """
    _start(
        backward.gradient_kernel,
        models,
        *(*_operands(models), _out(out), models.targets, numbers, numbers.stride(0)),
        *(*_sizes(models), *models.factors),
        *(backward.STAGES, PART, CONSUMER, PRODUCER),
    )


def merge(states: Tensor, marks: Tensor | None) -> Tensor:
    """Merge (9, tiles, N) states into a few, (FIELDS, groups, N), and write their marks, (3, N, tiles)."""
    with torch.cuda.device(states.device):
        return merging.merge(states, marks)


def _start(kernel: Any, models: Models, *given: Any) -> None:
    """One program for each multiprocessor, on the device of the tensors: Triton starts kernels on the current one."""
    device = models.hidden.device
    with torch.cuda.device(device):
        kernel[(_multiprocessors(device),)](*given, num_warps=4)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _operands(models: Models) -> list[Any]:
    pairs = ((models.hidden, ROWS), (models.weight, COLUMNS), (models.ref_hidden, ROWS), (models.ref_weight, COLUMNS))
    return [TensorDescriptor.from_tensor(x, [rows, DEPTH], SHARED) for x, rows in pairs]


def _out(x: Tensor | None) -> Any:
    """What one consumer stores. Stores end at a multiple of 16 bytes, so each row needs memory up to there."""
    assert x is not None
    return TensorDescriptor.from_tensor(x, [ROWS // 2, COLUMNS], SHARED)


def _sizes(models: Models) -> tuple[int, ...]:
    widths = (models.hidden.shape[1], models.ref_hidden.shape[1])
    return (len(models.hidden), len(models.weight), models.start, *widths, GROUP)
