"""Coefficients and expected gradients of the placements of a KL, summed over every outcome, on- and off-policy."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from ...core.estimators import k1, k2, k3
from ...core.importance import MAX_LOG_RATIO, Clip, token_ratio
from ...core.rollout import Rollout
from ...drawing import BLACK, GREY, STYLES, style
from ...enumeration import Problem, bandit, target_gradients
from ..study import Check, Figure, Numbers, Settings, below, exceeds, over_repeats, within

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


def relative_gap(gradient: Tensor, target: Tensor) -> float:
    """The distance of a gradient from its target, relative to the norm of the target."""
    return ((gradient - target).norm() / target.norm()).item()


REF = 0.25
LOWEST_LOGP = -7.0
RARE_REF = 1e-6
"""A reference so small that π = 1 lies deep in k3's saturated part."""
ROUNDING = 1e-12
"""Relative. The coefficients are elementary functions of one float64; nothing is summed."""


class Coefficients:
    """k2 as loss puts log π/ref on the score, as k1 in reward does; k3 as loss saturates above ref, explodes below.

    Figure 1 of Liu et al. (arXiv 2510.01555): the coefficient on ∇log π against log π, with ref = 0.25. Here each
    coefficient is measured, by autograd through this package's estimators, and compared with the formula. The range
    of log π is ours; as π ≤ 1 the figure itself ends at 1 - ref = 0.75, so that the limit 1 is checked at rarer
    references as well.
    """

    def run(self, settings: Settings) -> Numbers:
        logp = torch.linspace(LOWEST_LOGP, 0, settings.size(281, 57), dtype=torch.float64)
        pi = logp.exp()
        formula = {"k1-loss": torch.ones_like(pi), "k3-loss": 1 - REF / pi}
        formula |= dict.fromkeys(("k1-reward", "k2-loss"), (pi / REF).log())
        measured = _measured_coefficients(logp, REF)
        error = lambda name: ((measured[name] - formula[name]).abs() / formula[name].abs().clamp(min=1)).max().item()
        double = lambda x: torch.tensor(x, dtype=torch.float64)
        at = lambda pi, ref: {k: c.item() for k, c in _measured_coefficients(double(math.log(pi)), ref).items()}
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

    def check(self, numbers: Numbers) -> list[Check]:
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

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        axes = figure.subplots()
        for name in ("k1-loss", "k3-loss", "k1-reward", "k2-loss"):
            # k2 lies on k1 in reward exactly: a thinner dashed line on top lets both be seen.
            width = 4.0 if name == "k1-reward" else 2.0
            axes.plot(numbers["logp"], numbers["coefficient"][name], linewidth=width, **style(name))
        at = math.log(numbers["ref"])
        axes.axvline(at, color=GREY, linestyle="--", linewidth=1)
        axes.axhline(0, color=GREY, linewidth=0.6)
        axes.annotate("π = ref = 0.25", (at, -15), (-6, 0), textcoords="offset points", ha="right")
        axes.set(ylim=(-20, 3), xlabel="log π of the sampled token (nats)", ylabel="coefficient on ∇log π")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _measured_coefficients(logp: Tensor, ref: float) -> dict[str, Tensor]:
    """The gradient by log π, by name of the loss."""
    logp = logp.detach().clone().requires_grad_()
    ref_logp = torch.full_like(logp, math.log(ref)).detach()
    losses = {name: loss(logp, ref_logp) for name, loss in PLACEMENTS.items()}
    return {name: torch.autograd.grad(loss.sum(), logp)[0] for name, loss in losses.items()}


THEOREM_ARMS = (3, 10, 30)
"""At least three: with two the gradient is one number, and those of both divergences cross somewhere by accident."""
NEAREST, FARTHEST = 0.05, 3.0
"""Standard deviation of ref's logits from π's."""
EXACT = 1e-9
"""Relative; float64 sums of at most thirty terms leave about 1e-14."""
DIFFERENT = 1e-4
"""Relative; a hundred thousand times `EXACT`."""


