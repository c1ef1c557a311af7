"""Whether the kernels for Hopper do a computation."""

from functools import cache
from importlib import import_module
from inspect import signature

import torch
from torch import Tensor

from ..head import Transform
from ..project import HALVES

USED = True
"""If False, a Hopper GPU uses the kernels of the other GPUs."""
FACTORS = (1e-6, 1e6)
"""Bounds of scale / temperature: beyond them the mark of a missing entry could be infinite."""

Model = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Hidden states, weight and bias."""


def used_for(policy: Model, reference: Model, transforms: tuple[Transform, Transform], entries: int) -> bool:
    """Whether the kernels do this computation; they do all of it or none.

    The two kinds of products round differently, and the gradient at a confident token is proportional to 1 - p: with
    logits of one kind and log-sum-exps of the other it would be wrong by much more than its rounding.

    Args:
        policy: hidden states, weight and bias of the policy, in one dtype.
        reference: those of the reference, or None.
        transforms: of the logits of policy and reference.
        entries: number of further entries whose log-probs are computed; the kernels compute none.
    """
    if not USED or entries or not all(map(_simple, transforms)):
        return False
    operands = [x for x in (*policy[:2], *reference[:2]) if x is not None]
    biased = policy[2] is not None or reference[2] is not None
    return len(operands) == 4 and not biased and _readable(operands) and runs_on(operands[0].device)


def _simple(transform: Transform) -> bool:
    """Whether the transform is a factor."""
    return transform.softcap is None and FACTORS[0] < transform.scale / transform.temperature < FACTORS[1]


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
        import_module(".launch", __package__)
        language = import_module("triton.experimental.gluon.language")
    except (ImportError, AttributeError):  # no Triton, or one without the names of Gluon that are used
        return False
    # Triton 3.5 has the same names, and other arguments.
    return "functions_and_args" in signature(language.warp_specialize).parameters
