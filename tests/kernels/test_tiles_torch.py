"""Exact f-divergences: every generator against its definition, far from the reference and near it."""

import math
import weakref

import oracle
import pytest
import torch
from kernels.cases import GENERATORS, GRADIENT, agree, budget, check_gradients, confident, keeping, make
from tolerances import EXACT, KEPT, NEAR_KL, SINGLE
from torch.utils._python_dispatch import TorchDispatchMode

from klgrad.core.divergences import (
    FORWARD_KL,
    NAMED,
    REVERSE_KL,
    Divergence,
    from_slope,
    huber,
    jensen_shannon,
    mixture,
    named,
)  # fmt: skip
from klgrad.errors import KernelInputError, MeaningError
from klgrad.kernels import fused_statistics, tiles_torch, tiling
from klgrad.kernels.tiles_torch import terms

SETTINGS = {
    "plain": {},
    "transforms": {
        "bias": True,
        "ref_bias": True,
        "policy": {"temperature": 1.4, "softcap": 3.0, "scale": 1.6},
        "ref": {"temperature": 0.8, "softcap": 2.0, "scale": 0.7},
    },
}
OWN = Divergence("squares", lambda x: x + x**3, lambda x: x**2 * 0 + _own_excess(x), "l + l^3")
"""A generator without a kernel."""


def _own_excess(x):
    """f(u)/u where f'(u) = l + l^3, l = log u, by the integral of the slope: f = u (l^3 - 3 l^2 + 7 l - 7) + 7."""
    return x**3 - 3 * x**2 + 7 * x - 7 + 7 * torch.exp(-x)


