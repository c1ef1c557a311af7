r"""f-divergences of π from ref, as functions of the log-ratio l = log π/ref of one sampled token.

With u = exp(l) and f convex, f(1) = f'(1) = 0, the divergence is D_f = E_ref[f(u)] = E_π[f(u)/u], and its gradient is
E_π[f'(u) ∇log π]. So a KL term needs two functions of l: the *slope* f'(u), which is the coefficient of the token's own
score, and the *excess* f(u)/u, which estimates the divergence without bias and is never negative. Read backwards, every
coefficient that is a function c(l) of the token's log-ratio descends the divergence with f'(u) = c(log u) - c(0). Near
ref every f-divergence is `scale` times the KL, where `scale` is the derivative of the slope at l = 0.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import MeaningError
from .estimators import MAX_EXPONENT, Function, exp_capped, forward_k3, k3

__all__ = [
    "CHI_SQUARE",
    "FORWARD_KL",
    "HELLINGER",
    "REVERSE_KL",
    "TOTAL_VARIATION",
    "Divergence",
    "alpha",
    "from_slope",
    "huber",
    "jensen_shannon",
    "mixture",
    "named",
    "optimum",
]

NODES = 64
"""Points of the Gauss-Legendre rule that integrates a slope: exact for a polynomial of degree 127, which exp is, up to
rounding, over 30 nats. A slope with a kink is integrated to about 1e-4."""

BISECTIONS = 70
"""Halvings of a bracket up to some thousands wide: 2^-70 of that is below the precision of a float64."""

WIDEST = 700.0
"""The largest |log π/ref| that an optimum may have: exp of it is still a float64."""


Kind = Literal["alpha", "jensen-shannon", "total-variation", "huber"]
"""The generators whose terms over a whole vocabulary the kernels have."""


class GeneratorPart(NamedTuple):
    """A weight, and a generator with its parameter: order, β, bound, or 0 for none."""

    weight: float
    kind: Kind
    parameter: float


@dataclass(frozen=True)
class Divergence:
    """An f-divergence of π from ref, in terms of l = log π/ref.

    Its name stands for its functions: two divergences are equal if they have the same name, formula and scale.

    Attributes:
        name: as reports write it, `reverse-kl`.
        slope: f'(u), the coefficient of the token's own score; 0 at l = 0.
        excess: f(u)/u, whose mean over samples of π is the divergence.
        formula: the slope as text, in l.
        scale: the derivative of the slope at l = 0; inf where the slope jumps there.
        parts: the generators of this module whose weighted sum it is; empty for functions of your own.

    Examples:
        >>> import torch
        >>> from klgrad import divergences
        >>> divergences.FORWARD_KL.slope(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.6321])
    """

    name: str
    slope: Function = field(compare=False, repr=False)
    excess: Function = field(compare=False, repr=False)
    formula: str
    scale: float = 1.0
    parts: tuple[GeneratorPart, ...] = field(default=(), compare=False, repr=False)

    def over(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        """The divergence over a whole vocabulary, for `Rollout.token_divergence`.

        Args:
            logp: (..., V) log π of every entry, normalised.
            ref_logp: (..., V) log ref, likewise; it gets no gradient.

        Returns:
            (...) the divergence, with its gradient towards π.

        Examples:
            >>> import torch
            >>> from klgrad import divergences
            >>> divergences.TOTAL_VARIATION.over(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log())
            tensor(0.5000)
        """
        at = logp.detach()
        log_ratio = at - ref_logp.detach()
        return (at.exp() * (self.excess(log_ratio) + self.slope(log_ratio) * (logp - at))).sum(-1)

    def __str__(self) -> str:
        return f"{self.name}: coefficient {self.formula}"


def from_slope(name: str, slope: Function, formula: str = "c(l)") -> Divergence:
    """The divergence that a coefficient c(l) on each token's score descends: f'(u) = c(log u) - c(0).

    f is convex where c does not decrease, and the divergence is 0 only at ref if c(l) - c(0) has the sign of l.

    Args:
        name: in names and reports.
        slope: c, entry by entry; smooth, as its integral is taken from points of it.
        formula: c as text, in l.

    Returns:
        The divergence. Its excess is the integral of (c(x) - c(0)) exp(x - l) from 0 to l.

    Examples:
        >>> import torch
        >>> from klgrad import KLTerm, divergences
        >>> cubic = divergences.from_slope("cubic", lambda l: l + l**3, "l + l^3")
        >>> cubic.excess(torch.tensor([-1.0, 1.0]))
        tensor([1.0280, 0.5752])
        >>> print(KLTerm(divergence=cubic, level="token"))
        ∇ cubic, token level = E_π[ Σ_t (l_t + l_t^3) ∇log π(y_t) ]; summed over the sequence; on-policy
    """

    def centred(log_ratio: Tensor) -> Tensor:
        return slope(log_ratio) - slope(torch.zeros_like(log_ratio))

    def excess(log_ratio: Tensor) -> Tensor:
        share, weight = (x.to(log_ratio) for x in _gauss_legendre())
        far = log_ratio.clamp(min=-MAX_EXPONENT)[..., None]  # exp(-l) is capped, as everywhere
        return (centred(far * share) * far * torch.exp(far * (share - 1)) * weight).sum(-1)

    near = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (scale,) = torch.autograd.grad(centred(near), near)
    return Divergence(name, centred, excess, formula, float(scale))


@cache
def _gauss_legendre() -> tuple[Tensor, Tensor]:
    """Points in [0, 1] and weights, from the eigenvectors of the matrix of the Legendre polynomials' recurrence."""
    n = torch.arange(1, NODES, dtype=torch.float64)
    eigh = cast("Callable[[Tensor], tuple[Tensor, Tensor]]", torch.linalg.eigh)  # pyright: ignore[reportUnknownMemberType]
    points, vectors = eigh(torch.diag(n / (4 * n * n - 1).sqrt(), -1))  # which reads the lower triangle alone
    return (points + 1) / 2, vectors[0].square()