class Theorem:
    """On-policy, k1 in reward and k2 as loss are exactly the gradient of KL(π‖ref); k1 and k3 as loss are not.

    Theorem 5.1 of Liu et al. (arXiv 2510.01555), tested by summing over every outcome of random bandits in float64:
    each loss is differentiated by autograd, weighted with the probability of its sample, and compared with the gradient
    of the divergence itself. Number of arms, distances to ref and logits are ours. The theorem does not state that k3
    as loss is exactly the gradient of the *other* divergence, KL(ref‖π); this is checked because it shows what k3
    descends instead.
    """

    def run(self, settings: Settings) -> Numbers:
        count = settings.size(150, 30)
        distances = torch.logspace(math.log10(NEAREST), math.log10(FARTHEST), count).tolist()
        problems = [
            bandit(arms, seed=1000 * settings.seed + i, away_from_ref=distance)
            for i, (arms, distance) in enumerate(zip(cycle(THEOREM_ARMS), distances, strict=False))
        ]
        measured = [_measure(problem.on_policy()) for problem in problems]
        return {name: [m[name] for m in measured] for name in measured[0]}

    def check(self, numbers: Numbers) -> list[Check]:
        """Each half of the theorem, and the two that are not in it."""
        worst = lambda name: max(numbers[name])
        nearest, forward = min(numbers["k3-loss"]), worst("k3-loss-from-forward")
        differs = f"smallest relative gap {nearest:.3g}, largest {worst('k3-loss'):.3g}"
        return [
            below("k1 in reward is the reverse KL gradient (largest relative error)", worst("k1-reward"), EXACT),
            below("k2 as loss is the reverse KL gradient (largest relative error)", worst("k2-loss"), EXACT),
            below("k1 as loss has no gradient (largest, relative to reverse KL's)", worst("k1-loss-size"), EXACT),
            Check("k3 as loss is not the reverse KL gradient, on any problem", differs, nearest > DIFFERENT),
            below("k3 as loss is the forward KL gradient (largest relative error)", forward, EXACT),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        axes = figure.subplots()
        markers = {"k1-loss": "s", "k3-loss": "o", "k1-reward": "x", "k2-loss": "+"}
        for name, marker in markers.items():
            look = {**style(name), "linestyle": "none", "marker": marker, "markersize": 5, "markerfacecolor": "none"}
            # An error of exactly 0 has no place on a logarithmic axis.
            axes.plot(numbers["kl"], [max(gap, 1e-17) for gap in numbers[name]], **look)
        axes.set(xscale="log", yscale="log", ylim=(3e-18, 30))
        axes.set(xlabel="KL(π‖ref) of the bandit (nats)", ylabel="relative distance from ∇KL(π‖ref)")
        axes.set_title(f"each of {len(numbers['kl'])} bandits, exact", fontsize=10)
        axes.text(0.98, 0.24, "equal, up to float64 rounding", transform=axes.transAxes, ha="right")
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.62))


def _measure(problem: Problem) -> dict[str, float]:
    targets = target_gradients(problem)
    reverse, forward = targets["reverse-kl-sequence"], targets["forward-kl-sequence"]
    gradients = {name: expected_gradient(problem, loss) for name, loss in PLACEMENTS.items()}
    return {
        "kl": problem.prefix_kl().item(),
        **{name: relative_gap(gradient, reverse) for name, gradient in gradients.items()},
        "k1-loss-size": (gradients["k1-loss"].norm() / reverse.norm()).item(),
        "k3-loss-from-forward": relative_gap(gradients["k3-loss"], forward),
    }


ARMS = 10
DISTANCES = (0.0, *(2.0**i for i in range(-6, 2)))
"""Standard deviation of the sampler's logits from π's."""
CLIP = Clip(0.8, 1.2)
SOUND = ("k1-reward", "k2-loss")
WEIGHTINGS: dict[str, Callable[[Tensor], Tensor]] = {"none": torch.ones_like, "ratio": lambda x: x, "clipped": CLIP}
BIASED = 1e-6
"""Relative; a thousand times `EXACT`."""


