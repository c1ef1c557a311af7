"""Trained with k3 as a loss, π converges to the optimum of the forward-KL problem, π*_rev, and not to π*.

Figure 6 of the paper: for k3 as a loss, converged KL of π to π* and to π*_rev against the number of samples, both
over KL(ref‖π*). β and the number of steps are not given: β = 1 and 3000 steps here, the mean over the last fifth.
Medians are drawn: a few problems are slow. β = 0.3 and 3 are ours.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...drawing import BLACK, ORANGE
from ..study import Check, Numbers, Settings, exceeds, no_gain, ours, over_repeats
from .bandits import BETA, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SAMPLES = [4, 16, 64, 256]
METHOD = ("k3-loss",)
OTHER_BETAS = [0.3, 3.0]


def run(settings: Settings) -> Numbers:
    """Where k3 as a loss ends, seen from either optimum."""
    steps = settings.size(3000, 400)
    paths = {n: simulate(settings, n, BETA, steps, METHOD) for n in SAMPLES}
    # At a small β the reward's pull is weak and the way long: too long for a quick run.
    betas = OTHER_BETAS if not settings.quick else OTHER_BETAS[-1:]
    swept = {beta: simulate(settings, 64, beta, steps, METHOD) for beta in betas}
    star = {n: x.converged(x.to_optimum)[0] for n, x in paths.items()}
    star_rev = {n: x.converged(x.to_forward_optimum)[0] for n, x in paths.items()}
    first, last = SAMPLES[0], SAMPLES[-1]
    return {
        "samples": SAMPLES,
        "problems": len(star[first]),
        "to π*": [_quartiles(star[n]) for n in SAMPLES],
        "to π*_rev": [_quartiles(star_rev[n]) for n in SAMPLES],
        "log π* over π*_rev, other β": {
            str(beta): over_repeats((x.converged(x.to_optimum) / x.converged(x.to_forward_optimum))[0].log())
            for beta, x in swept.items()
        },
        "log π* over π*_rev, last": over_repeats((star[last] / star_rev[last]).log()),
        "log first over last, π*_rev": over_repeats((star_rev[first] / star_rev[last]).log()),
        "log first over last, π*": over_repeats((star[first] / star[last]).log()),
    }


def _quartiles(x: Tensor) -> list[float]:
    return x.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()


def check(numbers: Numbers) -> list[Check]:
    """The claim, sentence by sentence."""
    nearer, gained, stuck = (
        (numbers[k]["mean"], numbers[k]["error"])
        for k in ("log π* over π*_rev, last", "log first over last, π*_rev", "log first over last, π*")
    )
    return [
        exceeds(f"at n = {SAMPLES[-1]} it is nearer π*_rev than π*", *nearer),
        exceeds("with more samples it comes nearer π*_rev", *gained),
        no_gain("and not nearer π*", *stuck),
        *ours(
            *(
                exceeds(f"nearer π*_rev than π* at β = {beta}", x["mean"], x["error"])
                for beta, x in numbers["log π* over π*_rev, other β"].items()
            )
        ),
    ]


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Converged KL to either optimum against n."""
    axis = figure.subplots()
    for name, colour, line in (("to π*", ORANGE, "-"), ("to π*_rev", BLACK, "--")):
        low, middle, high = zip(*numbers[name], strict=True)
        axis.plot(numbers["samples"], middle, marker="o", color=colour, linestyle=line, label=f"k3 as loss, KL {name}")
        axis.fill_between(numbers["samples"], low, high, color=colour, alpha=0.15, lw=0)
    axis.set(xscale="log", yscale="log", xlabel="samples n", ylabel="KL / KL(ref‖π*) at the end")
    axis.set_title(f"medians of {numbers['problems']} problems; bands: quartiles", fontsize=10)
    axis.set_xticks(numbers["samples"], [str(n) for n in numbers["samples"]])
    axis.set_xticks([], minor=True)
    axis.legend()