def alpha(order: float) -> Divergence:
    """The α-divergence: forward KL at 0, squared Hellinger distance at 1/2, reverse KL at 1, half of χ² at 2.

    f(u) = ((u - 1) - (u^α - 1)/α) / (1 - α), continued at 0 and 1.

    Args:
        order: α, any real number.

    Returns:
        The divergence.

    Examples:
        >>> import torch
        >>> from klgrad import divergences
        >>> divergences.alpha(0.5).slope(torch.tensor([-1.0, 1.0]))
        tensor([-1.2974,  0.7869])
    """
    power, parts = 1 - order, (GeneratorPart(1.0, "alpha", float(order)),)
    if power == 0:
        return Divergence("reverse-kl", lambda log_ratio: log_ratio, k3.value, "l", parts=parts)

    def slope(log_ratio: Tensor) -> Tensor:
        return -_expm1_capped(-power * log_ratio) / power

    def excess(log_ratio: Tensor) -> Tensor:
        # k3(l) = exp(-l) - 1 + l is computed without cancellation. Both exponents stay below the cap.
        near = log_ratio.clamp(min=-MAX_EXPONENT / max(power, 1.0))
        return (k3.value(near) - k3.value(power * near) / power) / order

    names = {0.0: "forward-kl", 0.5: "hellinger", 2.0: "chi-square"}
    formulas = {0.0: "1 - exp(-l)", 2.0: "exp(l) - 1"}
    formula = formulas.get(order, f"(1 - exp({-power:g} l)) / {power:g}")
    name = names.get(order, f"alpha({short_number(order)})")
    return Divergence(name, slope, forward_k3.value if order == 0 else excess, formula, parts=parts)


