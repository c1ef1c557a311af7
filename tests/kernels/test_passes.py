"""Keeping logits in 16 bits until backward changes the gradient by less than one percent, also at confident tokens."""

from types import SimpleNamespace

import pytest
import torch
from kernels.cases import agree, check_gradients, confident, keeping, make
from tolerances import BFLOAT16, EXACT, KEPT
from torch.multiprocessing.reductions import StorageWeakRef

from klgrad.kernels import fused_statistics, passes, state, tiles_torch
from klgrad.kernels.tiling import CachedLogits

DOUBTS = (0.1, 0.01, 2e-3, 1e-4)
"""1 - p of the sampled tokens, whose KL is about 11."""


@pytest.mark.slow
@pytest.mark.parametrize("doubt", DOUBTS)
def test_confident_tokens_far_from_the_reference(doubt):
    case = confident(doubt)
    truth = case.to(torch.float64).specification()
    assert 0.5 * doubt < 1 - truth.logp.exp().mean() < 2 * doubt
    assert 10 < truth.reverse_kl.mean() < 11.1
    check_gradients(case, KEPT, mode="fast")


@pytest.mark.parametrize("kept", [0, 24, 104])
@pytest.mark.usefixtures("small_tiles")
def test_confident_tokens_over_many_slices(kept):
    """Most slices do not contain the confident entry; some are recomputed."""
    case = confident(1e-3, tokens=8, vocabulary=104)
    check_gradients(case, KEPT, **keeping(case, kept))


def test_two_tokens_share_the_probability():
    """Both are far from the reference by the same amount, so that their gradients nearly cancel."""
    case = confident(2e-4)
    for head in (case.head, case.ref_head):
        head.weight[(case.targets + 1) % 4096] = head.weight[case.targets]
    probability = case.to(torch.float64).specification().logp.exp()
    assert ((probability > 0.4) & (probability < 0.6)).all()
    check_gradients(case, KEPT, "reverse_kl", mode="fast")


def restored(z, z_ref, dtype):
    """a, b and the mean of d over the slice; and a and d as they are read."""
    a, b, sums = state.of_logits(z, z_ref)
    mean = state.mean_difference(sums)[:, None]
    kept = CachedLogits(*torch.empty(2, *z.shape, dtype=dtype))
    kept.store(a, b, mean)
    return a, b, mean, *kept.load(z.dtype, mean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_kept_logits_are_restored(dtype):
    """The error is 2^-11, relative to a for log p, to the larger of a and b for log q, and to its distance for d."""
    generator = torch.Generator().manual_seed(0)
    z, z_ref = 5 * torch.randn(2, 6, 50, generator=generator, dtype=torch.float64)
    a, b, mean, found_a, found_d = restored(z, z_ref, dtype)
    step, least = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    within = lambda off, size: bool((off.abs() <= 0.51 * step * size + least).all())
    d, own = a - b, a >= b
    assert within(found_a - a, a.abs())
    assert within(found_d - d, torch.where(own, d - mean, d).abs())
    assert within((found_a - found_d - b)[~own], b[~own].abs())
    assert (found_a[a == 0] == 0).all()


def test_an_entry_that_one_model_bans():
    """Entries that only one model bans are clamped to the largest kept number."""
    z, z_ref = torch.zeros(2, 1, 3)
    z[0, 0] = z_ref[0, 1] = state.LOWEST
    *_, found_a, found_d = restored(z, z_ref, torch.float16)
    assert found_a[0, 0] < -50000
    assert found_d[0, 0] < -50000
    assert found_d[0, 1] > 50000
    BFLOAT16.check(found_a[0, 1:], 0.0 * found_a[0, 1:])


def test_the_policy_alone():
    a = torch.tensor([[0.0, -1.5, -3e4, -1e30]])
    kept = CachedLogits(torch.empty(1, 4, dtype=torch.float16), None)
    kept.store(a, None, None)
    found, none = kept.load(torch.float32, None)
    assert none is None
    EXACT.check(found, torch.tensor([[0.0, -1.5, -3e4, -6e4]]))


@pytest.mark.parametrize("kept", [24, 104])
@pytest.mark.usefixtures("small_tiles")
def test_half_of_what_was_kept_is_freed_before_the_gradients_need_memory(kept, monkeypatch):
    """The backward pass overwrites the first of an entry's two numbers with its gradient, and reads the second once."""
    storages, freed = [], []
    room, rest = passes._room, fused_statistics.gradients

    def noted(inputs):
        made = room(inputs)
        storages.extend(StorageWeakRef(x.untyped_storage()) for x in (made.a_or_minus_b, made.delta))
        return made

    def looked_at(*given):
        freed.extend(storage.expired() for storage in storages)
        return rest(*given)

    monkeypatch.setattr(passes, "_room", noted)
    monkeypatch.setattr(fused_statistics, "gradients", looked_at)
    case = confident(1e-3, tokens=8, vocabulary=104).require_grad()
    case.statistics(**keeping(case, kept)).reverse_kl.sum().backward()
    assert freed == [False, True]


@pytest.mark.parametrize(("entries", "strips"), [(0, [12]), (2, [3, 3, 3, 3])])
@pytest.mark.usefixtures("small_tiles")
def test_kernels_take_all_tokens_of_a_kept_tile(entries, strips, monkeypatch):
    """Except where weights on other entries need a matrix of the size of a tile."""
    launches = []

    def gradient(tile, rows, states, first, kept, out):
        launches.append((tile.start, tile.width, len(tile.targets)))
        tiles_torch.gradient(tile, rows, states, first, kept, out)

    backend = SimpleNamespace(**vars(tiles_torch) | {"gradient": gradient})
    monkeypatch.setattr(fused_statistics, "backend_for", lambda hidden: backend)
    agree(make((12,), 40, entries=entries), EXACT, mode="fast")
    assert launches == [(start, width, n) for start, width in ((0, 16), (16, 16), (32, 8)) for n in strips]


@pytest.mark.usefixtures("small_tiles")
def test_torch_takes_a_strip_of_tokens(monkeypatch):
    """It needs several matrices of the size of a tile, and memory would grow with the tokens."""
    tokens, whole = [], tiles_torch.gradient
    monkeypatch.setattr(
        tiles_torch, "gradient", lambda tile, *given: (tokens.append(len(tile.targets)), whole(tile, *given))
    )
    agree(make((12,), 40, entries=0), EXACT, mode="fast")
    assert set(tokens) == {3}
