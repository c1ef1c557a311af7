"""The variance of the coefficient that k3 as loss puts on the score is χ²(ref‖π), exactly; far from ref it leaves that of k1 in reward behind by orders.

The variance analysis of k3 as loss in Liu et al. (arXiv 2510.01555): Var_π[1 - ref/π] = χ²(ref‖π). Variances are
sums over every outcome of random bandits in float64, at distances, numbers of arms and logits of our choice. A
bandit of finitely many arms has a finite χ²; where it is infinite is shown by the Gaussian example.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...estimators import MAX_EXPONENT, k1, k3
from ...exact import Problem, bandit
from ..palette import BLACK, style
from ..study import Check, Numbers, Settings, below, exceeds, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARMS = 20
DISTANCES = tuple(2.0**i for i in range(-8, 3))
"""Standard deviation of ref's logits from π's."""

EXACT = 1e-9
"""Relative; float64 leaves about 1e-14."""


def run(settings: Settings) -> Numbers:
    """Variances of the two coefficients and the χ² divergence, per bandit and distance."""
    bandits = [bandit(ARMS, seed=1000 * settings.seed + i, away_from_ref=1.0) for i in range(settings.size(100, 25))]
    measured = [[_measure(_at(problem, distance)) for distance in DISTANCES] for problem in bandits]
    table = torch.tensor(measured, dtype=torch.float64)
    k3_variance, k1_variance, chi_square, exponent = table.unbind(-1)
    return {
        "distance": list(DISTANCES),
        "k3": k3_variance.tolist(),
        "k1": k1_variance.tolist(),
        "chi_square": chi_square.tolist(),
        "largest_exponent": exponent.max().item(),
    }


def _at(problem: Problem, distance: float) -> Problem:
    """The same policy, with ref moved along a straight line of logits."""
    return replace(problem, ref_logits=torch.lerp(problem.logits, problem.ref_logits, distance)).on_policy()


def _measure(problem: Problem) -> list[float]:
    pi, ref = problem.probability, problem.ref_logp[:, 0].exp()
    log_ratio = (problem.logp - problem.ref_logp)[:, 0]
    chi_square = ((ref - pi).square() / pi).sum()
    variances = [_variance(k3.slope(log_ratio), pi), _variance(k1.value(log_ratio), pi)]
    return [x.item() for x in (*variances, chi_square, -log_ratio.min())]


def _variance(x: Tensor, probability: Tensor) -> Tensor:
    mean = (probability * x).sum()
    return (probability * (x - mean).square()).sum()


def check(numbers: Numbers) -> list[Check]:
    """The identity, and the two ends of the comparison."""
    k3_variance, k1_variance, chi_square = (_table(numbers, name) for name in ("k3", "k1", "chi_square"))
    error = ((k3_variance - chi_square).abs() / chi_square).max().item()
    ratio = k3_variance / k1_variance
    widening = ratio[:, -1].log() - ratio[:, -3].log()
    far = ratio[:, -1]
    return [
        below("Var of k3's coefficient is χ²(ref‖π) (largest relative error)", error, EXACT),
        within("near ref it equals that of k1 in reward (median ratio)", ratio[:, 0].median().item(), 1, 0.02),
        exceeds("far from ref it is larger (log ratio at distance 4, over bandits)", *_mean_and_error(far.log())),
        exceeds("and the more so the farther (log ratio, distance 4 against 1)", *_mean_and_error(widening)),
        Check("by orders of magnitude (median ratio at distance 4)", f"{far.median():.3g}", far.median().item() > 100),
        below("no exponent meets the estimators' cap", numbers["largest_exponent"], MAX_EXPONENT),
    ]


def _table(numbers: Numbers, name: str) -> Tensor:
    return torch.tensor(numbers[name], dtype=torch.float64)


def _mean_and_error(x: Tensor) -> tuple[float, float]:
    return x.mean().item(), (x.std() / len(x) ** 0.5).item()


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Median and middle 90 % over bandits of both variances against the distance."""
    axes = figure.subplots()
    for name, variance in {"k1-reward": "k1", "k3-loss": "k3"}.items():
        table, look = _table(numbers, variance), style(name)
        low, high = table.quantile(0.05, 0), table.quantile(0.95, 0)
        axes.fill_between(numbers["distance"], low, high, color=look["color"], alpha=0.2, linewidth=0)
        axes.plot(numbers["distance"], table.median(0).values, linewidth=2, **look)
    chi_square = _table(numbers, "chi_square").median(0).values
    axes.plot(numbers["distance"], chi_square, "o", color=BLACK, markerfacecolor="none", label="χ²(ref‖π)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("distance of ref (std of the logits' difference)")
    axes.set_ylabel("variance of the coefficient on ∇log π")
    axes.legend(loc="upper left", title="median, and middle 90 % of bandits", alignment="left")
