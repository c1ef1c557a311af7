"""k2 as loss puts log π/ref on the score, as k1 in reward does; k3 as loss saturates above ref, explodes below.

Figure 1 of Liu et al. (arXiv 2510.01555): the coefficient on ∇log π against log π, with ref = 0.25. Here each
coefficient is measured, by autograd through this package's estimators, and compared with the formula. The range
of log π is ours; as π ≤ 1 the figure itself ends at 1 - ref = 0.75, so that the limit 1 is checked at rarer
references as well.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.estimators import k1, k2, k3
from ...drawing import GREY, style
from ...enumeration import Problem
from ..study import Check, Numbers, Settings, below, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The paper's four placements as losses of single outcomes, and the expected gradient of each.
#
# The zoo has the same placements as losses of a batch: one number, averaged over completions. Here each outcome keeps
# its own loss, because it is weighted by its probability, and off-policy by a ratio.

Loss = Callable[[Tensor, Tensor], Tensor]
"""From log π, which is differentiated, and log ref of each outcome to its loss."""

PLACEMENTS: dict[str, Loss] = {
    "k1-reward": lambda logp, ref_logp: k1.value(logp - ref_logp).detach() * logp,
    "k2-loss": lambda logp, ref_logp: k2(logp - ref_logp),
    "k1-loss": lambda logp, ref_logp: k1(logp - ref_logp),
    "k3-loss": lambda logp, ref_logp: k3(logp - ref_logp),
}


def expected_gradient(problem: Problem, loss: Loss) -> Tensor:
    """The mean over samples of the gradient that back-propagation through a sampled loss computes.

    Args:
        problem: its sampler draws the outcomes; sampling is not differentiated.
        loss: of each outcome, from log-probs (N, 1) to (N, 1).

    Returns:
        The gradient by the logits, flat.
    """
    logits = problem.logits.detach().clone().requires_grad_()
    mean = (problem.probability[:, None] * loss(problem.log_probs(logits), problem.ref_logp)).sum()
    return torch.autograd.grad(mean, logits)[0].flatten()


def relative_gap(found: Tensor, target: Tensor) -> float:
    """The distance of a gradient from its target, relative to the norm of the target."""
    return ((found - target).norm() / target.norm()).item()


REF = 0.25
LOWEST_LOGP = -7.0
RARE_REF = 1e-6
"""A reference so small that π = 1 lies deep in k3's saturated part."""

ROUNDING = 1e-12
"""Relative. The coefficients are elementary functions of one float64; nothing is summed."""


def run(settings: Settings) -> Numbers:
    """Coefficients along log π, and at the points that the claims name."""
    logp = torch.linspace(LOWEST_LOGP, 0, settings.size(281, 57), dtype=torch.float64)
    measured, formula = _coefficients(logp, REF), _formulae(logp, REF)
    error = lambda name: ((measured[name] - formula[name]).abs() / formula[name].abs().clamp(min=1)).max().item()
    at = lambda pi, ref: {name: c.item() for name, c in _coefficients(_scalar(math.log(pi)), ref).items()}
    return {
        "ref": REF,
        "logp": logp.tolist(),
        "coefficient": {name: c.tolist() for name, c in measured.items()},
        "error": {name: error(name) for name in measured},
        "at_ref": at(REF, REF),
        "certain": at(1.0, REF),
        "certain_rare_ref": at(1.0, RARE_REF),
        "thousandth_of_ref": at(REF / 1000, REF),
    }


def _coefficients(logp: Tensor, ref: float) -> dict[str, Tensor]:
    """The gradient by log π, by name of the loss."""
    logp = logp.detach().clone().requires_grad_()
    ref_logp = torch.full_like(logp, math.log(ref)).detach()
    losses = {name: loss(logp, ref_logp) for name, loss in PLACEMENTS.items()}
    return {name: torch.autograd.grad(loss.sum(), logp)[0] for name, loss in losses.items()}


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def _formulae(logp: Tensor, ref: float) -> dict[str, Tensor]:
    pi = logp.exp()
    log_ratio = (pi / ref).log()
    return {"k1-loss": torch.ones_like(pi), "k1-reward": log_ratio, "k2-loss": log_ratio, "k3-loss": 1 - ref / pi}


def check(numbers: Numbers) -> list[Check]:
    """Formulae, and the behaviour at the ends."""
    error, at_ref, certain = numbers["error"], numbers["at_ref"], numbers["certain"]
    rare, low = numbers["certain_rare_ref"], numbers["thousandth_of_ref"]
    pull_at_ref = max(abs(at_ref[name]) for name in ("k1-reward", "k2-loss", "k3-loss"))
    return [
        below("k1 as loss has coefficient 1", error["k1-loss"], ROUNDING),
        below("k1 in reward has coefficient log π/ref", error["k1-reward"], ROUNDING),
        below("k2 as loss has coefficient log π/ref", error["k2-loss"], ROUNDING),
        below("k3 as loss has coefficient 1 - ref/π", error["k3-loss"], ROUNDING),
        below("at π = ref the coefficients of all but k1 as loss vanish", pull_at_ref, ROUNDING),
        within("at π = ref k1 as loss still has coefficient 1", at_ref["k1-loss"], 1, ROUNDING),
        within("k3 is loose above ref: 0.75 at π = 1", certain["k3-loss"], 1 - REF, ROUNDING),
        within("where the principled one is log 4", certain["k2-loss"], math.log(1 / REF), ROUNDING),
        within(f"k3 saturates at 1: ref = {RARE_REF:g}, π = 1", rare["k3-loss"], 1, 2 * RARE_REF),
        within("where the principled one is log 10⁶", rare["k2-loss"], math.log(1 / RARE_REF), ROUNDING),
        within("k3 explodes below ref: π = ref/1000", low["k3-loss"], -999, ROUNDING),
        within("where the principled one is -log 1000", low["k2-loss"], -math.log(1000), ROUNDING),
    ]


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Coefficient against log π."""
    axes = figure.subplots()
    for name in ("k1-loss", "k3-loss", "k1-reward", "k2-loss"):
        # k2 lies on k1 in reward exactly: a thinner dashed line on top lets both be seen.
        width = 4.0 if name == "k1-reward" else 2.0
        axes.plot(numbers["logp"], numbers["coefficient"][name], linewidth=width, **style(name))
    axes.axvline(math.log(numbers["ref"]), color=GREY, linestyle="--", linewidth=1)
    axes.axhline(0, color=GREY, linewidth=0.6)
    axes.annotate("π = ref = 0.25", (math.log(numbers["ref"]), -15), (-6, 0), textcoords="offset points", ha="right")
    axes.set_ylim(-20, 3)
    axes.set_xlabel("log π of the sampled token (nats)")
    axes.set_ylabel("coefficient on ∇log π")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
