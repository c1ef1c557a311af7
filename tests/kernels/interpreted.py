"""The Triton kernels, run by Triton's interpreter, against the same tiles in torch.

Not collected by itself: `test_tiles_triton.py` runs it in a process of its own, where TRITON_INTERPRET is set in time.
"""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from kernels.cases import GENERATORS, agree, check_gradients, confident, keeping, make
from kernels.test_fused_statistics import TABLE, check, two
from tolerances import BFLOAT16, KEPT, SINGLE

from klgrad.core.divergences import REVERSE_KL, Divergence, jensen_shannon
from klgrad.kernels import from_logits, fused_statistics, hopper, state, tiles_torch, tiles_triton, tiling as tiles
from klgrad.kernels.head import Transform
from klgrad.kernels.tiling import CachedLogits, Tile

assert os.environ.get("TRITON_INTERPRET") == "1"
TOKENS, SLICE, START = 5, 8, 40
PLAIN = Transform()
CAPPED = Transform(1.3, 2.5, 0.7)
OTHER = Transform(0.8, 4.0, 1.2)
TILES = {
    "plain": {},
    "policy alone": {"paired": False},
    "partial slice": {"width": 19},
    "narrower than a slice": {"width": 5},
    "policy alone, partial": {"paired": False, "width": 19, "bias": True},
    "start": {"start": START, "bias": True, "ref_bias": True},
    "bias": {"bias": True},
    "reference's bias": {"ref_bias": True},
    "soft-cap": {"transform": CAPPED, "width": 19},
    "both capped": {"transform": CAPPED, "ref_transform": OTHER, "bias": True},
    "reference capped": {"ref_transform": OTHER},
    "extra": {"extra": True, "width": 19},
    "near": {"near": 1e-3},
    "both ban": {"bans": "both", "width": 19},
    "policy bans": {"bans": "policy"},
    "reference bans": {"bans": "reference", "width": 19},
    "a slice is banned": {"bans": "slice"},
    "half-precision logits": {"dtype": torch.bfloat16, "width": 19},
}


@pytest.fixture(autouse=True)
def narrow_slices(monkeypatch):
    monkeypatch.setattr(tiles_triton, "SLICE", SLICE)


@pytest.fixture
def launches(monkeypatch):
    """The kernels that are started."""
    started, launch = [], tiles_triton._launch
    noted = lambda kernel, *given, **how: (started.append(kernel), launch(kernel, *given, **how))
    monkeypatch.setattr(tiles_triton, "_launch", noted)
    return started


