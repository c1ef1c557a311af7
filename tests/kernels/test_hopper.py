"""The kernels for Hopper: their formulas against torch, what is done around them, and when they are used.

The formulas run on a CPU, with torch's products in place of the kernels'. `test_hopper_compiled.py` compiles the
kernels, and `test_hopper_gpu.py` and `test_gpu.py` run them.
"""

import importlib
import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kernels.cases import agree, check_gradients, confident, gradient_of_pair, keeping, make
from tolerances import BFLOAT16, KEPT, SINGLE

from klgrad.kernels import Head, fused_statistics, hopper as choice, passes, state, tiles_torch, tiling

if not choice._importable():
    pytest.skip("there is no Triton with the parts of Gluon that are used", allow_module_level=True)

from kernels import on_torch

from klgrad.kernels.hopper import gluon
from klgrad.kernels.tiling import LARGEST_KEPT, CachedLogits

NARROW = 8
"""Entries of a slice in these tests."""


@pytest.fixture
def narrow(monkeypatch, small_tiles):
    monkeypatch.setattr(tiling, "MARKED", NARROW)


def pair(apart: float, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    z, noise = 3 * torch.randn(2, 40, 128, generator=generator, dtype=torch.float64)
    return z.to(dtype), (z + apart * noise).to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """The kernels that are called, and the first entry of each; they run on the CPU."""
    made = []
    on_torch.install(monkeypatch, made)
    return made


@pytest.mark.parametrize("apart", [1e-3, 0.05, 0.4, 4.0])
@pytest.mark.usefixtures("calls")
def test_terms_are_those_of_a_state(apart):
    a, b, truth = state.of_logits(*(x.double() for x in pair(apart)))
    mass, energy, ref_mass, gap, ref_gap, reverse, forward = (
        x.double().sum(1) for x in gluon.terms.fn(a.float(), b.float())
    )
    expected = state.State(*truth)
    for found, name in ((mass, "mass"), (energy, "sum_p_logit"), (ref_mass, "ref_mass"), (gap, "sum_p_delta")):
        SINGLE.check(found, getattr(expected, name))
    SINGLE.check(-ref_gap, expected.ref_sum_p_delta)
    # From float32 numbers, d has an error of 1e-6: compare with the same numbers in float64.
    rounded = state.bregman_terms(a.float().double(), b.float().double())
    for found, exact in zip((reverse, forward), rounded, strict=True):
        torch.testing.assert_close(found, exact.sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("apart", [1e-3, 0.4, 4.0])
@pytest.mark.usefixtures("calls")
def test_the_kept_pair_is_that_of_kept(apart):
    a, b, sums = state.of_logits(*pair(apart))
    mean = state.mean_difference(sums)[:, None]
    truth = CachedLogits(*torch.empty(2, *a.shape, dtype=torch.float16))
    truth.store(a, b, mean)
    larger, distance = gluon.kept_pair.fn(a, b, mean, truth.tiny, LARGEST_KEPT)
    assert torch.equal(larger.half(), truth.a_or_minus_b)
    assert torch.equal(distance.half(), truth.delta)


@pytest.mark.usefixtures("calls")
def test_a_maximum_above_zero_by_rounding_is_kept_as_zero():
    """A positive number would be read as that of the reference."""
    a, b = torch.tensor([[1e-6, -3.0]]), torch.tensor([[-2.0, 0.0]])
    larger, _ = gluon.kept_pair.fn(a, b, torch.zeros(1, 1), 6e-5, LARGEST_KEPT)
    assert larger[0, 0] <= 0 < larger[0, 1]


@pytest.mark.parametrize("output", ["logp", "reverse_kl", "forward_kl", "entropy"])
@pytest.mark.usefixtures("calls")
def test_the_gradient_is_that_of_the_weights(output):
    z, z_ref = pair(0.7)
    upstream = {name: torch.zeros(len(z)) for name in state.Upstream._fields} | {output: torch.linspace(-1, 2, 40)}
    hit = torch.arange(128) == torch.arange(40)[:, None]
    numbers, truth = gradient_of_pair(z, z_ref, hit, state.Upstream(**upstream))
    SINGLE.check_vector(gluon.logit_gradient.fn(z, z_ref, hit, numbers[:, :, None]), truth)


every_kept = pytest.mark.parametrize("kept", ["fast", "lean", 0, 24])


@every_kept
@pytest.mark.parametrize("vocabulary", [5, 50, 64])
@pytest.mark.usefixtures("narrow")
def test_values_and_gradients(kept, vocabulary, calls):
    """Over several chunks, blocks and tiles."""
    case = make((12,), vocabulary, 16, 24, entries=0, dtype=torch.bfloat16, policy={"temperature": 0.7, "scale": 1.3})
    agree(case, SINGLE, BFLOAT16, **keeping(case, kept))
    everything_kept = kept in ("fast", "lean") or (vocabulary == 5 and kept == 24)
    names = {name for name, _ in calls}
    assert names == ({"sums"} if everything_kept else {"sums", "gradient"})


@every_kept
@pytest.mark.usefixtures("narrow", "calls")
def test_confident_tokens(kept):
    case = confident(1e-3, tokens=8, vocabulary=104)
    check_gradients(case, KEPT, **keeping(case, kept))


@pytest.mark.parametrize("kept", [24, 50])
@pytest.mark.usefixtures("narrow", "calls")
def test_one_launch_for_all_kept_logits(kept, monkeypatch):
    launches, gradient = [], tiles_torch.gradient
    noted = lambda tile, *rest: (launches.append((len(tile.targets), tile.width)), gradient(tile, *rest))
    backend = SimpleNamespace(gradient=noted, slices=tiles_torch.slices)
    monkeypatch.setattr(fused_statistics, "backend_for", lambda hidden: backend)
    case = make((12,), 50, entries=0, dtype=torch.bfloat16)
    agree(case, SINGLE, BFLOAT16, **keeping(case, 90 if kept == 50 else 36))
    assert launches == [(12, kept)]


@pytest.mark.usefixtures("narrow")
def test_a_second_backward_pass_recomputes_what_was_kept(calls):
    """By the products that the forward pass used."""
    case = make((12,), 50, entries=0, dtype=torch.bfloat16).require_grad()
    total = case.statistics(**keeping(case, 24)).reverse_kl.sum()
    first = torch.autograd.grad(total, case.leaves, retain_graph=True)
    assert ("gradient", 0) not in calls  # its logits were kept
    calls.clear()
    for again, before in zip(torch.autograd.grad(total, case.leaves), first, strict=True):
        KEPT.check_vector(again.double(), before.double())
    assert ("gradient", 0) in calls


@pytest.mark.usefixtures("narrow", "calls")
def test_masks():
    case = make((12,), 50, entries=0, dtype=torch.bfloat16)
    live = torch.arange(12) % 3 != 1
    found = case.statistics(mask=live)
    truth = case.to(torch.float64).specification()
    SINGLE.check(found.reverse_kl[live], truth.reverse_kl[live])
    SINGLE.check(found.logp[live], truth.logp[live])
    assert (found.reverse_kl[~live] == 0).all()


def strided(case):
    """Hidden states in every second column."""
    wide = torch.zeros(*case.hidden.shape[:-1], 2 * case.hidden.shape[-1], dtype=case.hidden.dtype)
    wide[..., ::2] = case.hidden
    return replace(case, hidden=wide[..., ::2])


def odd_address(case):
    """A head that begins 2 bytes after a multiple of 16."""
    flat = torch.zeros(case.head.weight.numel() + 1, dtype=case.hidden.dtype)
    flat[1:] = case.head.weight.flatten()
    return replace(case, head=Head(flat[1:].view(case.head.weight.shape)))


def other_dtype(case):
    return replace(case, ref_hidden=case.ref_hidden.half(), ref_head=case.to(torch.float16).ref_head)


UNSUITED = {
    "bias": {"bias": True},
    "reference's bias": {"ref_bias": True},
    "soft-cap": {"policy": {"softcap": 4.0}},
    "reference's soft-cap": {"ref": {"softcap": 4.0}},
    "further entries": {"entries": 3},
    "no reference": {"paired": False},
    "float32": {"dtype": torch.float32},
    "hidden size 20": {"size": 20},
    "reference's hidden size 20": {"ref_size": 20},
    "no token": {"shape": (0,)},
}
CHANGED = {"strided": strided, "address": odd_address, "reference of another dtype": other_dtype}


@pytest.mark.parametrize("name", [*UNSUITED, *CHANGED])
def test_what_the_kernels_do_not_do_falls_back(name, calls):
    case = make(**{"shape": (6,), "entries": 0, "dtype": torch.bfloat16} | UNSUITED.get(name, {}))
    CHANGED.get(name, lambda same: same)(case).require_grad().statistics().logp.sum().backward()
    assert not calls


@pytest.mark.parametrize(
    ("device", "capability", "hip", "expected"),
    [
        ("cuda:0", (9, 0), None, True),
        ("cuda:0", (8, 0), None, False),
        ("cuda:0", (10, 0), None, False),
        ("cuda:0", (9, 0), "6.4", False),
        ("cpu", (9, 0), None, False),
    ],
)
def test_only_on_nvidias_compute_capability_9_0(device, capability, hip, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert choice.runs_on.__wrapped__(torch.device(device)) is expected


def test_a_triton_with_other_arguments_is_not_used(monkeypatch):
    """As Triton 3.5."""
    language = importlib.import_module("triton.experimental.gluon.language")
    monkeypatch.setattr(language, "warp_specialize", lambda default_args, default_partition, worker_args: None)
    assert not choice._importable.__wrapped__()


def test_a_plan_without_tiles_of_logits_keeps_more_within_the_same_budget():
    plans = [tiling.make_plan(8192, 131072, torch.bfloat16, paired=True, hopper=hopper) for hopper in (False, True)]
    assert plans[1].kept > plans[0].kept
    for each in plans:
        assert each.tile_bytes + each.kept_bytes <= tiling.LEAN_BUDGET
    numbers, marks = 2 * 2 * plans[1].kept, 3 * 4 * plans[1].kept // tiling.MARKED
    assert plans[1].kept_bytes == 8192 * (numbers + marks)


@pytest.mark.usefixtures("calls")
def test_what_is_kept_has_the_size_of_the_plan(monkeypatch):
    """The numbers of a token are side by side."""
    rooms, room = [], passes._room
    monkeypatch.setattr(passes, "_room", lambda given: rooms.append((room(given), given.config.plan)) or rooms[-1][0])
    make((12,), 2048, entries=0, dtype=torch.bfloat16).statistics(mode="fast")
    [(kept, made)] = rooms
    assert kept.slice_stats.shape == (3, 12, 16)
    assert kept.slice_stats.is_contiguous()
    assert made.kept_bytes == sum(x.nbytes for x in (kept.a_or_minus_b, kept.delta, kept.slice_stats))
