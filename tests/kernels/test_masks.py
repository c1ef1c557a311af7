"""Values where the mask is 0 have no effect, and a batch may have no live token."""

from dataclasses import replace

import pytest
import torch
from kernels.cases import compare, make, weighted_sum
from tolerances import EXACT

from klgrad.kernels import from_logits

SHAPE = (4, 5)
LIVE = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


@pytest.fixture
def filled_memory():
    """Fill uninitialised memory with NaN, so that reading it is detected."""
    torch.use_deterministic_algorithms(True)
    assert getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009, pyright does not know it
    yield
    torch.use_deterministic_algorithms(False)


def spoilt(case, mask):
    """Garbage at every masked position."""
    dead = mask == 0
    put = lambda x, value: x.masked_fill(dead[..., None] if x.ndim > dead.ndim else dead, value)
    return replace(
        case,
        hidden=put(case.hidden, torch.nan),
        targets=put(case.targets, -100),
        ref_hidden=put(case.ref_hidden, torch.inf),
        entries=put(case.entries, 10**6),
    ).require_grad()


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32], ids=str)
@pytest.mark.usefixtures("small_tiles", "filled_memory")
def test_masked_rows_have_no_effect(dtype):
    case = make(SHAPE, bias=True)
    masked = spoilt(case, LIVE)
    found = masked.statistics(mask=LIVE.to(dtype), divergence="jensen-shannon")
    case.require_grad()
    zero = lambda x: x * (LIVE[..., None] if x.ndim > LIVE.ndim else LIVE)
    expected = type(found)(*(zero(x) for x in case.statistics(divergence="jensen-shannon")))
    compare(found, expected, EXACT)
    gradients = torch.autograd.grad(weighted_sum(found), masked.leaves)
    for gradient, truth in zip(gradients, torch.autograd.grad(weighted_sum(expected), case.leaves), strict=True):
        EXACT.check(gradient, truth)
    assert (gradients[0][LIVE == 0] == 0).all()


def test_masked_logits_have_no_effect():
    generator = torch.Generator().manual_seed(0)
    z, z_ref = torch.randn(2, *SHAPE, 9, generator=generator, dtype=torch.float64)
    targets = torch.randint(9, SHAPE, generator=generator)
    dead = LIVE == 0
    bad = z.masked_fill(dead[..., None], torch.nan).requires_grad_()
    z.requires_grad_()
    found = from_logits(bad, targets.masked_fill(dead, -100), z_ref.masked_fill(dead[..., None], torch.nan), mask=LIVE)
    expected = type(found)(*(None if x is None else x * LIVE for x in from_logits(z, targets, z_ref)))
    compare(found, expected, EXACT)
    (gradient,), (truth,) = (
        torch.autograd.grad(weighted_sum(found), bad),
        torch.autograd.grad(weighted_sum(expected), z),
    )
    EXACT.check(gradient, truth)


def test_masked_logits_are_not_copied():
    """The graph keeps the caller's own logits, and nothing else of their size."""
    z, z_ref = torch.randn(2, *SHAPE, 300)
    z.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        from_logits(z, torch.zeros(SHAPE, dtype=torch.long), z_ref, mask=LIVE)
    large = [x.data_ptr() for x in saved if x.numel() > 300]
    assert sorted(large) == sorted([z.data_ptr(), z_ref.data_ptr()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("why", ["all masked", "no tokens"])
@pytest.mark.usefixtures("filled_memory")
def test_without_a_live_token_everything_is_zero(why, dtype):
    shape = (2, 3) if why == "all masked" else (2, 0)
    case, mask = make(shape, bias=True, dtype=dtype), torch.zeros(shape)
    case = spoilt(case, mask) if why == "all masked" else case.require_grad()
    for options in ({"mask": mask}, {"mask": mask, "mode": "fast"}) + (({},) if why == "no tokens" else ()):
        found = case.statistics(**options, divergence="jensen-shannon")
        assert all(x.shape[:2] == shape and (x == 0).all() for x in found)
        gradients = torch.autograd.grad(weighted_sum(found), case.leaves)
        assert all((g == 0).all() for g in gradients)


def test_logits_without_a_live_token():
    z = torch.full((2, 5), torch.nan, requires_grad=True)
    found = from_logits(z, torch.tensor([-100, -100]), z.detach(), mask=torch.zeros(2))
    assert (found.reverse_kl == 0).all()
    (gradient,) = torch.autograd.grad(weighted_sum(found), z)
    assert (gradient == 0).all()
