"""The kernels for Hopper on a Hopper GPU, against float64: each by itself, and as parts of both passes."""

from dataclasses import replace

import pytest
import torch
from kernels.cases import agree, check_gradients, confident, gradient_of_pair, keeping, make, weighted_sum
from tolerances import BFLOAT16, FLOAT16, KEPT, SINGLE, TENSOR_CORES

from klgrad.kernels import hopper, state, tiling
from klgrad.kernels.hopper import HopperOperands
from klgrad.kernels.tiling import MARKED, CachedLogits

if not hopper._importable():
    pytest.skip("there is no Triton with the parts of Gluon that are used", allow_module_level=True)

from klgrad.kernels.hopper import gluon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="there is no GPU of compute capability 9.0",
    ),
]
ODD = ((300, 200, 136, 1000), (1111, 1024, 1024, 4224), (256, 64, 64, 38400), (1, 8, 8, 130), (129, 72, 64, 1001))
"""Tokens, hidden sizes and vocabulary. The third has more tiles than steps of a tile."""
FACTORS = (1.25, 0.8)
every_kept = pytest.mark.parametrize("kept", ["fast", 0, 2048])


@pytest.fixture
def calls(monkeypatch):
    """The kernels that are started."""
    started, start = [], gluon._start

    def noted(kernel, *given):
        started.append(kernel.fn.__name__)
        start(kernel, *given)

    monkeypatch.setattr(gluon, "_start", noted)
    return started


