"""`from_logits` gives the same statistics as the specification."""

import pytest
import torch
from kernels.cases import GRADIENT, compare, weighted_sum
from tolerances import EXACT, SINGLE

from klgrad.kernels import from_logits, fused_statistics


@pytest.mark.slow
def test_gradcheck_from_logits():
    generator = torch.Generator().manual_seed(0)
    z, z_ref = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 6, 3])

    def outputs(z):
        found = from_logits(z, targets, z_ref, temperature=0.7)
        return found.logp, found.entropy, found.reverse_kl, found.forward_kl

    assert torch.autograd.gradcheck(outputs, z.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_from_logits(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    z, z_ref = 2 * torch.randn(2, *shape, 300, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(300, shape, generator=generator)
    z, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    found = from_logits(z.mT.contiguous().mT if len(shape) == 1 else z, targets, z_ref, temperature=1.5)
    expected = fused_statistics.statistics_of_logits(wide / 1.5, targets, z_ref.double() / 1.5)
    compare(found, expected, EXACT if dtype == torch.float64 else SINGLE)
    (gradient,), (truth,) = (
        torch.autograd.grad(weighted_sum(found), z),
        torch.autograd.grad(weighted_sum(expected), wide),
    )
    GRADIENT[dtype].check_vector(gradient, truth)