def tile(
    width=2 * SLICE, start=0, paired=True, bias=False, ref_bias=False, near=None, bans=None, extra=False,
    transform=PLAIN, ref_transform=PLAIN, dtype=torch.float32,
) -> Tile:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(*shape, generator=generator)
    raw = 2 * noise(TOKENS, width)
    ref_raw = 2 * noise(TOKENS, width) if near is None else raw + near * noise(TOKENS, width)
    hit = torch.zeros(width, dtype=torch.bool)
    hit[:SLICE] = bans == "slice"
    hit[::7] = bans is not None
    if bans in ("both", "policy"):
        raw[:, hit] = -torch.inf
    if bans in ("both", "reference", "slice"):
        ref_raw[:, hit] = -torch.inf
    targets = torch.tensor([start + 1, start + width - 1, start + width // 2 + 1, start - 3, start + width + 3])
    own_bias = noise(start + width) if bias else None
    other_bias = noise(start + width) if ref_bias and paired else None
    return Tile(
        start, width, targets, raw.to(dtype), ref_raw.to(dtype) if paired else None, own_bias, other_bias,
        transform, ref_transform, projected=bans is None, extra=noise(TOKENS, width) if extra else None,
    )  # fmt: skip


def scanned(backend, tile, keep=None):
    """States, picked logits and kept logits of one backend."""
    paired = tile.ref_raw is not None
    fields = state.FIELDS if paired else state.POLICY_FIELDS
    states = torch.full((fields, 1 + backend.slices(tile.width), TOKENS), torch.nan)  # one state of a tile before it
    picked = torch.zeros(2, TOKENS)
    room = lambda: torch.full((TOKENS, tile.width), torch.nan, dtype=keep)
    kept = CachedLogits(room(), room() if paired else None) if keep else None
    backend.statistics(tile, states, 1, picked, kept)
    assert states[:, 0].isnan().all()
    return states, picked, kept


def finished(one, backend=tiles_torch):
    """The statistics of a tile by one backend."""
    return state.finish(state.merge(scanned(backend, one)[0][:, 1:]))


@pytest.mark.parametrize("name", TILES)
def test_statistics(name):
    one = tile(**TILES[name])
    SINGLE.check(*(scanned(backend, one)[1] for backend in (tiles_triton, tiles_torch)))
    for x, y in zip(finished(one, tiles_triton), finished(one), strict=True):
        assert torch.equal(x.isinf(), y.isinf())
        SINGLE.check(x[~x.isinf()], y[~y.isinf()])


NAMES = ("logp", "reverse", "forward", "entropy")
ROWS = dict(zip(NAMES, torch.randn(4, TOKENS, generator=torch.Generator().manual_seed(7)), strict=True))


def gradient(backend, one, used, keep=None, dtype=torch.float32):
    states, _, kept = scanned(backend if keep else tiles_torch, one, keep)
    upstream = [ROWS[n] if n in used else torch.zeros(TOKENS) for n in ROWS]
    rows = state.gradient_numbers(finished(one), state.Upstream(*upstream))
    out = torch.full((TOKENS, one.width), torch.nan, dtype=dtype) if kept is None else kept.a_or_minus_b.view(dtype)
    backend.gradient(one, rows, states, 1, kept, out)
    return out


def finite_outputs(name):
    """An infinite KL has no gradient."""
    bans = TILES[name].get("bans")
    return {"policy": ("logp", "reverse", "entropy")}.get(
        bans, ("logp", "forward", "entropy") if bans in ("reference", "slice") else tuple(ROWS)
    )


@pytest.mark.parametrize("name", TILES)
def test_gradient(name):
    one, used = tile(**TILES[name]), finite_outputs(name)
    found, truth = gradient(tiles_triton, one, used), gradient(tiles_torch, one, used)
    SINGLE.check_vector(found, truth)


@pytest.mark.parametrize("name", [n for n in TILES if "bans" not in TILES[n]])
def test_gradient_overwrites_the_kept_logits(name):
    one = tile(**TILES[name])
    found, truth = gradient(tiles_triton, one, ROWS, keep=torch.float32), gradient(tiles_torch, one, ROWS)
    SINGLE.check_vector(found, truth)


def marked(monkeypatch, one, larger, apart, narrow=4):
    """The logits of a tile, kept relative to slices narrower than those of the kernel; and its gradient from them."""
    monkeypatch.setattr(tiles_triton, "MARKED", narrow)
    monkeypatch.setattr(tiles, "MARKED", narrow)
    kept = CachedLogits(larger, apart, torch.full((3, TOKENS, -(-one.width // narrow)), torch.nan))
    for columns in (range(i, min(i + narrow, one.width)) for i in range(0, one.width, narrow)):
        a, b, sums = state.of_logits(one.raw[:, list(columns)], one.ref_raw[:, list(columns)])
        part, mean = kept.cut(slice(0, TOKENS), columns), state.mean_difference(sums)
        part.store(a, b, mean[:, None])
        part.slice_stats[:, :, 0] = torch.stack([sums[0], sums[3], mean])
    rows = state.gradient_numbers(finished(one), state.Upstream(*ROWS.values()))
    return kept, lambda backend, out: backend.gradient(
        replace(one, raw=None, ref_raw=None), rows, torch.empty(11, 0, TOKENS), 0, kept, out
    )


@pytest.mark.parametrize("width", [16, 19, 5])
def test_gradient_from_logits_with_marks(width, monkeypatch):
    """Rows have room up to a multiple of 8 entries; nothing is written beyond."""
    monkeypatch.setattr(tiles_triton, "SLICE", 16)
    one, room = tile(width=width), -(-width // 8) * 8
    _, gradient_of = marked(monkeypatch, one, *torch.full((2, TOKENS, room), torch.nan)[..., :width])
    for backend in (tiles_triton, tiles_torch):
        wide = torch.full((TOKENS, room + 8), 7.0)
        gradient_of(backend, wide[:, :width])
        SINGLE.check_vector(wide[:, :width], gradient(tiles_torch, one, ROWS))
        assert (wide[:, room:] == 7).all()


def test_rows_of_more_than_two_billion_entries_in_all(tmp_path, monkeypatch):
    """In a file of which the pages that are not written take no space.

    The first row is in its middle, so that an offset of 32 bits is wrong and not outside.
    """
    one, stride, first = tile(width=19), 2**30, 2**31
    file = torch.from_file(str(tmp_path / "rows"), True, first + TOKENS * stride, dtype=torch.float16)
    larger, apart = (file[first + i :].as_strided((TOKENS, 19), (stride, 1)) for i in (0, 64))
    kept, gradient_of = marked(monkeypatch, one, larger, apart)
    gradient_of(tiles_triton, kept.a_or_minus_b.view(torch.bfloat16))
    BFLOAT16.check_vector(kept.a_or_minus_b.view(torch.bfloat16).float(), gradient(tiles_torch, one, ROWS))


def test_states_with_fields_of_more_than_two_billion_numbers_in_all(tmp_path):
    """Written and read, in a file as above."""
    one, stride, first = tile(), 2**29, 2**31
    shape, strides = (state.FIELDS, 1 + tiles_triton.slices(one.width), TOKENS), (stride, TOKENS, 1)
    file = torch.from_file(str(tmp_path / "states"), True, first + state.FIELDS * stride, dtype=torch.float32)
    states, room = file[first:].as_strided(shape, strides), torch.full((2, TOKENS, one.width), torch.nan)
    tiles_triton.statistics(one, states, 1, torch.zeros(2, TOKENS), CachedLogits(*room))
    for found, truth in zip(state.merge(states[:, 1:]), state.merge(scanned(tiles_torch, one)[0][:, 1:]), strict=True):
        SINGLE.check(found, truth)
    rows = state.gradient_numbers(state.finish(state.merge(states[:, 1:])), state.Upstream(*ROWS.values()))
    tiles_triton.gradient(replace(one, raw=None, ref_raw=None), rows, states, 1, CachedLogits(*room), room[0])
    SINGLE.check_vector(room[0], gradient(tiles_torch, one, ROWS))


@pytest.mark.parametrize("keep", [None, torch.float16], ids=["recomputed", "kept"])
def test_gradient_in_half_precision(keep):
    one = tile(**TILES["both capped"])
    found = gradient(tiles_triton, one, ROWS, keep=keep, dtype=torch.bfloat16)
    BFLOAT16.check_vector(found.float(), gradient(tiles_torch, one, ROWS))


@pytest.mark.parametrize("settings", [{"bias": True}, {"bans": "both"}, {}], ids=str)
def test_nan_is_not_treated_as_a_ban(settings):
    one = tile(**settings)
    one.raw[2, 12] = torch.nan
    found = finished(one, tiles_triton)
    for x in (found.logsumexp, found.reverse_kl):
        assert x.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [0, 8, "fast"])
@pytest.mark.usefixtures("small_tiles")
def test_the_whole_function(kept, dtype, monkeypatch):
    monkeypatch.setattr(tiles_triton, "SLICE", 16)
    case = make((6,), 29, dtype=dtype, bias=True, policy={"softcap": 4.0})
    assert fused_statistics.backend_for(case.hidden) is tiles_triton
    agree(case, SINGLE, SINGLE if dtype == torch.float32 else BFLOAT16, **keeping(case, kept))


@pytest.mark.parametrize("kept", [0, "fast"])
@pytest.mark.parametrize("divergence", GENERATORS, ids=lambda d: d.name)
@pytest.mark.usefixtures("small_tiles")
def test_divergences(divergence, kept, launches):
    """Every generator, in value and gradient, with a partial slice."""
    case = make((4,), 29, dtype=torch.float32, ref_bias=True, policy={"softcap": 4.0, "temperature": 0.8})
    agree(case, SINGLE, divergence=divergence, **keeping(case, kept))
    assert tiles_triton._divergence_kernel in launches


@pytest.mark.usefixtures("small_tiles")
def test_several_references():
    """One of them with a weight for each token."""
    case, other = two(dtype=torch.float32)
    assert fused_statistics.backend_for(case.hidden) is tiles_triton
    check(case, other, [x.float() for x in TABLE], SINGLE, divergence=jensen_shannon(0.1))


SUMS = {
    "plain": {},
    "bias and caps": {"transform": CAPPED, "ref_transform": OTHER, "bias": True, "ref_bias": True, "start": START},
    **{name: TILES[name] for name in ("near", "policy bans", "reference bans", "both ban")},
}


@pytest.mark.parametrize(
    "divergence", [d for d in GENERATORS if d.scale < 1 or d.name == "hellinger"], ids=lambda d: d.name
)
@pytest.mark.parametrize("name", SUMS)
def test_divergence_of_a_tile(name, divergence):
    """Bounded ones, which are finite where a model bans an entry."""
    one = replace(tile(**SUMS[name]), divergence=divergence)
    truth = finished(one)
    rows = torch.stack([truth.logsumexp, truth.lse_difference])
    sums = [torch.full((2, 1 + b.slices(one.width), TOKENS), torch.nan) for b in (tiles_triton, tiles_torch)]
    for backend, out in zip((tiles_triton, tiles_torch), sums, strict=True):
        backend.divergence(one, rows, out, 1)
        assert out[:, 0].isnan().all()
    value, slope = sums[0][:, 1:].sum(1)
    truth, true_slope = sums[1][:, 1:].sum(1)
    replace(SINGLE, atol=0.0).check(value, truth)  # near the reference it is below 1e-6
    if name != "reference bans":  # the core's slope rounds at a log-ratio of 1e30
        SINGLE.check(slope, true_slope)


def test_a_generator_without_a_kernel_is_computed_by_torch(launches):
    own = Divergence("mine", lambda x: 2 * x, lambda x: 2 * REVERSE_KL.excess(x), "2 l", 2.0)
    agree(make((4,), 29, dtype=torch.float32), SINGLE, divergence=own)
    assert not launches


@pytest.mark.parametrize("kept", [24, "fast"])
@pytest.mark.usefixtures("small_tiles")
def test_the_whole_function_for_hopper(kept, launches, monkeypatch):
    """With torch in place of the kernels for Hopper, and what they keep read by Triton."""
    if not hopper._importable():
        pytest.skip("there is no Triton with the parts of Gluon that are used")
    from kernels import on_torch

    on_torch.install(monkeypatch)
    monkeypatch.setattr(tiles, "MARKED", 4)
    monkeypatch.setattr(tiles_triton, "MARKED", 4)
    case = make((12,), 50, entries=0, dtype=torch.bfloat16, policy={"temperature": 0.7, "scale": 1.3})
    agree(case, SINGLE, BFLOAT16, **keeping(case, kept))
    assert launches == [tiles_triton._gradient_kernel]


def test_confident_tokens(monkeypatch):
    """Kept in 16 bits, and far from the reference, over several slices."""
    monkeypatch.setattr(tiles_triton, "SLICE", 128)
    case = confident(1e-3, tokens=4, vocabulary=300)
    assert fused_statistics.backend_for(case.hidden) is tiles_triton
    check_gradients(case, KEPT, mode="fast")


def test_from_logits():
    one = tile(bans="reference", width=19)
    targets = torch.tensor([1, 2, 3, 4, 5])
    z = one.raw.clone().requires_grad_()
    found = from_logits(z, targets, one.ref_raw)
    truth = fused_statistics.statistics_of_logits(one.raw.double(), targets)
    SINGLE.check(found.logp, truth.logp)
    assert (found.reverse_kl == torch.inf).all()
    (gradient,) = torch.autograd.grad(found.forward_kl.sum(), z)
    SINGLE.check_vector(gradient, one.raw.softmax(-1) - one.ref_raw.softmax(-1))


def test_from_masked_logits():
    one = tile(width=19)
    live = torch.tensor([0, 1, 0, 1, 1])
    targets = torch.tensor([-100, 2, -100, 4, 5])
    spoilt = lambda x: x.masked_fill(live[:, None] == 0, torch.nan)
    z = spoilt(one.raw).requires_grad_()
    with patch.object(fused_statistics, "backend_for", lambda _: tiles_triton):
        found = from_logits(z, targets, spoilt(one.ref_raw), mask=live, validate=False)
        (gradient,) = torch.autograd.grad(found.reverse_kl.sum() + found.logp.sum(), z)
    kept = live == 1
    wide = one.raw[kept].double().requires_grad_()
    truth = fused_statistics.statistics_of_logits(wide, targets[kept], one.ref_raw[kept].double())
    for name in ("logp", "entropy", "ref_logp", "reverse_kl", "forward_kl"):
        SINGLE.check(getattr(found, name)[kept], getattr(truth, name))
        assert (getattr(found, name)[~kept] == 0).all()
    (expected,) = torch.autograd.grad(truth.reverse_kl.sum() + truth.logp.sum(), wide)
    SINGLE.check_vector(gradient[kept], expected)
    assert (gradient[~kept] == 0).all()
