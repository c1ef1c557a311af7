r"""Sums over a part of the vocabulary, which can be merged into log-probs, both KLs and the entropy of the whole.

With a = z - max z and b = z_ref - max z_ref over the part and d = a - b, a state has Σe^a, Σe^b, Σe^a d, -Σe^b d,
Σe^a a and the two sums of *Bregman terms*

    reverse: Σ e^b - e^a + e^a d     forward: Σ e^a - e^b - e^b d

of which none is negative, so that nothing cancels even very near the reference. The KL is reverse / Σe^a plus
log1p(x) - x at x = Σe^b / Σe^a - 1, which is also of second order. Far from the reference the usual formula is used.

An entry that only one of the two models bans makes one of the KLs infinite. Such an entry has d = 0 here, so that all
sums stay finite and the other KL is correct. The probabilities of such entries have separate sums.

All functions are in torch and shared by the backends; a backend only computes the states of its tiles.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.divergences import Divergence

FIELDS = 11
POLICY_FIELDS = 3
NEAR = {torch.float64: 0.05, torch.float32: 0.5}
"""Below this |d|, e^b - e^a + e^a d is computed by its series, whose next term is then below the dtype's precision."""

LOWEST = -1e30
"""Logits are clamped to this from below, including -inf: such an entry has no probability, and all sums stay finite."""
BANNED = 1e29
"""A larger |d| means that exactly one of the two models bans the entry."""


class State(NamedTuple):
    """The sums, with one number per token each; without a reference only the first three are used."""

    top: Tensor
    mass: Tensor
    sum_p_logit: Tensor
    ref_top: Tensor
    ref_mass: Tensor
    sum_p_delta: Tensor
    ref_sum_p_delta: Tensor
    reverse: Tensor
    forward: Tensor
    banned_mass: Tensor
    """Σe^a over the entries that only the reference bans; if it is not 0, the reverse KL is infinite."""
    ref_banned_mass: Tensor
    """Σe^b over the entries that only the policy bans; if it is not 0, the forward KL is infinite."""


class Statistics(NamedTuple):
    """The results for the whole vocabulary: log-sum-exp, entropy and both KLs."""

    logsumexp: Tensor
    entropy: Tensor
    lse_difference: Tensor
    """Log-sum-exp of the policy minus that of the reference."""
    reverse_kl: Tensor
    forward_kl: Tensor


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Compute d = a - b, but 0 where only one of them is banned."""
    d = a - b
    return torch.where(d.abs() > BANNED, 0.0, d)


def bregman_terms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """e^b - e^a + e^a d, and the same with a and b exchanged, without cancellation."""
    d, p, q = difference(a, b), a.exp(), b.exp()
    square = d * d
    even = square * (1 / 2 + square * (1 / 24 + square * (1 / 720 + square / 40320)))
    odd = square * d * (1 / 6 + square * (1 / 120 + square * (1 / 5040 + square / 362880)))
    near = (a - b).abs() < NEAR[d.dtype]
    return torch.where(near, p * (even - odd), q - p + p * d), torch.where(near, q * (even + odd), p - q - q * d)


def of_logits(z: Tensor, z_ref: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute a, b and the (FIELDS, N) state of (N, V) logits."""
    top = z.amax(-1)
    a = z - top[:, None]
    p = a.exp()
    policy = [top, p.sum(-1), (p * a).sum(-1)]
    if z_ref is None:
        return a, None, torch.stack(policy)
    ref_top = z_ref.amax(-1)
    b = z_ref - ref_top[:, None]
    d, q = a - b, b.exp()
    delta = difference(a, b)
    terms = [q, p * delta, -q * delta, *bregman_terms(a, b), p * (d > BANNED), q * (d < -BANNED)]
    return a, b, torch.stack([*policy, ref_top, *(x.sum(-1) for x in terms)])


def mean_difference(own: Tensor) -> Tensor:
    """The mean of d under the policy, over the part of the vocabulary that a state, (FIELDS, ...), covers."""
    s = State(*own)
    return s.sum_p_delta / s.mass


def merge(parts: Tensor) -> Tensor:
    """Merge (FIELDS, parts, N) states of disjoint parts of the vocabulary into the (FIELDS, N) state of their union."""
    top, mass, sum_p_logit = parts[:POLICY_FIELDS]
    drop = top - top.amax(0)
    weight = drop.exp()
    policy = [top.amax(0), (weight * mass).sum(0), (weight * (sum_p_logit + drop * mass)).sum(0)]
    if len(parts) == POLICY_FIELDS:
        return torch.stack(policy)
    # Changing the two maxima by different amounts changes every d by the same amount. The Bregman terms follow from
    # φ(x - s) = e^s φ(x) + φ(-s) - x (e^s - 1), whose middle term `bregman_terms` computes.
    s = State(*parts)
    ref_drop = s.ref_top - s.ref_top.amax(0)
    ref_weight = ref_drop.exp()
    reverse, forward = bregman_terms(drop, ref_drop)
    lag, offset = weight - ref_weight, drop - ref_drop
    sums = [
        ref_weight * s.ref_mass,
        weight * (s.sum_p_delta + difference(drop, ref_drop) * s.mass),
        ref_weight * (s.ref_sum_p_delta - difference(drop, ref_drop) * s.ref_mass),
        ref_weight * s.reverse + reverse * s.mass + lag * s.sum_p_delta,
        weight * s.forward + forward * s.ref_mass - lag * s.ref_sum_p_delta,
        weight * torch.where(offset > BANNED, s.mass, s.banned_mass),
        ref_weight * torch.where(offset < -BANNED, s.ref_mass, s.ref_banned_mass),
    ]
    return torch.stack([*policy, s.ref_top.amax(0), *(x.sum(0) for x in sums)])


