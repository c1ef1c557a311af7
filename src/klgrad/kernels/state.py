r"""Sums over a part of the vocabulary, which merge into the log-probs, both KLs and the entropy of the whole.

With a = z - max z and b = z_ref - max z_ref over the part, d = a - b, a state holds Σe^a, Σe^b, Σe^a d, -Σe^b d, Σe^a a
and the two *excesses*

    reverse: Σ e^b - e^a + e^a d     forward: Σ e^a - e^b - e^b d

whose terms are Bregman divergences: none is negative, so that nothing cancels however near the reference is. The KL is
reverse / Σe^a plus log1p(x) - x at x = Σe^b / Σe^a - 1, which is of second order too. Far away it is the textbook's.

An entry that only one of the two models bans has an infinite share in one of the KLs. It counts with d = 0 here, so
that all sums stay finite and the other KL right, and what it weighs is summed beside them.

All functions are in torch, and shared by every backend; a backend only makes the states of its tiles.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIELDS = 11
POLICY_FIELDS = 3
NEAR = {torch.float64: 0.05, torch.float32: 0.5}
"""Below this |d|, e^b - e^a + e^a d is summed as a series, whose next term is then under the dtype's precision."""

LOWEST = -1e30
"""Logits below this, -inf among them, are held at it: such an entry has no probability, and all sums stay finite."""
BANNED = 1e29
"""A |d| above this is between an entry that LOWEST stands for and one that it does not."""


class State(NamedTuple):
    """One number per token for each sum; without a reference only the first three stand for something."""

    top: Tensor
    mass: Tensor
    energy: Tensor
    ref_top: Tensor
    ref_mass: Tensor
    gap: Tensor
    ref_gap: Tensor
    reverse: Tensor
    forward: Tensor
    stray: Tensor
    """Σe^a where only the reference bans: any at all makes the reverse KL infinite."""
    ref_stray: Tensor
    """Σe^b where only the policy does."""


class Finished(NamedTuple):
    """What the whole vocabulary's state says: log-sum-exps, both KLs, the entropy."""

    logsumexp: Tensor
    entropy: Tensor
    shift: Tensor
    """Log-sum-exp of the policy minus that of the reference."""
    reverse_kl: Tensor
    forward_kl: Tensor


def difference(a: Tensor, b: Tensor) -> Tensor:
    """What d is, a - b, but 0 where only one is banned."""
    d = a - b
    return torch.where(d.abs() > BANNED, 0.0, d)


