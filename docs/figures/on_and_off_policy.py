"""Draw how far the expected gradient of a term is from its target as the sampler gets staler.

Everything is an exact sum over all completions, averaged over random problems. Run it with `make figures`; it writes
docs/images/on-and-off-policy.png and .svg. `numbers` is the generated part of the page.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate
from klgrad.drawing import BLUE, GREEN, GREY, VERMILION, look, write_figure
from klgrad.enumeration import Problem, autoregressive, target_gradients
from klgrad.targets import TargetName

OUT = Path(__file__).parent.parent / "images" / "on-and-off-policy.png"
PROBLEMS = 20
DISTANCES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Standard deviation of the sampler's logits from those of π."""

PREFIX = ImportanceWeighting("prefix", bound=None)
TERMS: dict[TargetName, dict[str, tuple[KLTerm, str]]] = {
    "reverse-kl-token": {
        "no weights": (KLTerm(level="token"), VERMILION),
        "ratio of the token": (KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None)), GREY),
        "ratio of the prefix": (KLTerm(level="token", weighting=PREFIX), GREEN),
    },
    "reverse-kl-sequence": {
        "no weights": (KLTerm(), VERMILION),
        "ratio of the prefix, at most 2": (KLTerm(weighting=ImportanceWeighting("prefix", bound=Truncate(2.0))), BLUE),
        "ratio of the prefix": (KLTerm(weighting=PREFIX), GREEN),
    },
}
TITLES = {"reverse-kl-token": "token level", "reverse-kl-sequence": "sequence level"}


@cache
def problems(distance: float) -> list[Problem]:
    """Random problems of up to four tokens, with a sampler at a distance from π."""
    make = lambda seed: autoregressive(3, 4, ends=True, seed=seed, away_from_ref=1.0, off_policy=distance)
    return [make(seed) for seed in range(PROBLEMS)]


def staleness(distance: float) -> float:
    """KL(sampler‖π) of a completion in nats, averaged."""
    each = [(p.probability * (p.behavior_logp - p.logp).sum(-1)).sum() for p in problems(distance)]
    return float(torch.stack(each).mean())


def expected_gradient(term: KLTerm, problem: Problem) -> Tensor:
    """The gradient of the term, summed over every completion that the sampler may draw."""
    logits = problem.logits.clone().requires_grad_()
    live = replace(problem, logits=logits)
    rollout = Rollout(live.logp, problem.ref_logp, problem.space.mask, behavior_logp=problem.behavior_logp)
    each = term(rollout).per_token.sum(-1)
    return torch.autograd.grad((problem.probability * each).sum(), logits)[0].flatten()


def off(term: KLTerm, target: TargetName, distance: float) -> Tensor:
    """The distance to the gradient of the target, relative to its length, of each problem."""
    found = []
    for problem in problems(distance):
        right = target_gradients(problem)[target]
        found.append((expected_gradient(term, problem) - right).norm() / right.norm())
    return torch.stack(found)


def numbers() -> str:
    """The distances at one staleness, for the page."""
    at = 0.6
    lines = ["| level | weights | distance to the right gradient |", "|---|---|---|"]
    for target, terms in TERMS.items():
        for label, (term, _) in terms.items():
            each = off(term, target, at)
            spread = f" ± {each.std() / PROBLEMS**0.5:.0%}" if each.mean() > 1e-9 else ""
            lines.append(f"| {TITLES[target]} | {label} | {each.mean():.0%}{spread} |")
    words = f"At a staleness of {staleness(at):.2f} nats per completion. Mean ± standard error over {PROBLEMS} random"
    return "\n".join([*lines, "", f"{words} problems (seeds 0 to {PROBLEMS - 1}), each summed exactly.", ""])


def main() -> None:
    """Draw a panel for each level."""
    torch.set_num_threads(1)
    plt.rcParams.update(look(11))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    x = [staleness(distance) for distance in DISTANCES]
    for axis, (target, terms) in zip(axes, TERMS.items(), strict=True):
        for label, (term, colour) in terms.items():
            axis.plot(
                x, [float(off(term, target, d).mean()) for d in DISTANCES], color=colour, label=label, linewidth=2.5
            )
        axis.set_title(TITLES[target], loc="left", fontsize=11)
        axis.set_xlabel("staleness: KL(sampler‖π) of a completion, nats")
        axis.legend(fontsize=9.5)
    axes[0].set_ylabel("distance to the right gradient")
    axes[0].yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    write_figure(figure, OUT)


if __name__ == "__main__":
    main()