def models(tokens, hidden, ref_hidden, vocabulary, start=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    new = lambda *size, scale=1.0: (torch.randn(*size, generator=generator, device="cuda") * scale).to(dtype)
    own = new(tokens, hidden), new(vocabulary, hidden, scale=3 / hidden**0.5)
    other = new(tokens, ref_hidden), new(vocabulary, ref_hidden, scale=3 / ref_hidden**0.5)
    targets = torch.randint(start - 5, start + vocabulary + 5, (tokens,), generator=generator, device="cuda")
    return HopperOperands(*own, *other, FACTORS, targets, start)


def logits(given: HopperOperands):
    pairs = ((given.hidden, given.weight), (given.ref_hidden, given.ref_weight))
    return [h.double() @ w.double().T * f for (h, w), f in zip(pairs, given.factors, strict=True)]


@pytest.mark.parametrize("size", ODD, ids=str)
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_states_and_kept_logits(size, keep):
    """Uninitialised memory has NaN, so that what is not written shows; what must not be written has another number.

    Stores end at a multiple of 16 bytes, also where the vocabulary does not.
    """
    given, (tokens, *_, vocabulary) = models(*size, start=640), size
    states = torch.full((9, -(-vocabulary // MARKED), tokens), torch.nan, device="cuda")
    picked = torch.zeros(2, tokens, device="cuda")
    wide = torch.full((2, tokens + 1, -(-vocabulary // 8) * 8 + 8), 7.0, dtype=torch.float16, device="cuda")
    kept = CachedLogits(wide[0, :tokens, :vocabulary], wide[1, :tokens, :vocabulary]) if keep else None
    gluon.sums(given, states, picked, kept)
    z, z_ref = logits(given)
    cuts = [slice(i, i + MARKED) for i in range(0, vocabulary, MARKED)]
    parts = [state.of_logits(z[:, cut], z_ref[:, cut]) for cut in cuts]
    for found, truth in zip(states, torch.stack([sums for *_, sums in parts], 1), strict=False):
        TENSOR_CORES.check_vector(found.double(), truth)
    local = given.targets - given.start
    here = (local >= 0) & (local < vocabulary)
    for found, truth in zip(picked, (z, z_ref), strict=True):
        wanted = truth.gather(1, local.clamp(0, vocabulary - 1)[:, None])[:, 0]
        TENSOR_CORES.check_vector(found.double(), torch.where(here, wanted, 0.0))
    if kept is None:
        return
    assert (wide[:, tokens:] == 7).all()
    assert (wide[:, :, -(-vocabulary // 8) * 8 :] == 7).all()
    for cut, mine, (a, b, _) in zip(cuts, states.unbind(1), parts, strict=True):
        part, mean = CachedLogits(kept.a_or_minus_b[:, cut], kept.delta[:, cut]), (mine[5] / mine[1])[:, None].double()
        found_a, found_d = part.load(torch.float64, mean)
        KEPT.check_vector(found_a, a)
        KEPT.check_vector(found_d, a - b)


@pytest.mark.parametrize(("parts", "tokens"), [(40, 300), (9, 64), (1, 1)])
def test_merged_states_and_marks(parts, tokens):
    """Into marks that are columns of wider rows."""
    z, z_ref = 3 * torch.randn(2, tokens, parts, 8, device="cuda", dtype=torch.float64)
    states = torch.stack([state.of_logits(z[:, i], z_ref[:, i])[2] for i in range(parts)], 1)
    wide = torch.full((3, tokens, parts + 2), 7.0, device="cuda")
    merged = gluon.merge(states[:9].float().contiguous(), wide[:, :, 1:-1])
    for found, truth in zip(state.finish(state.merge(merged)), state.finish(state.merge(states)), strict=True):
        SINGLE.check_vector(found.double(), truth)
    for found, truth in zip(wide[:, :, 1:-1], (states[0], states[3], states[5] / states[1]), strict=True):
        SINGLE.check_vector(found.double(), truth.T)
    assert (wide[:, :, [0, -1]] == 7).all()


@pytest.mark.parametrize("size", ODD, ids=str)
def test_gradient_of_the_logits(size):
    given, (tokens, *_, vocabulary) = models(*size, start=640), size
    z, z_ref = logits(given)
    upstream = state.Upstream(*torch.randn(4, tokens, dtype=torch.float64, device="cuda"))
    hit = given.start + torch.arange(vocabulary, device="cuda") == given.targets[:, None]
    numbers, truth = gradient_of_pair(z, z_ref, hit, upstream)
    wide = torch.full((tokens + 1, -(-vocabulary // 8) * 8 + 8), 7.0, dtype=torch.bfloat16, device="cuda")
    gluon.gradient(given, numbers.float(), wide[:tokens, :vocabulary])
    BFLOAT16.check_vector(wide[:tokens, :vocabulary].double(), truth)
    assert (wide[tokens:] == 7).all()
    assert (wide[:, -(-vocabulary // 8) * 8 :] == 7).all()


@every_kept
@pytest.mark.parametrize(
    "settings",
    [
        {"shape": (300,), "vocabulary": 9000, "size": 128, "ref_size": 72},
        {"shape": (3, 43), "vocabulary": 4001, "size": 200, "policy": {"temperature": 0.7, "scale": 1.3}},
        {"shape": (1,), "vocabulary": 2100, "size": 8},
    ],
    ids=str,
)
def test_values_and_gradients(settings, kept, calls):
    case = make(entries=0, **settings).to(torch.bfloat16, "cuda")
    agree(case, SINGLE, BFLOAT16, **keeping(case, kept))
    assert calls


@every_kept
def test_float16(kept, calls):
    case = make((300,), 9000, 128, entries=0).to(torch.float16, "cuda")
    agree(case, SINGLE, KEPT if kept == "fast" else FLOAT16, **keeping(case, kept))
    assert calls


@every_kept
def test_confident_tokens_over_several_chunks(kept, monkeypatch):
    monkeypatch.setattr(tiling, "ROWS", 128)
    case = confident(1e-4, tokens=300, vocabulary=5000, size=256, device="cuda")
    check_gradients(case, KEPT, **keeping(case, kept))


def test_more_than_two_billion_kept_entries(calls):
    """The last tokens, whose rows begin beyond, have the gradients that they have by themselves."""
    case = make((20000,), 131_077, 64, entries=0).to(torch.bfloat16, "cuda")
    last = replace(case, hidden=case.hidden[-8:], targets=case.targets[-8:], ref_hidden=case.ref_hidden[-8:])
    found = []
    for each in (case.require_grad(), last.to(torch.bfloat16).require_grad()):
        seen = each.statistics(mode="fast")
        found += torch.autograd.grad(seen.reverse_kl.sum() + seen.forward_kl.sum() + seen.logp.sum(), each.hidden)
    BFLOAT16.check_vector(found[0][-8:].double(), found[1].double())
    assert calls


def test_masks(calls):
    case = make((300,), 9000, 128, entries=0).to(torch.bfloat16, "cuda")
    live = torch.arange(300, device="cuda") % 3 != 1
    targets = torch.where(live, case.targets, -100)
    truth = case.to(torch.float64).specification()
    found = replace(case, targets=targets).statistics(mask=live, **keeping(case, 1024))
    for name in ("logp", "ref_logp", "reverse_kl", "forward_kl", "entropy"):
        SINGLE.check(getattr(found, name)[live], getattr(truth, name)[live])
        assert (getattr(found, name)[~live] == 0).all()
    assert calls


@pytest.mark.parametrize(
    "settings",
    [{"bias": True}, {"ref_bias": True}, {"policy": {"softcap": 4.0}}, {"ref": {"softcap": 4.0}}, {"size": 100}],
    ids=str,
)
def test_what_the_kernels_do_not_do(settings, calls):
    case = make(**{"shape": (100,), "vocabulary": 3000, "size": 64, "entries": 0} | settings).to(torch.bfloat16, "cuda")
    agree(case, SINGLE, BFLOAT16, **keeping(case, 0))
    assert not calls


@every_kept
def test_two_runs_are_equal(kept):
    case = make((300,), 9000, 128, entries=0).to(torch.bfloat16, "cuda").require_grad()
    runs = []
    for _ in range(2):
        found = case.statistics(**keeping(case, kept))
        runs.append([*found[:5], *torch.autograd.grad(weighted_sum(found), case.leaves)])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("mode", ["lean", "fast"])
def test_memory_is_within_the_plan(mode, calls):
    """Beyond the plan: a few numbers per token, and the gradients if they need more than what is freed before them.

    The gradients are larger than the tiles, so that they show where nothing is freed.
    """
    tokens, size, vocabulary = 8192, 2048, 100_000
    case = make((8,), 16, size, entries=0).to(torch.bfloat16, "cuda")
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    head, ref_head = (replace(case.head, weight=new(vocabulary, size) / 45) for _ in range(2))
    targets = torch.zeros(tokens, dtype=torch.long, device="cuda")
    case = replace(case, hidden=new(tokens, size), head=head, targets=targets)
    case = replace(case, ref_hidden=new(tokens, size), ref_head=ref_head).require_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.statistics(mode=mode, validate=False).reverse_kl.sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    made = tiling.make_plan(tokens, vocabulary, torch.bfloat16, paired=True, mode=mode, hopper=True)
    gradients = 2 * size * (tokens + vocabulary) + 4 * size * tokens
    assert calls
    freed = torch.float16.itemsize * tokens * made.kept
    assert used <= made.tile_bytes + made.kept_bytes + max(gradients - freed, 0) + (32 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU")
def test_tensors_of_another_device_than_the_current_one():
    case = make((100,), 3000, 64, entries=0).to(torch.bfloat16, "cuda:1")
    agree(case, SINGLE, BFLOAT16, **keeping(case, 1024))
