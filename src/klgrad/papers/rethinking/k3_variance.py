"""The coefficient of k3 as loss has variance χ²(ref‖π), exactly; as π leaves ref it explodes, that of k1 does not.

The variance analysis of k3 as loss in Liu et al. (arXiv 2510.01555): Var_π[1 - ref/π] = χ²(ref‖π). Variances are
sums over every outcome of random bandits in float64; distances, numbers of arms and logits are ours. The distance
grows in two ways. With ref fixed and π concentrating, as in training, outcomes appear where π ≪ ref and the variance
explodes. With π fixed and ref concentrating, ref/π stays below 1/π and it does not: the explosion is
one-sided. A bandit of finitely many arms has a finite χ²; where it is infinite is shown by the Gaussian example.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.estimators import MAX_EXPONENT, k1, k3
from ...drawing import BLACK, style
from ...enumeration import Problem, bandit
from ..study import Check, Numbers, Settings, below, exceeds_zero, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ARMS = 20
DISTANCES = tuple(2.0**i for i in range(-8, 3))
"""Standard deviation of π's logits from ref's."""

EXACT = 1e-9
"""Relative; float64 leaves about 1e-14."""


def run(settings: Settings) -> Numbers:
    """Variances of the two coefficients and the χ² divergence, per bandit and distance, for both ways apart."""
    count = settings.size(64, 16)
    bandits = [bandit(ARMS, seed=1000 * settings.seed + i, away_from_ref=1.0) for i in range(count)]
    return {
        "distance": list(DISTANCES),
        "policy_leaves": _measure_all([[_policy_at(b, distance) for distance in DISTANCES] for b in bandits]),
        "ref_leaves": _measure_all([[_ref_at(b, distance) for distance in DISTANCES] for b in bandits]),
    }


def _policy_at(problem: Problem, distance: float) -> Problem:
    """The same ref, with π moved along a straight line of logits."""
    return replace(problem, logits=torch.lerp(problem.ref_logits, problem.logits, distance)).on_policy()


def _ref_at(problem: Problem, distance: float) -> Problem:
    """The same π, with ref moved likewise."""
    return replace(problem, ref_logits=torch.lerp(problem.logits, problem.ref_logits, distance)).on_policy()


def _measure_all(problems: list[list[Problem]]) -> Numbers:
    measured = torch.tensor([[_measure(problem) for problem in row] for row in problems], dtype=torch.float64)
    k3_variance, k1_variance, chi_square, exponent = measured.unbind(-1)
    return {
        "k3": k3_variance.tolist(),
        "k1": k1_variance.tolist(),
        "chi_square": chi_square.tolist(),
        "largest_exponent": exponent.max().item(),
    }


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
    apart = [numbers["policy_leaves"], numbers["ref_leaves"]]
    error = max(((_table(a, "k3") / _table(a, "chi_square")) - 1).abs().max().item() for a in apart)
    policy, ref = (_table(a, "k3") / _table(a, "k1") for a in apart)
    far, widening = policy[:, -1], policy[:, -1].log() - policy[:, -3].log()
    other = ref[:, -1].median().item()
    return [
        below("Var of k3's coefficient is χ²(ref‖π) (largest relative error)", error, EXACT),
        within("near ref it equals that of k1 in reward (median ratio)", policy[:, 0].median().item(), 1, 0.02),
        exceeds_zero("π far from ref: it is larger (log ratio at distance 4)", far.log()),
        exceeds_zero("the more so the farther (log ratio, distance 4 against 1)", widening),
        Check("by orders of magnitude (median ratio at distance 4)", f"{far.median():.3g}", far.median().item() > 100),
        below("one-sided: not where ref concentrates instead (median ratio at distance 4)", other, 10),
        below("no exponent meets the estimators' cap", max(a["largest_exponent"] for a in apart), MAX_EXPONENT),
    ]


def _table(measured: Numbers, name: str) -> Tensor:
    return torch.tensor(measured[name], dtype=torch.float64)


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Median and middle 90 % over bandits of both variances against the distance, either way apart."""
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"policy_leaves": "ref fixed, π concentrates", "ref_leaves": "π fixed, ref concentrates"}
    for axes, (apart, title) in zip(panels, titles.items(), strict=True):
        for name, variance in {"k1-reward": "k1", "k3-loss": "k3"}.items():
            table, look = _table(numbers[apart], variance), style(name)
            low, high = table.quantile(0.05, 0), table.quantile(0.95, 0)
            axes.fill_between(numbers["distance"], low, high, color=look["color"], alpha=0.2, linewidth=0)
            # Near ref the two coincide: the wider line below stays visible.
            width = 4.5 if variance == "k1" else 2.0
            axes.plot(numbers["distance"], table.median(0).values, linewidth=width, **look)
        chi_square = _table(numbers[apart], "chi_square")
        axes.plot(
            numbers["distance"],
            chi_square.median(0).values,
            "o",
            color=BLACK,
            markerfacecolor="none",
            label="χ²(ref‖π)",
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{title}\nmedians of {len(chi_square)} bandits; bands: middle 90%", fontsize=9.5)
        axes.set_xlabel("std of the logits' difference")
    panels[0].set_ylabel("variance of the coefficient on ∇log π")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9)
