"""On-policy, k1 in reward and k2 as loss are exactly the gradient of KL(π‖ref); k1 and k3 as loss are not.

Theorem 5.1 of Liu et al. (arXiv 2510.01555), tested by summing over every outcome of random bandits in float64: each
loss is differentiated by autograd, weighted with the probability of its sample, and compared with the gradient of the
divergence itself. Number of arms, distances to ref and logits are ours. The theorem does not state that k3 as loss is
exactly the gradient of the *other* divergence, KL(ref‖π); this is checked because it shows what k3 descends instead.
"""

import math
from typing import TYPE_CHECKING

import torch

from ...drawing import style
from ...enumeration import Problem, bandit, target_gradients
from ..study import Check, Numbers, Settings, below
from .fig1_coefficients import PLACEMENTS, expected_gradient, relative_gap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ARMS = (3, 10, 30)
"""At least three: with two the gradient is one number, and those of both divergences cross somewhere by accident."""

NEAREST, FARTHEST = 0.05, 3.0
"""Standard deviation of ref's logits from π's."""

EXACT = 1e-9
"""Relative; float64 sums of at most thirty terms leave about 1e-14."""

DIFFERENT = 1e-4
"""Relative; a hundred thousand times `EXACT`."""


def run(settings: Settings) -> Numbers:
    """Relative distances of each loss's expected gradient from that of KL(π‖ref), problem by problem."""
    count = settings.size(150, 30)
    distances = torch.logspace(math.log10(NEAREST), math.log10(FARTHEST), count).tolist()
    problems = [
        bandit(ARMS[i % len(ARMS)], seed=1000 * settings.seed + i, away_from_ref=distance).on_policy()
        for i, distance in enumerate(distances)
    ]
    measured = [_measure(problem) for problem in problems]
    return {name: [m[name] for m in measured] for name in measured[0]}


def _measure(problem: Problem) -> dict[str, float]:
    targets = target_gradients(problem)
    reverse, forward = targets["reverse-kl-sequence"], targets["forward-kl-sequence"]
    found = {name: expected_gradient(problem, loss) for name, loss in PLACEMENTS.items()}
    return {
        "kl": problem.prefix_kl().item(),
        **{name: relative_gap(gradient, reverse) for name, gradient in found.items()},
        "k1-loss-size": (found["k1-loss"].norm() / reverse.norm()).item(),
        "k3-loss-from-forward": relative_gap(found["k3-loss"], forward),
    }


def check(numbers: Numbers) -> list[Check]:
    """Each half of the theorem, and the two that are not in it."""
    worst = lambda name: max(numbers[name])
    nearest = min(numbers["k3-loss"])
    differs = f"smallest relative gap {nearest:.3g}, largest {worst('k3-loss'):.3g}"
    return [
        below("k1 in reward is the reverse KL gradient (largest relative error)", worst("k1-reward"), EXACT),
        below("k2 as loss is the reverse KL gradient (largest relative error)", worst("k2-loss"), EXACT),
        below("k1 as loss has no gradient (largest, relative to reverse KL's)", worst("k1-loss-size"), EXACT),
        Check("k3 as loss is not the reverse KL gradient, on any problem", differs, nearest > DIFFERENT),
        below("k3 as loss is the forward KL gradient (largest relative error)", worst("k3-loss-from-forward"), EXACT),
    ]


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Relative distance from the reverse KL gradient against the KL of the problem."""
    axes = figure.subplots()
    markers = {"k1-loss": "s", "k3-loss": "o", "k1-reward": "x", "k2-loss": "+"}
    for name, marker in markers.items():
        look = {**style(name), "linestyle": "none", "marker": marker, "markersize": 5, "markerfacecolor": "none"}
        # An error of exactly 0 has no place on a logarithmic axis.
        axes.plot(numbers["kl"], [max(gap, 1e-17) for gap in numbers[name]], **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(3e-18, 30)
    axes.set_title(f"each of {len(numbers['kl'])} bandits, exact", fontsize=10)
    axes.set_xlabel("KL(π‖ref) of the bandit (nats)")
    axes.set_ylabel("relative distance from ∇KL(π‖ref)")
    axes.text(0.98, 0.24, "equal, up to float64 rounding", transform=axes.transAxes, ha="right")
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.62))