def jensen_shannon(beta: float = 0.5) -> Divergence:
    """The generalised Jensen-Shannon divergence β KL(ref‖m) + (1 - β) KL(π‖m), m = β ref + (1 - β) π.

    Near ref it is β (1 - β) times the KL. Divided by that, it becomes the forward KL as β goes to 0 and the reverse
    KL as β goes to 1.

    Args:
        beta: β, strictly between 0 and 1; 1/2 for the usual one.

    Returns:
        The divergence.

    Raises:
        MeaningError: if β is not strictly between 0 and 1.

    Examples:
        >>> import torch
        >>> from klgrad import divergences
        >>> divergences.jensen_shannon().slope(torch.tensor([-1.0, 1.0]))
        tensor([-0.3101,  0.1899])

    References:
        Agarwal, Vieillard, Zhou, Stanczyk, Ramos, Geist and Bachem, On-policy distillation of language models, ICLR
        2024, arXiv:2306.13649.
    """
    if not 0 < beta < 1:
        raise MeaningError(
            "beta strictly between 0 and 1", f"{beta:g}", "use FORWARD_KL (beta to 0) or REVERSE_KL (beta to 1)"
        )
    rest = 1 - beta

    def logs(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Log m/ref and log π/m, each from the side on which its exp does not overflow."""
        below, above = log_ratio.clamp(max=0), log_ratio.clamp(min=0)
        to_ref, to_policy = torch.log1p(rest * torch.expm1(below)), -torch.log1p(beta * torch.expm1(-above))
        return to_ref + above - to_policy, to_policy + below - to_ref

    def slope(log_ratio: Tensor) -> Tensor:
        return rest * logs(log_ratio)[1]

    def excess(log_ratio: Tensor) -> Tensor:
        # A sum of two terms that are never negative, by k3(x) = exp(-x) - 1 + x; beyond the cap it is constant.
        near = log_ratio.clamp(max=MAX_EXPONENT)
        to_ref, to_policy = logs(near)
        return rest * k3.value(to_policy) + beta * exp_capped(-near) * k3.value(-to_ref)

    name = "jensen-shannon" if beta == 0.5 else f"jensen-shannon({short_number(beta)})"
    formula, parts = f"-{rest:g} log({beta:g} exp(-l) + {rest:g})", (GeneratorPart(1.0, "jensen-shannon", beta),)
    return Divergence(name, slope, excess, formula, beta * rest, parts)


def huber(bound: float) -> Divergence:
    """The reverse KL with its slope bounded: clip(l, -c, c). It is convex, and its pull never vanishes away from ref.

    Args:
        bound: c > 0.

    Returns:
        The divergence.

    Raises:
        MeaningError: if c is not positive and finite.

    Examples:
        >>> import torch
        >>> from klgrad import divergences
        >>> divergences.huber(1.0).slope(torch.tensor([-3.0, 0.5, 3.0]))
        tensor([-1.0000,  0.5000,  1.0000])
    """
    if not 0 < bound < math.inf:
        raise MeaningError("a bound > 0", f"{bound:g}", "use REVERSE_KL for no bound")

    def excess(log_ratio: Tensor) -> Tensor:
        # Beyond ±c the graph of f is the tangent at exp(±c).
        near = log_ratio.clamp(-bound, bound)
        share = exp_capped(near - log_ratio)
        return k3.value(near) * share + near * (1 - share)

    def slope(log_ratio: Tensor) -> Tensor:
        return log_ratio.clamp(-bound, bound)

    text, parts = short_number(bound), (GeneratorPart(1.0, "huber", float(bound)),)
    return Divergence(f"huber({text})", slope, excess, f"clip(l, -{text}, {text})", parts=parts)


def short_number(number: float) -> str:
    """The number in few digits where they are exact, else in all."""
    text = f"{number:g}"
    return text if float(text) == number else repr(number)


def _expm1_capped(x: Tensor) -> Tensor:
    return torch.expm1(x.clamp(max=MAX_EXPONENT))


REVERSE_KL, FORWARD_KL, HELLINGER, CHI_SQUARE = alpha(1.0), alpha(0.0), alpha(0.5), alpha(2.0)
TOTAL_VARIATION = Divergence(
    "total-variation",
    torch.sign,
    lambda log_ratio: _expm1_capped(-log_ratio).abs(),
    "sign(l)",
    math.inf,
    (GeneratorPart(1.0, "total-variation", 0.0),),
)
"""The sum of |π - ref|: twice the total variation distance."""

NAMED = {
    "reverse": REVERSE_KL,
    "forward": FORWARD_KL,
    "jensen-shannon": jensen_shannon(),
    "chi-square": CHI_SQUARE,
    "hellinger": HELLINGER,
    "total-variation": TOTAL_VARIATION,
}
"""The divergences by name."""

WITH_NUMBER = {"alpha": alpha, "jensen-shannon": jensen_shannon, "huber": huber}
"""The families of divergences with one number, by name."""

NUMBER = r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?"
"""A number as a name writes it."""


def named(divergence: str | Divergence) -> Divergence:
    """The divergence with a name: one of `NAMED`, one of `WITH_NUMBER` with its number, or a weighted sum of these.

    Args:
        divergence: `hellinger`, `alpha(0.3)`, or `0.3 forward + 0.7 reverse`; `reverse-kl` and `forward-kl` are
            `reverse` and `forward`. A divergence stays as it is.

    Returns:
        The divergence.

    Raises:
        MeaningError: if there is none of that name.

    Examples:
        >>> from klgrad import divergences
        >>> print(divergences.named("alpha(2)"))
        chi-square: coefficient exp(l) - 1
        >>> print(divergences.named("0.3 forward + 0.7 reverse"))
        0.3 forward-kl + 0.7 reverse-kl: coefficient 0.3 (1 - exp(-l)) + 0.7 (l)
    """
    return divergence if isinstance(divergence, Divergence) else by_name(str(divergence))


@cache
def by_name(name: str) -> Divergence:
    """`named` of a text: the same object each time."""
    parts = [re.fullmatch(rf"({NUMBER}) +(\S+)", part) for part in name.split(" + ")]
    if all(parts):
        return mixture(*((float(part[1]), named(part[2])) for part in parts if part))
    known = {**NAMED, **{d.name: d for d in NAMED.values()}}.get(name)
    call = re.fullmatch(rf"([a-z-]+)\(({NUMBER})\)", name)
    if call and call[1] in WITH_NUMBER:
        known = WITH_NUMBER[call[1]](float(call[2]))
    if known is None:
        names = [*NAMED, *(f"{family}(NUMBER)" for family in WITH_NUMBER), "NUMBER NAME + NUMBER NAME"]
        raise MeaningError(
            f"divergence in ({', '.join(names)}), or a `Divergence`",
            repr(name),
            "write divergence='reverse', for example, or klgrad.divergences.from_slope(...) for a slope of your own",
        )
    return known


def optimum(divergence: str | Divergence, ref_logp: Tensor, reward: Tensor, beta: float) -> Tensor:
    """The optimum of E_π[r] - β D_f(π, ref), as log-probs: π = ref exp(c⁻¹((r - λ)/β)), c the slope.

    λ is found by bisection, and so is the inverse of the slope. Where the slope is bounded below, as that of χ², an
    outcome of low reward can lose all its probability: its log-prob is then below log ref by `WIDEST`.

    Args:
        divergence: a name for `named`, or a divergence; its slope must not decrease.
        ref_logp: (..., Y) log-probs of ref over all outcomes, all finite.
        reward: (..., Y) the reward of each outcome.
        beta: strength of the regularisation, > 0.

    Returns:
        (..., Y) log π*.

    Raises:
        MeaningError: if beta is not positive and finite.

    Examples:
        >>> import torch
        >>> from klgrad import optimum
        >>> optimum("reverse", torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]), beta=1.0).exp()
        tensor([0.7311, 0.2689])
    """
    check_beta(beta)
    slope = named(divergence).slope

    def log_probs(level: Tensor) -> Tensor:
        pull = (reward - level) / beta
        low, high = bisect(lambda log_ratio: slope(log_ratio) < pull, -WIDEST, WIDEST, reward)
        return ref_logp + (low + high) / 2

    lowest, highest = reward.amin(-1, keepdim=True), reward.amax(-1, keepdim=True)
    # At a level of the lowest reward no log-ratio is negative, at the highest none is positive.
    levels = bisect(lambda x: log_probs(x).logsumexp(-1, keepdim=True) > 0, lowest, highest, lowest)
    above, below = map(log_probs, levels)
    # Where the slope jumps or is flat the probabilities jump with the level, from a sum above 1 to one below it: the
    # optimum is the mixture of the two sides whose sum is 1.
    over, under = (x.logsumexp(-1, keepdim=True) for x in (above, below))
    least = torch.finfo(reward.dtype).tiny
    missing, gap = (-torch.expm1(x).clamp(max=-least) for x in (under, under - over))
    log_share = (missing.log() - over - gap.log()).clamp(max=0)
    mixed = torch.logaddexp(above + log_share, below + torch.log1p(-log_share.exp()))
    return torch.log_softmax(mixed, -1)


def check_beta(beta: float) -> None:
    """Raise `MeaningError` for a strength that has no optimum."""
    if not 0 < beta < math.inf:
        remedy = "pass a positive, finite beta; at beta = 0 the optimum is an argmax"
        raise MeaningError("beta > 0", f"{beta:g}", remedy)


def bisect(
    is_below: Callable[[Tensor], Tensor], low: Tensor | float, high: Tensor | float, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The two sides of where `is_below` turns from true to false, entry by entry."""
    low, high = torch.zeros_like(like) + low, torch.zeros_like(like) + high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low, high


