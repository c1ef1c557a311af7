"""Near ref, k3 as loss is the reverse KL gradient to first order only: its coefficient is (δ-1)²/2 short, δ = ref/π.

Lemma E.1 (first-order agreement and second-order bias) of Liu et al. (arXiv 2510.01555): the coefficient falls short by
(δ-1)²/2 - (δ-1)³/3 + O((δ-1)⁴). The expansion is fitted to the difference of the slopes of this package's k2 and k3;
the fit's range and degree are ours. We add a test at the level of a policy: along straight lines from ref through
random bandits, the relative gap between the two expected gradients, summed over all outcomes, shrinks in proportion to
the distance.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.estimators import k2, k3
from ...drawing import BLACK, GREY, style
from ...enumeration import Problem, bandit, target_gradients
from ..study import Check, Numbers, Settings, below, within
from .fig1_coefficients import PLACEMENTS, expected_gradient, relative_gap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FIT_RANGE, FIT_DEGREE = 0.1, 7
"""Of (gap / (δ-1)²) in δ-1: the first term left out is about 0.1⁸/10 = 1e-9, below what the checks resolve."""

EXPANSION = (1 / 2, -1 / 3, 1 / 4)
"""Coefficients of (δ-1)², (δ-1)³ and the bounded remainder's (δ-1)⁴, those of -log δ."""

FITTED = 1e-5
ARMS = 10
HALVINGS = 10
ORDER_TOLERANCE = 0.02
"""Of the measured power of the distance; at 2⁻¹⁰ the next order still moves it by about 1e-3."""


def run(settings: Settings) -> Numbers:
    """The expansion of the coefficient, and gaps of expected gradients at halving distances."""
    distances = [2.0**-i for i in range(HALVINGS + 1)]
    bandits = [bandit(ARMS, seed=1000 * settings.seed + i, away_from_ref=1.0) for i in range(settings.size(24, 6))]
    wide = torch.linspace(-0.9, 2.0, 117, dtype=torch.float64)
    return {
        "fit": _fit(),
        "delta_minus_1": wide.tolist(),
        "short": _short_by(wide).tolist(),
        "distance": distances,
        "gap": [[_gap(_at(problem, distance)) for distance in distances] for problem in bandits],
    }


def _short_by(x: Tensor) -> Tensor:
    """By how much k3's coefficient at δ = 1 + x falls short of the principled one."""
    log_ratio = -torch.log1p(x)
    return k2.slope(log_ratio) - k3.slope(log_ratio)


def _fit() -> list[float]:
    """Coefficients of (δ-1)², (δ-1)³, ... by least squares."""
    # Chebyshev nodes, an even number: none is 0, where the quotient is 0/0, and the ends do not ripple.
    x = FIT_RANGE * torch.cos(torch.pi * (torch.arange(32, dtype=torch.float64) + 0.5) / 32)
    scaled_powers = torch.stack([(x / FIT_RANGE) ** i for i in range(FIT_DEGREE + 1)], -1)
    solution = torch.linalg.lstsq(scaled_powers, (_short_by(x) / x.square())[:, None]).solution[:, 0]
    return [c / FIT_RANGE**i for i, c in enumerate(solution.tolist())]


def _at(problem: Problem, distance: float) -> Problem:
    """The same policy, with ref drawn nearer to it along a straight line of logits."""
    return replace(problem, ref_logits=torch.lerp(problem.logits, problem.ref_logits, distance)).on_policy()


def _gap(problem: Problem) -> float:
    target = target_gradients(problem)["reverse-kl-sequence"]
    return relative_gap(expected_gradient(problem, PLACEMENTS["k3-loss"]), target)


def check(numbers: Numbers) -> list[Check]:
    """The expansion, and the power of the distance."""
    second, third, fourth = EXPANSION
    orders = [_order(gaps) for gaps in numbers["gap"]]
    worst = max(orders, key=lambda order: abs(order - 1))
    near, far = _median(numbers["gap"], -1), _median(numbers["gap"], 0)
    return [
        within("coefficient of (δ-1)² is 1/2", numbers["fit"][0], second, FITTED),
        within("coefficient of (δ-1)³ is -1/3", numbers["fit"][1], third, FITTED),
        within("the remainder is of fourth order, with 1/4", numbers["fit"][2], fourth, FITTED * 10),
        within("gap of gradients ∝ distance to the power 1 (the worst bandit)", worst, 1, ORDER_TOLERANCE),
        below("near ref the two agree (median relative gap at distance 2⁻¹⁰)", near, 1e-2),
        Check("far from ref they do not (median relative gap at distance 1)", f"{far:.3g}", far > 0.1),
    ]


def _order(gaps: list[float]) -> float:
    """Power of the distance between the two smallest, one halving apart."""
    return torch.tensor(gaps[-2] / gaps[-1], dtype=torch.float64).log2().item()


def _median(gaps: list[list[float]], i: int) -> float:
    return torch.tensor(gaps, dtype=torch.float64)[:, i].median().item()


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Left the coefficient's shortfall against δ - 1, right the gradients' gap against distance."""
    left, right = figure.subplots(1, 2)
    x = torch.tensor(numbers["delta_minus_1"], dtype=torch.float64)
    left.plot(x, numbers["short"], **{**style("k3-loss"), "label": "measured", "linewidth": 2.5})
    left.plot(x, x**2 / 2, color=GREY, linestyle=":", label="(δ−1)²/2")
    left.plot(x, x**2 / 2 - x**3 / 3, color=BLACK, linestyle="--", label="(δ−1)²/2 − (δ−1)³/3")
    left.set_ylim(-0.7, 2.0)
    left.set_title("exact", fontsize=10)
    left.set_xlabel("δ − 1, with δ = ref/π")
    left.set_ylabel("shortfall of k3's coefficient, −log δ − (1 − δ)")
    left.legend(loc="lower left", fontsize=9)
    distance = numbers["distance"]
    for gaps in numbers["gap"]:
        right.loglog(distance, gaps, **{**style("k3-loss"), "label": None, "linewidth": 0.8, "alpha": 0.6})
    middle = _median(numbers["gap"], -1) / distance[-1]
    right.loglog(distance, [middle * d for d in distance], color=BLACK, linestyle="--", label="∝ distance")
    right.set_title(f"each of {len(numbers['gap'])} bandits", fontsize=10)
    right.set_xlabel("std of the logits' difference, π to ref")
    right.set_ylabel("relative gap, ∇ k3 as loss to ∇KL(π‖ref)")
    right.legend(loc="upper left", fontsize=9)
