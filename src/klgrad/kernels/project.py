"""Matrix products that accumulate in float32 (or wider) for every input dtype."""

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
HAS_OUT_DTYPE = all("dtype_out" in op.overloads() for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
"""Whether torch has products of half-precision matrices without rounding to half precision (2.8 and newer)."""


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write hidden @ weight.T into `out`, whose dtype must not be narrower."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.T, out=out)
    elif hidden.dtype in HALVES and hidden.is_cuda and HAS_OUT_DTYPE:
        torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)
    else:
        torch.mm(hidden.to(out.dtype), weight.T.to(out.dtype), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` in the dtype of `total`."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif a.dtype in HALVES and a.is_cuda and HAS_OUT_DTYPE:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b into `out`, rounded once to its dtype."""
    if a.is_cuda or a.dtype not in HALVES:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a.float() @ b.float())