@pytest.mark.parametrize("kept", [0, 30, "fast"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("divergence", [*GENERATORS, OWN], ids=lambda d: d.name)
@pytest.mark.usefixtures("small_tiles")
def test_value_and_gradient(divergence, setting, kept):
    """Against autograd through the excess over full logits in float64, beside weights on all other outputs."""
    case = make(**SETTINGS[setting])
    agree(case, EXACT, divergence=divergence, **keeping(case, kept))


@pytest.mark.parametrize("divergence", NAMED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrower_dtypes(divergence, dtype):
    agree(make((5,), 300, 64, 32, dtype=dtype), SINGLE, GRADIENT[dtype], divergence=divergence)


@pytest.mark.parametrize("divergence", ["jensen-shannon", "chi-square"])
@pytest.mark.usefixtures("small_tiles")
def test_confident_tokens_far_from_the_reference(divergence):
    """Kept in 16 bits; the gradient is proportional to 1 - p."""
    for kept in (0, 104):
        case = confident(1e-3, tokens=8, vocabulary=104)
        check_gradients(case, KEPT, "divergence", divergence=divergence, **keeping(case, kept))


def test_a_divergence_without_a_weight_does_not_change_the_backward_pass(monkeypatch):
    """Its numbers are then those of the two KLs."""
    rows, whole = [], tiles_torch.gradient
    monkeypatch.setattr(
        tiles_torch, "gradient", lambda tile, numbers, *rest: rows.append(len(numbers)) or whole(tile, numbers, *rest)
    )
    case = make().require_grad()
    case.statistics(divergence="jensen-shannon").reverse_kl.sum().backward()
    case.statistics(divergence="jensen-shannon").divergence.sum().backward()
    assert rows == [7, 8]


def test_a_slope_that_jumps_keeps_no_logits():
    """One of 16 bits could be on the other side of the jump."""
    plan = tiling.make_plan(10, 100, torch.bfloat16, paired=True)
    kept = lambda divergence: fused_statistics._plan_for(divergence, torch.device("cuda"), plan).kept
    assert kept(named("total-variation")) == kept(mixture((1.0, REVERSE_KL), (1.0, named("total-variation")))) == 0
    assert kept(named("jensen-shannon")) == kept(None) == 100


def test_tiles_are_shorter_on_a_cpu():
    plan = tiling.make_plan(10000, 100, torch.bfloat16, paired=True)
    of = lambda device: fused_statistics._plan_for(None, torch.device(device), plan)
    assert (of("cpu").strip, of("cuda")) == (128, plan)


# The terms of single entries.


@pytest.mark.parametrize("divergence", GENERATORS, ids=lambda d: d.name)
def test_terms_are_the_excess_times_the_probability(divergence):
    """Relative to the largest part of either formula, and as far as no generator saturates."""
    log_ratio = torch.cat([torch.linspace(-17, 17, 501), torch.linspace(-0.06, 0.06, 50)]).double()
    log_p = -2.0 - log_ratio.clamp(max=0).abs() - log_ratio.clamp(min=0) * 0.3
    found = terms(divergence, log_p, log_p - log_ratio, log_ratio)
    size = log_p.exp() * (1 + (-log_ratio).exp() + divergence.excess(log_ratio))
    assert float(((found - log_p.exp() * divergence.excess(log_ratio)).abs() / size).max()) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_an_entry_that_the_policy_has_almost_given_up(name, dtype):
    """Half of the reference's mass where π is e^60 times less likely: the excess of a sample would be cut off there."""
    log_p = torch.tensor([[0.0, -60.0, -3.0]]).double().log_softmax(-1)
    log_q = torch.tensor([[0.5, 0.4, 0.1]], dtype=torch.float64).log()
    found = terms(named(name), *(x.to(dtype) for x in (log_p, log_q, log_p - log_q))).sum()
    truth = (log_q.exp() * oracle.GENERATORS[name]((log_p - log_q).exp())).sum()
    (EXACT if dtype == torch.float64 else SINGLE).check(found, truth)


@pytest.mark.parametrize("divergence", GENERATORS, ids=lambda d: d.name)
def test_near_the_reference(divergence):
    """A value of about 1e-8 in float32, where it is `scale` times the KL."""
    generator = torch.Generator().manual_seed(0)
    z, noise = torch.randn(2, 8, 300, generator=generator, dtype=torch.float64)
    log_p, log_q = (x.float().double().log_softmax(-1) for x in (z, z + 1e-4 * noise))
    found = terms(divergence, log_p.float(), log_q.float(), (log_p - log_q).float()).sum(-1)
    NEAR_KL.check(found, terms(divergence, log_p, log_q, log_p - log_q).sum(-1))
    if divergence.scale < math.inf:
        NEAR_KL.check(found, divergence.scale * (log_p.exp() * (log_p - log_q)).sum(-1))


def test_a_mixture_of_mixtures_has_the_generators_of_all_with_their_weights():
    """And none of a generator of one's own, which has no kernel."""
    inner = mixture((0.5, REVERSE_KL), (0.25, huber(2.0)))
    found = mixture((2.0, inner), (0.5, jensen_shannon())).parts
    assert found == ((1.0, "alpha", 1.0), (0.5, "huber", 2.0), (0.5, "jensen-shannon", 0.5))
    assert OWN.parts == mixture((1.0, REVERSE_KL), (1.0, OWN)).parts == ()


def test_two_of_one_name_are_each_what_their_functions_are():
    """A notebook defines its own again and again."""
    linear, bounded = (from_slope("mine", slope) for slope in (lambda x: x, torch.tanh))
    for divergence in (linear, bounded):
        agree(make(), EXACT, divergence=divergence)


def test_bad_input():
    case = make()
    with pytest.raises(MeaningError, match=r"divergence in \(reverse, forward, .*'js'"):
        case.statistics(divergence="js")
    with pytest.raises(KernelInputError, match="a reference with `divergence`"):
        make(paired=False).statistics(divergence="jensen-shannon")
    for parts in ((), ((0.0, REVERSE_KL),), ((-1.0, REVERSE_KL), (2.0, FORWARD_KL)), ((math.inf, REVERSE_KL),)):
        with pytest.raises(MeaningError, match="weights > 0"):
            mixture(*parts)


# Memory.


class Peak(TorchDispatchMode):
    """The largest number of bytes of all tensors made here that are alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.bytes, self.largest = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, torch.Tensor):
                self.note(x.untyped_storage())
        return made

    def note(self, storage):
        key = storage._cdata
        if key not in self.alive:
            size = storage.nbytes()
            self.bytes += size
            self.largest = max(self.largest, self.bytes)
            self.alive[key] = weakref.ref(storage, lambda _: self.gone(key, size))

    def gone(self, key, size):
        del self.alive[key]
        self.bytes -= size


def test_memory_does_not_grow_with_tokens_times_vocabulary(monkeypatch):
    """Four times the tokens and the vocabulary: only numbers of a token, or of a row of the head, are added."""
    for name, value in {"GRANULE": 256, "WIDTH": 256, "STRIP": 32, "ROWS": 32}.items():
        monkeypatch.setattr(tiling, name, value)

    def peak(tokens, vocabulary):
        case = make((tokens,), vocabulary, 4, entries=0, dtype=torch.float32).require_grad()
        room = budget(make((32,), 256, 4, entries=0, dtype=torch.float32), kept=0)
        with Peak() as mode:
            torch.autograd.grad(case.statistics(divergence="jensen-shannon", budget=room).divergence.sum(), case.leaves)
        return mode.largest

    grown = peak(256, 4096) - peak(64, 1024)
    numbers_of_states = 3 * 11 * 256 * (4096 // 256)
    assert grown < 4 * (numbers_of_states + 60 * (256 + 4096)) < 256 * 4096 * 4
