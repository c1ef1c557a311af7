"""Whether torch has the products is found from torch itself, not from its version."""

import torch

from klgrad.kernels import tiling


def test_products_with_a_wider_result_are_found_where_torch_has_them():
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert ((major, minor) >= (2, 8)) == tiling.HAS_OUT_DTYPE
