"""Compare the Triton kernels and half-precision products with float64, if there is a CUDA device."""

from dataclasses import replace

import pytest
import torch
from kernels.cases import GENERATORS, agree, check_again, check_gradients, compare, confident, keeping, make
from tolerances import BFLOAT16, GPU_SUMS, KEPT, NEAR_KL, SINGLE

from klgrad.core.divergences import REVERSE_KL, Divergence, named
from klgrad.kernels import from_logits, fused_statistics, hopper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
every_kept = pytest.mark.parametrize("kept", ["fast", "lean", 0, 0.5])
GRADIENT = {torch.bfloat16: KEPT, torch.float32: GPU_SUMS}
"""The tolerance of gradients: logits of 16 bits are right to one percent."""
dtypes = pytest.mark.parametrize("dtype", GRADIENT, ids=str)


@pytest.fixture(params=[False, True], ids=["every GPU", "Hopper"])
def kernels(request, monkeypatch):
    """The kernels of Triton alone, and those for Hopper wherever they are possible."""
    if request.param and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there is no GPU of compute capability 9.0")
    monkeypatch.setattr(hopper, "USED", request.param)


@every_kept
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("doubt", [0.1, 0.01, 2e-3, 1e-4])
def test_confident_tokens_far_from_the_reference(doubt, kept):
    """Policy probability 1 - doubt, a KL of about 11: an error below one percent, however much is kept."""
    case = confident(doubt, tokens=256, vocabulary=20000, size=256, device="cuda")
    assert fused_statistics.backend_for(case.hidden).__name__.endswith("tiles_triton")
    check_gradients(case, KEPT, **keeping(case, kept))


@every_kept
@pytest.mark.usefixtures("kernels")
def test_confident_and_other_tokens_in_one_batch(kept):
    """Each kind of token by itself, so that the larger gradients do not hide the errors of the smaller ones."""
    sure, other = confident(1e-3, tokens=64, vocabulary=5000, size=64), make((64,), 5000, 64, entries=0)
    for part in (sure, replace(sure, hidden=other.hidden.bfloat16()), replace(sure, ref_hidden=sure.hidden.roll(1, 0))):
        case = part.to(torch.bfloat16, "cuda")
        check_gradients(case, KEPT, **keeping(case, kept))


@every_kept
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
def test_values_and_gradients(settings, kept):
    case = make((300,), 9000, 128, **settings).to(torch.bfloat16, "cuda")
    agree(case, SINGLE, BFLOAT16, **keeping(case, kept))


LARGE = {"shape": (96,), "vocabulary": 49152, "size": 1024, "entries": 0}


@every_kept
@dtypes
@pytest.mark.parametrize("divergence", GENERATORS, ids=lambda d: d.name)
def test_divergences(divergence, dtype, kept):
    case = make((70,), 9000, 128, bias=True, policy={"softcap": 6.0}).to(dtype, "cuda")
    assert fused_statistics.backend_for(case.hidden).__name__.endswith("tiles_triton")
    agree(case, GPU_SUMS, GRADIENT[dtype], divergence=divergence, **keeping(case, kept))


@every_kept
@dtypes
@pytest.mark.parametrize("divergence", ["jensen-shannon", "chi-square", "total-variation", "hellinger"])
def test_divergences_over_a_large_vocabulary(divergence, dtype, kept):
    case = make(**LARGE).to(dtype, "cuda")
    check_gradients(case, GRADIENT[dtype], "divergence", divergence=divergence, **keeping(case, kept))
    truth = case.to(torch.float64).specification(divergence).divergence
    GPU_SUMS.check(case.statistics(divergence=divergence, **keeping(case, kept)).divergence, truth)


@every_kept
@dtypes
def test_a_second_backward_pass_through_a_divergence(dtype, kept):
    case = make((70,), 9000, 128, entries=0).to(dtype, "cuda").require_grad()
    found = case.statistics(divergence="jensen-shannon", **keeping(case, kept))
    check_again(found.divergence.sum(), case, GRADIENT[dtype])


@pytest.mark.parametrize("divergence", ["jensen-shannon", "hellinger", "chi-square", "reverse-kl", "forward-kl"])
def test_a_divergence_near_the_reference(divergence):
    """In float32, a value of about 1e-8 and less."""
    case = make((8,), 3000, 64, entries=0).to(torch.float32, "cuda")
    case = replace(case, ref_hidden=case.hidden + 1e-4 * torch.randn_like(case.hidden), ref_head=case.head)
    truth = case.to(torch.float64).specification().reverse_kl * named(divergence).scale
    NEAR_KL.check(case.statistics(divergence=divergence).divergence, truth)


def test_a_divergence_needs_no_logits_of_all_tokens():
    """Peak memory beyond inputs and gradients, in half of what the float32 logits of one model would take."""
    case = make((8192,), 49152, 64, entries=0).to(torch.bfloat16, "cuda").require_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.statistics(divergence="jensen-shannon", budget=700 << 20).divergence.sum().backward()
    gradients = sum(x.numel() * x.element_size() for x in case.leaves)
    assert torch.cuda.max_memory_allocated() - before - 3 * gradients < 8192 * 49152 * 2


@dtypes
def test_a_divergence_of_ones_own_runs_by_torch(dtype):
    own = Divergence("twice", lambda x: 2 * x, lambda x: 2 * REVERSE_KL.excess(x), "2 l", 2.0)
    case = make((70,), 9000, 128, entries=0).to(dtype, "cuda")
    agree(case, GPU_SUMS, GRADIENT[dtype], divergence=own)


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
