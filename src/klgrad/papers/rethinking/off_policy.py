"""Off-policy, k2 as loss and k1 in reward are biased; the ratio π/μ makes them exact again; clipping it biases them
again.

The off-policy correction of Liu et al. (arXiv 2510.01555): treat the coefficient of a KL term like an advantage and
weight it by the importance ratio. Tested by summing over every outcome of random bandits in float64, with the sampler μ
at several distances from π along straight lines of logits. Distances, arms and the clip range 1 ± 0.2 (usual in PPO)
are ours; clipping here bounds the ratio on both sides for either sign of the coefficient.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.importance import MAX_LOG_RATIO, Clip, token_ratio
from ...core.rollout import Rollout
from ...drawing import BLACK, STYLES
from ...enumeration import Problem, bandit, target_gradients
from ..study import Check, Numbers, Settings, below, exceeds_zero
from .fig1_coefficients import PLACEMENTS, expected_gradient, relative_gap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ARMS = 10
DISTANCES = (0.0, *(2.0**i for i in range(-6, 2)))
"""Standard deviation of the sampler's logits from π's."""

CLIP = Clip(0.8, 1.2)
SOUND = ("k1-reward", "k2-loss")
WEIGHTINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "ratio": lambda ratio: ratio,
    "clipped": CLIP,
}

EXACT = 1e-9
"""Relative; float64 leaves about 1e-14."""

DIFFERENT = 1e-6
"""Relative; a thousand times `EXACT`."""


def run(settings: Settings) -> Numbers:
    """Relative distance from the reverse KL gradient, by weighting, placement, bandit and distance of the sampler."""
    count = settings.size(24, 8)
    bandits = [bandit(ARMS, seed=1000 * settings.seed + i, away_from_ref=1.0, off_policy=1.0) for i in range(count)]
    targets = [target_gradients(problem)["reverse-kl-sequence"] for problem in bandits]
    sampled = [[_sampled_at(problem, distance) for distance in DISTANCES] for problem in bandits]
    gap = lambda weighting, placement: [
        [relative_gap(_gradient(problem, placement, weighting), target) for problem in row]
        for row, target in zip(sampled, targets, strict=True)
    ]
    ratios = torch.stack([torch.stack([token_ratio(_rollout(problem)) for problem in row]) for row in sampled])
    return {
        "distance": list(DISTANCES),
        "gap": {w: {placement: gap(w, placement) for placement in SOUND} for w in WEIGHTINGS},
        "clips": (CLIP(ratios) != ratios).flatten(2).any(-1).tolist(),
        "largest_log_ratio": ratios.log().max().item(),
    }


def _sampled_at(problem: Problem, distance: float) -> Problem:
    behavior_logits = torch.lerp(problem.logits, problem.behavior_logits, distance)
    return replace(problem, behavior_logits=behavior_logits)


def _rollout(problem: Problem) -> Rollout:
    """Every outcome once, as a batch."""
    return Rollout(problem.logp, problem.ref_logp, problem.space.mask, behavior_logp=problem.behavior_logp)


def _gradient(problem: Problem, placement: str, weighting: str) -> Tensor:
    weight = WEIGHTINGS[weighting](token_ratio(_rollout(problem)))
    loss = PLACEMENTS[placement]
    return expected_gradient(problem, lambda logp, ref_logp: weight * loss(logp, ref_logp))


def check(numbers: Numbers) -> list[Check]:
    """On-policy nothing is lost; off-policy only the whole ratio repairs."""
    none, ratio, clipped = (_table(numbers, weighting) for weighting in WEIGHTINGS)
    clips = torch.tensor(numbers["clips"]).expand_as(clipped)
    on_policy = max(table[..., 0].max().item() for table in (none, ratio, clipped))
    unweighted, cut = none[..., 1:].min().item(), min(clipped[clips].tolist(), default=0.0)
    growth = lambda table: (table[1, :, -1] / table[1, :, -3]).log()
    return [
        below("on-policy every weighting is exact (largest relative error)", on_policy, EXACT),
        Check("off-policy unweighted is biased, on every bandit", f"smallest {unweighted:.3g}", unweighted > DIFFERENT),
        exceeds_zero("the unweighted bias grows (log, distance 2 against 1/2)", growth(none)),
        below("with the ratio exact, k1 in reward (largest relative error)", ratio[0].max().item(), EXACT),
        below("with the ratio exact, k2 as loss (largest relative error)", ratio[1].max().item(), EXACT),
        below("clipped at 1 ± 0.2, exact where nothing is clipped", clipped[~clips].max().item(), EXACT),
        Check(
            "clipped, biased wherever something is",
            f"smallest {cut:.3g} of {int(clips[1].sum())} cases",
            cut > DIFFERENT,
        ),
        exceeds_zero("the clipped bias grows (log, distance 2 against 1/2)", growth(clipped)),
        below("no ratio meets its cap (log)", numbers["largest_log_ratio"], MAX_LOG_RATIO),
    ]


def _table(numbers: Numbers, weighting: str) -> Tensor:
    """(placements, bandits, distances)."""
    return torch.tensor([numbers["gap"][weighting][p] for p in SOUND], dtype=torch.float64)


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Relative bias against the distance of the sampler, for k2 as loss (k1 in reward is the same)."""
    axes = figure.subplots()
    looks = {
        "none": (STYLES["k2-loss"][0], "--", "unweighted"),
        "clipped": (STYLES["k3-loss-clamped"][0], "-", "ratio clipped at 1 ± 0.2"),
        "ratio": (BLACK, "-", "whole ratio π/μ"),
    }
    distance = numbers["distance"][1:]
    for weighting, (colour, line, label) in looks.items():
        # Rounding may leave exactly 0, which has no place on a logarithmic axis.
        table = _table(numbers, weighting)[1, :, 1:].clamp(min=1e-17)
        low, high = table.quantile(0.05, 0), table.quantile(0.95, 0)
        axes.fill_between(distance, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(distance, table.median(0).values, color=colour, linestyle=line, linewidth=2, marker=".", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(1e-17, 30)
    axes.set_xlabel("distance of the sampler μ from π (std of the logits' difference)")
    axes.set_ylabel("relative distance from ∇KL(π‖ref)")
    count = len(_table(numbers, "none")[1])
    axes.set_title(f"medians of {count} bandits; bands: middle 90%", fontsize=10)
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.45), title="k2 as loss, or k1 in reward", alignment="left")
