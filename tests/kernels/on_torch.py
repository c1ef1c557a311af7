"""The kernels for Hopper with torch in place of their matrix products: their own formulas, on a CPU."""

from types import SimpleNamespace

import torch
from torch import Tensor

from klgrad.kernels import hopper, state, tiling
from klgrad.kernels.hopper import HopperOperands, gluon
from klgrad.kernels.tiling import LARGEST_KEPT, CachedLogits

GL = SimpleNamespace(
    abs=torch.abs,
    where=torch.where,
    minimum=lambda x, y: torch.clamp(x, max=y),
    maximum=lambda x, y: torch.clamp(x, min=y),
)


def logits(models: HopperOperands) -> tuple[Tensor, Tensor]:
    """The raw logits of both models times their factors."""
    wide = lambda x, w, factor: x.float() @ w.float().T * factor
    policy = wide(models.hidden, models.weight, models.factors[0])
    return policy, wide(models.ref_hidden, models.ref_weight, models.factors[1])


def sums(models: HopperOperands, states: Tensor, picked: Tensor, kept: CachedLogits | None) -> None:
    """As `launch.sums`."""
    assert models.weight.stride(0) % 8 == 0
    z, z_ref = logits(models)
    local = models.targets - models.start
    for i, row in ((i, row) for i in range(2) for row in range(len(z))):
        if 0 <= local[row] < z.shape[1]:
            picked[i, row] = (z, z_ref)[i][row, local[row]]
    for i, first in enumerate(range(0, z.shape[1], tiling.MARKED)):
        x, y = (each[:, first : first + tiling.MARKED] for each in (z, z_ref))
        a, b = x - x.amax(1, keepdim=True), y - y.amax(1, keepdim=True)
        mass, energy, ref_mass, gap, ref_gap, *bregman_terms = (t.sum(1) for t in gluon.terms.fn(a, b))
        states[:, i] = torch.stack([x.amax(1), mass, energy, y.amax(1), ref_mass, gap, -ref_gap, *bregman_terms])
        if kept is not None:
            pair = gluon.kept_pair.fn(a, b, (gap / mass)[:, None], kept.tiny, LARGEST_KEPT)
            for out, numbers in zip((kept.a_or_minus_b, kept.delta), pair, strict=True):
                assert out.stride(0) % 8 == 0  # rows of a multiple of 16 bytes
                out[:, first : first + tiling.MARKED] = numbers


def gradient(models: HopperOperands, numbers: Tensor, out: Tensor) -> None:
    """As `launch.gradient`."""
    assert out.stride(0) % 8 == 0
    hit = models.start + torch.arange(len(models.weight)) == models.targets[:, None]
    out.copy_(gluon.logit_gradient.fn(*logits(models), hit, numbers[:, :, None]))


def merge(states: Tensor, marks: Tensor | None) -> Tensor:
    """As `launch.merge`."""
    if marks is not None:
        marks.copy_(torch.stack([states[0], states[3], states[5] / states[1]]).mT)
    return state.merge(torch.cat([states, torch.zeros_like(states[:2])]))[:, None]


def install(monkeypatch, calls: list[tuple[str, int]] | None = None) -> None:
    """Use these functions on a CPU, and note in `calls` which of them are called, with the first entry of each."""
    monkeypatch.setattr(hopper, "runs_on", lambda device: True)
    monkeypatch.setattr(gluon, "gl", GL)
    monkeypatch.setattr(gluon, "exp", torch.exp)
    monkeypatch.setattr(gluon, "merge", merge)
    for function in (sums, gradient):
        monkeypatch.setattr(gluon, function.__name__, _noted(function, [] if calls is None else calls))


def _noted(function, calls):
    def run(models, *given):
        calls.append((function.__name__, models.start))
        return function(models, *given)

    return run