def finish(state: Tensor) -> Statistics:
    """Compute the results from the state of the whole vocabulary."""
    top, mass, sum_p_logit = state[:POLICY_FIELDS]
    logsumexp, entropy = top + mass.log(), mass.log() - sum_p_logit / mass
    if len(state) == POLICY_FIELDS:
        none = torch.zeros_like(top)
        return Statistics(logsumexp, entropy, none, none, none)
    s = State(*state)
    beyond, reverse = _kl(s.reverse, s.sum_p_delta, s.mass, s.ref_mass)
    _, forward = _kl(s.forward, s.ref_sum_p_delta, s.ref_mass, s.mass)
    # A model that bans every entry has no distribution, so the KLs are undefined.
    undefined = (top <= LOWEST) | (s.ref_top <= LOWEST)
    return Statistics(
        logsumexp,
        entropy,
        lse_difference=top - s.ref_top - torch.log1p(beyond),
        reverse_kl=torch.where(undefined, torch.nan, torch.where(s.banned_mass > 0, torch.inf, reverse)),
        forward_kl=torch.where(undefined, torch.nan, torch.where(s.ref_banned_mass > 0, torch.inf, forward)),
    )


def log_prob(logits: Tensor, logsumexp: Tensor) -> Tensor:
    """Log-probs of entries from their logits; -inf for banned ones."""
    return torch.where(logits <= LOWEST, -torch.inf, logits - logsumexp)


def _kl(bregman: Tensor, sum_p_delta: Tensor, mass: Tensor, other_mass: Tensor) -> tuple[Tensor, Tensor]:
    """The quotient of the masses minus 1, and the KL: by Bregman terms near 0, else as E[d] + log quotient."""
    far = other_mass / mass - 1
    near = far.abs() < NEAR[far.dtype]
    beyond = torch.where(near, (bregman - sum_p_delta) / mass, far)  # bregman is other_mass - mass + sum_p_delta
    return beyond, torch.where(near, bregman / mass + _log1p_minus(beyond), sum_p_delta / mass + torch.log1p(far))


def _log1p_minus(x: Tensor) -> Tensor:
    """log1p(x) - x, by its series near 0, where the direct formula cancels."""
    small = x.clamp(-0.1, 0.1)
    series = torch.zeros_like(x)
    for power in range(14 if x.dtype == torch.float64 else 8, 1, -1):
        series = series * small + (-1.0) ** (power + 1) / power
    return torch.where(x.abs() < 0.1, small * small * series, torch.log1p(x) - x)


# The gradient of a weighted sum of the outputs with respect to one logit, from a few numbers per token.
#
# With p, q the two probabilities of a vocabulary entry v, Δ = log p - log q and y the sampled token,
#
#     d/dz of  w_l·logp + w_r·reverse + w_f·forward + w_e·entropy
#       = p (α + w_r Δ - w_e log p) - w_f q + w_l [v = y],   α = w_f - w_l - w_r·reverse - w_e·entropy
#
# and the reference's logits have no gradient.

GRADIENT_FIELDS = 7


class Upstream(NamedTuple):
    """The derivatives of the loss with respect to each output, (N,) each."""

    logp: Tensor
    reverse_kl: Tensor
    forward_kl: Tensor
    entropy: Tensor


def gradient_numbers(statistics: Statistics, upstream: Upstream, elsewhere: Tensor | None = None) -> Tensor:
    """The (FIELDS, N) numbers: log-sum-exp, lse_difference, α, w_r, -w_e, w_f, w_l.

    `elsewhere` is the (N,) sum of the weights on other entries' log-probs.
    """
    w = upstream
    total = w.logp if elsewhere is None else w.logp + elsewhere
    alpha = w.forward_kl - total - _product(w.reverse_kl, statistics.reverse_kl) - w.entropy * statistics.entropy
    return torch.stack(
        [statistics.logsumexp, statistics.lse_difference, alpha, w.reverse_kl, -w.entropy, w.forward_kl, w.logp]
    ).contiguous()


def with_divergence(numbers: Tensor, weight: Tensor, mean_slope: Tensor) -> Tensor:
    """Append the weight w_d of a divergence with slope c, and subtract w_d·Σ p c from α.

    The gradient above then has one more term, p w_d (c - Σ p c).
    """
    numbers[2] -= weight * mean_slope
    return torch.cat([numbers, weight[None]])


def _product(weight: Tensor, kl: Tensor) -> Tensor:
    return torch.where(weight == 0, 0.0, weight * kl)  # an infinite KL without a weight contributes nothing


def logit_gradient(
    rows: Tensor,
    log_p: Tensor,
    pair: tuple[Tensor, Tensor] | None,
    hit: Tensor,
    extra: Tensor | None,
    divergence: Divergence | None = None,
) -> Tensor:
    """The formula above, for a (N, width) tile; `pair` is (Δ, log q), `hit` marks the sampled token."""
    _, _, alpha, w_reverse, minus_w_entropy, w_forward, w_logp, *w_divergence = (row[:, None] for row in rows)
    p = log_p.exp()
    inner = alpha + minus_w_entropy * log_p
    out = torch.where(hit, w_logp, 0.0)
    if pair is not None:
        delta, log_q = pair
        inner = inner + w_reverse * delta
        if w_divergence and divergence is not None:
            inner = inner + w_divergence[0] * divergence.slope(delta)
        out = out - w_forward * log_q.exp()
    out = out + p * inner
    return out if extra is None else out + extra
