"""Hypothesis strategies: batches of any shape, mask, dtype and grouping."""

import torch
from hypothesis import strategies as st

from klgrad import Rollout
from klgrad.core.rollout import DIVERGENCES

LOWEST = -1e4


@st.composite
def log_probs(draw, shape, low=-8.0, dtype=torch.float64):
    seed = draw(st.integers(0, 2**31 - 1))
    generator = torch.Generator().manual_seed(seed)
    return low * torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def masks(draw, shape, *, holes=True):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    if holes and draw(st.booleans()):
        return torch.rand(*shape, generator=generator) < 0.7
    lengths = torch.randint(0, shape[1] + 1, (shape[0], 1), generator=generator)
    return torch.arange(shape[1]) < lengths


@st.composite
def rollouts(draw, low=-8.0, dtype=torch.float64, gradient=True):
    groups, size = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    shape = (groups * size, draw(st.integers(1, 9)))
    logp = draw(log_probs(shape, low, dtype))
    exact = {name: -draw(log_probs(shape, -2.0, dtype)) for name in DIVERGENCES}
    if gradient:
        for x in (logp, *exact.values()):
            x.requires_grad_()
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return Rollout(
        logp,
        draw(log_probs(shape, low, dtype)),
        draw(masks(shape)),
        behavior_logp=draw(log_probs(shape, low, dtype)),
        group=(torch.arange(shape[0]) // size)[order],
        **exact,
    )