def excesses(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """e^b - e^a + e^a d, and the same with a and b exchanged, without cancellation."""
    d, p, q = difference(a, b), a.exp(), b.exp()
    square = d * d
    even = square * (1 / 2 + square * (1 / 24 + square * (1 / 720 + square / 40320)))
    odd = square * d * (1 / 6 + square * (1 / 120 + square * (1 / 5040 + square / 362880)))
    near = (a - b).abs() < NEAR[d.dtype]
    return torch.where(near, p * (even - odd), q - p + p * d), torch.where(near, q * (even + odd), p - q - q * d)


def of_logits(z: Tensor, z_ref: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """(N, V) logits to a, b and the state of all V, (FIELDS, N)."""
    top = z.amax(-1)
    a = z - top[:, None]
    p = a.exp()
    policy = [top, p.sum(-1), (p * a).sum(-1)]
    if z_ref is None:
        return a, None, torch.stack(policy)
    ref_top = z_ref.amax(-1)
    b = z_ref - ref_top[:, None]
    d, q = a - b, b.exp()
    gap = difference(a, b)
    terms = [q, p * gap, -q * gap, *excesses(a, b), p * (d > BANNED), q * (d < -BANNED)]
    return a, b, torch.stack([*policy, ref_top, *(x.sum(-1) for x in terms)])


def mean_difference(own: Tensor) -> Tensor:
    """The mean of d under the policy over the part of the vocabulary that a state, (FIELDS, ...), stands for."""
    s = State(*own)
    return s.gap / s.mass


def merge(parts: Tensor) -> Tensor:
    """(FIELDS, parts, N) states of disjoint parts of the vocabulary to (FIELDS, N) of their union."""
    top, mass, energy = parts[:POLICY_FIELDS]
    drop = top - top.amax(0)
    weight = drop.exp()
    policy = [top.amax(0), (weight * mass).sum(0), (weight * (energy + drop * mass)).sum(0)]
    if len(parts) == POLICY_FIELDS:
        return torch.stack(policy)
    # Moving the two maxima by different amounts moves every d by the same, and the excesses follow from
    # φ(x - s) = e^s φ(x) + φ(-s) - x (e^s - 1), of which `excesses` computes the middle term.
    s = State(*parts)
    ref_drop = s.ref_top - s.ref_top.amax(0)
    ref_weight = ref_drop.exp()
    reverse, forward = excesses(drop, ref_drop)
    lag, apart = weight - ref_weight, drop - ref_drop
    sums = [
        ref_weight * s.ref_mass,
        weight * (s.gap + difference(drop, ref_drop) * s.mass),
        ref_weight * (s.ref_gap - difference(drop, ref_drop) * s.ref_mass),
        ref_weight * s.reverse + reverse * s.mass + lag * s.gap,
        weight * s.forward + forward * s.ref_mass - lag * s.ref_gap,
        weight * torch.where(apart > BANNED, s.mass, s.stray),
        ref_weight * torch.where(apart < -BANNED, s.ref_mass, s.ref_stray),
    ]
    return torch.stack([*policy, s.ref_top.amax(0), *(x.sum(0) for x in sums)])


def finish(state: Tensor) -> Finished:
    """The state of the whole vocabulary to what it means."""
    top, mass, energy = state[:POLICY_FIELDS]
    logsumexp, entropy = top + mass.log(), mass.log() - energy / mass
    if len(state) == POLICY_FIELDS:
        none = torch.zeros_like(top)
        return Finished(logsumexp, entropy, none, none, none)
    s = State(*state)
    beyond, reverse = _kl(s.reverse, s.gap, s.mass, s.ref_mass)
    _, forward = _kl(s.forward, s.ref_gap, s.ref_mass, s.mass)
    # A model that bans every entry has no distribution, and no KL to another one.
    undefined = (top <= LOWEST) | (s.ref_top <= LOWEST)
    return Finished(
        logsumexp,
        entropy,
        shift=top - s.ref_top - torch.log1p(beyond),
        reverse_kl=torch.where(undefined, torch.nan, torch.where(s.stray > 0, torch.inf, reverse)),
        forward_kl=torch.where(undefined, torch.nan, torch.where(s.ref_stray > 0, torch.inf, forward)),
    )


def log_prob(logits: Tensor, logsumexp: Tensor) -> Tensor:
    """Of entries by their logits; -inf for banned ones."""
    return torch.where(logits <= LOWEST, -torch.inf, logits - logsumexp)


def _kl(excess: Tensor, gap: Tensor, mass: Tensor, other_mass: Tensor) -> tuple[Tensor, Tensor]:
    """The quotient of the masses minus 1, and the KL: by its excess near 0, by E[d] + log quotient far from it."""
    far = other_mass / mass - 1
    near = far.abs() < NEAR[far.dtype]
    beyond = torch.where(near, (excess - gap) / mass, far)  # the excess is other_mass - mass + gap
    return beyond, torch.where(near, excess / mass + _log1p_minus(beyond), gap / mass + torch.log1p(far))


def _log1p_minus(x: Tensor) -> Tensor:
    """log1p(x) - x, which is -x²/2 near 0 and cancels there if computed as it is written."""
    small = x.clamp(-0.1, 0.1)
    series = torch.zeros_like(x)
    for power in range(14 if x.dtype == torch.float64 else 8, 1, -1):
        series = series * small + (-1.0) ** (power + 1) / power
    return torch.where(x.abs() < 0.1, small * small * series, torch.log1p(x) - x)
