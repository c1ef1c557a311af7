"""Compare the Triton kernels and half-precision products with float64, if there is a CUDA device."""

from dataclasses import replace

import pytest
import torch
from kernels.cases import agree, budget, check_gradient_of, compare, confident, make
from tolerances import BFLOAT16, KEPT, SINGLE

from klgrad.kernels import from_logits, fused_statistics, hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
OUTPUTS = ("reverse_kl", "forward_kl", "entropy", "logp")
MODES = {
    "fast": lambda case: {"mode": "fast"},
    "lean": lambda case: {"mode": "lean"},
    "nothing kept": lambda case: {"budget": budget(case, kept=0)},
    "half kept": lambda case: {"budget": budget(case, kept=case.head.vocabulary // 2)},
}


@pytest.fixture(params=[False, True], ids=["every GPU", "Hopper"])
def kernels(request, monkeypatch):
    """The kernels of Triton alone, and those for Hopper wherever they are possible."""
    if request.param and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there is no GPU of compute capability 9.0")
    monkeypatch.setattr(hopper, "USED", request.param)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("doubt", [0.1, 0.01, 2e-3, 1e-4])
def test_confident_tokens_far_from_the_reference(doubt, mode):
    """Policy probability 1 - doubt, a KL of about 11: an error below one percent, however much is kept."""
    case = confident(doubt, tokens=256, vocabulary=20000, size=256, device="cuda")
    assert fused_statistics.backend_for(case.hidden).__name__.endswith("tiles_triton")
    for name in OUTPUTS:
        check_gradient_of(name, case, KEPT, **MODES[mode](case))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("kernels")
def test_confident_and_other_tokens_in_one_batch(mode):
    """Each kind of token by itself, so that the larger gradients do not hide the errors of the smaller ones."""
    sure, other = confident(1e-3, tokens=64, vocabulary=5000, size=64), make((64,), 5000, 64, entries=0)
    for part in (sure, replace(sure, hidden=other.hidden.bfloat16()), replace(sure, ref_hidden=sure.hidden.roll(1, 0))):
        case = part.to(torch.bfloat16, "cuda")
        for name in OUTPUTS:
            check_gradient_of(name, case, KEPT, **MODES[mode](case))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"entries": 0},
        {"bias": True, "ref_bias": True},
        {"policy": {"softcap": 4.0, "temperature": 0.7}},
        {"paired": False},
    ],
    ids=str,
)
def test_values_and_gradients(settings, mode):
    case = make((300,), 9000, 128, **settings).to(torch.bfloat16, "cuda")
    agree(case, SINGLE, BFLOAT16, **MODES[mode](case))


def test_from_logits():
    generator = torch.Generator().manual_seed(0)
    z, z_ref = 2 * torch.randn(2, 50, 9000, generator=generator).cuda()
    targets = torch.randint(9000, (50,), generator=generator).cuda()
    compare(
        from_logits(z, targets, z_ref),
        fused_statistics.statistics_of_logits(z.double(), targets, z_ref.double()),
        SINGLE,
    )
    z_ref[3] = -torch.inf
    assert from_logits(z, targets, z_ref, validate=False).reverse_kl.isnan().nonzero().tolist() == [[3]]