class OffPolicy:
    """Off-policy, k2 as loss and k1 in reward are biased; the ratio π/μ makes them exact again; clipping it biases them
    again.

    The off-policy correction of Liu et al. (arXiv 2510.01555): treat the coefficient of a KL term like an advantage and
    weight it by the importance ratio. Tested by summing over every outcome of random bandits in float64, with the
    sampler μ at several distances from π along straight lines of logits. Distances, arms and the clip range 1 ± 0.2
    (usual in PPO) are ours; clipping here bounds the ratio on both sides for either sign of the coefficient.
    """

    def run(self, settings: Settings) -> Numbers:
        """Relative distance from the reverse KL gradient: by weighting, placement, bandit and distance."""
        count = settings.size(24, 8)
        bandits = [bandit(ARMS, seed=1000 * settings.seed + i, away_from_ref=1.0, off_policy=1.0) for i in range(count)]
        targets = [target_gradients(problem)["reverse-kl-sequence"] for problem in bandits]
        logits = lambda problem, distance: torch.lerp(problem.logits, problem.behavior_logits, distance)
        sampled = [[replace(x, behavior_logits=logits(x, distance)) for distance in DISTANCES] for x in bandits]
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

    def check(self, numbers: Numbers) -> list[Check]:
        """On-policy nothing is lost; off-policy only the whole ratio repairs."""
        none, ratio, clipped = (_table(numbers, weighting) for weighting in WEIGHTINGS)
        clips = torch.tensor(numbers["clips"]).expand_as(clipped)
        on_policy = max(table[..., 0].max().item() for table in (none, ratio, clipped))
        unweighted, cut = none[..., 1:].min().item(), min(clipped[clips].tolist(), default=0.0)
        smallest, cases = "smallest {:.3g}", int(clips[1].sum())
        growth = lambda table: (table[1, :, -1] / table[1, :, -3]).log()
        return [
            below("on-policy every weighting is exact (largest relative error)", on_policy, EXACT),
            Check("off-policy unweighted is biased, on every bandit", smallest.format(unweighted), unweighted > BIASED),
            exceeds("the unweighted bias grows (log, distance 2 against 1/2)", over_repeats(growth(none))),
            below("with the ratio exact, k1 in reward (largest relative error)", ratio[0].max().item(), EXACT),
            below("with the ratio exact, k2 as loss (largest relative error)", ratio[1].max().item(), EXACT),
            below("clipped at 1 ± 0.2, exact where nothing is clipped", clipped[~clips].max().item(), EXACT),
            Check("clipped, biased wherever something is", f"{smallest.format(cut)} of {cases} cases", cut > BIASED),
            exceeds("the clipped bias grows (log, distance 2 against 1/2)", over_repeats(growth(clipped))),
            below("no ratio meets its cap (log)", numbers["largest_log_ratio"], MAX_LOG_RATIO),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
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
            axes.plot(distance, table.median(0).values, f".{line}", color=colour, lw=2, label=label)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", ylim=(1e-17, 30), ylabel="relative distance from ∇KL(π‖ref)")
        axes.set_xlabel("distance of the sampler μ from π (std of the logits' difference)")
        axes.set_title(f"medians of {len(numbers['clips'])} bandits; bands: middle 90%", fontsize=10)
        title = "k2 as loss, or k1 in reward"
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.45), title=title, alignment="left")


def _rollout(problem: Problem) -> Rollout:
    """Every outcome once, as a batch."""
    return Rollout(problem.logp, problem.ref_logp, problem.space.mask, behavior_logp=problem.behavior_logp)


def _gradient(problem: Problem, placement: str, weighting: str) -> Tensor:
    weight = WEIGHTINGS[weighting](token_ratio(_rollout(problem)))
    loss = PLACEMENTS[placement]
    return expected_gradient(problem, lambda logp, ref_logp: weight * loss(logp, ref_logp))


def _table(numbers: Numbers, weighting: str) -> Tensor:
    """(placements, bandits, distances)."""
    return torch.tensor([numbers["gap"][weighting][p] for p in SOUND], dtype=torch.float64)
