"""Draw how far three ways to average a KL loss are from the KL, as the batch grows.

Everything is an exact sum over all batches, averaged over random problems. Run it with `make figures`; it writes
docs/images/large-batches.png and .svg. `numbers` is the generated part of the page.
"""

from functools import cache
from itertools import combinations_with_replacement
from math import factorial, prod
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from klgrad.drawing import BLUE, GREEN, VERMILION, look, write_figure
from klgrad.enumeration import Problem, autoregressive, target_gradients

OUT = Path(__file__).parent.parent / "images" / "large-batches.png"
PROBLEMS = 20
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
WAYS = {
    "divided by the length of each completion": VERMILION,
    "divided by the tokens of the batch": BLUE,
    "divided by a constant": GREEN,
}


@cache
def problems() -> list[Problem]:
    """Random problems with completions of one to three tokens, on-policy."""
    return [autoregressive(2, 3, ends=True, seed=seed, away_from_ref=1.0).on_policy() for seed in range(PROBLEMS)]


@cache
def batches(outcomes: int, size: int) -> tuple[Tensor, Tensor]:
    """How often each completion is in a batch, for every batch, and in how many orders that batch may be drawn."""
    chosen = torch.tensor(list(combinations_with_replacement(range(outcomes), size)))
    counts = torch.nn.functional.one_hot(chosen, outcomes).sum(1)
    ways = [factorial(size) // prod(map(factorial, row)) for row in counts.tolist()]
    return counts.double(), torch.tensor(ways, dtype=torch.float64)


def expected_gradient(problem: Problem, size: int, way: str) -> Tensor:
    """The gradient of k2 as a loss, averaged in one of the three ways, over every batch of a size."""
    counts, ways = batches(len(problem.space), size)
    chance = ways * (counts * problem.logp.sum(-1)).sum(-1).exp()
    slope = (problem.logp - problem.ref_logp)[..., None]
    each, lengths = (slope * problem.scores).sum(1), problem.space.mask.sum(-1).double()
    if way == "divided by the tokens of the batch":
        mean = counts @ each / (counts @ lengths)[:, None]
    elif way == "divided by the length of each completion":
        mean = counts @ (each / lengths[:, None]) / size
    else:
        mean = counts @ each / size
    return chance @ mean


def off(size: int, way: str) -> Tensor:
    """The distance to the token-level reverse KL at the best scale, relative to the gradient, of each problem."""
    found = []
    for problem in problems():
        right, gradient = target_gradients(problem)["reverse-kl-token"], expected_gradient(problem, size, way)
        nearest = (gradient @ right) / (right @ right) * right
        found.append((gradient - nearest).norm() / gradient.norm())
    return torch.stack(found)


def numbers() -> str:
    """The distances of small and large batches, for the page."""
    lines = ["| k2 as a loss | 1 completion | 2 | 4 | 8 | 32 |", "|---|---|---|---|---|---|"]
    for way in WAYS:
        lines.append(f"| {way} | {' | '.join(_with_error(off(size, way)) for size in (1, 2, 4, 8, 32))} |")
    words = f"Mean ± standard error over {PROBLEMS} random problems (seeds 0 to {PROBLEMS - 1}), each summed exactly."
    return "\n".join([*lines, "", words, ""])


def _with_error(each: Tensor) -> str:
    return f"{each.mean():.1%} ± {each.std() / PROBLEMS**0.5:.1%}" if each.mean() > 1e-9 else "0%"


def main() -> None:
    """Draw one panel."""
    plt.rcParams.update(look(11))
    figure, axis = plt.subplots(figsize=(7, 3.6), constrained_layout=True)
    for way, colour in WAYS.items():
        axis.plot(
            SIZES, [float(off(size, way).mean()) for size in SIZES], color=colour, label=way, linewidth=2.5, marker="o"
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(SIZES, [str(size) for size in SIZES])
    axis.set_xlabel("completions in the batch")
    axis.set_ylabel("distance to the right direction")
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axis.legend(fontsize=9.5, loc="center right")
    write_figure(figure, OUT)


if __name__ == "__main__":
    main()