def mixture(*parts: tuple[float, Divergence]) -> Divergence:
    """The weighted sum of several divergences, such as γ forward KL + (1 - γ) reverse KL.

    Args:
        parts: weights > 0, each with its divergence.

    Returns:
        The divergence; slope, excess and scale are weighted sums too.

    Raises:
        MeaningError: if there is no part, or a weight is not positive and finite.

    Examples:
        >>> import torch
        >>> from klgrad.core.divergences import FORWARD_KL, REVERSE_KL, mixture
        >>> both = mixture((0.25, FORWARD_KL), (0.75, REVERSE_KL))
        >>> both.name
        '0.25 forward-kl + 0.75 reverse-kl'
        >>> both.slope(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.9080])
    """
    weights = [weight for weight, _ in parts]
    if not parts or not all(0 < weight < math.inf for weight in weights):
        raise MeaningError("one or more weights > 0", f"{weights}", "leave out a part that has no weight")
    are_known = all(part.parts for _, part in parts)
    return Divergence(
        " + ".join(f"{short_number(weight)} {part.name}" for weight, part in parts),
        lambda log_ratio: torch.stack([weight * part.slope(log_ratio) for weight, part in parts]).sum(0),
        lambda log_ratio: torch.stack([weight * part.excess(log_ratio) for weight, part in parts]).sum(0),
        " + ".join(f"{short_number(weight)} ({part.formula})" for weight, part in parts),
        sum(weight * part.scale for weight, part in parts),
        tuple(x._replace(weight=weight * x.weight) for weight, part in parts for x in part.parts) if are_known else (),
    )
