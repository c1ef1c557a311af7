"""Trained with k3 as a loss, π converges to the optimum of the forward-KL problem, π*_rev, and not to π*.

Figure 6 of the paper: for k3 as a loss, converged KL of π to π* and to π*_rev against the number of samples, at β =
1 (our choice), both over KL(ref‖π*).
"""

from typing import TYPE_CHECKING

from ..palette import BLUE, ORANGE
from ..study import Check, Numbers, Settings, exceeds, over_repeats
from .regularised import BETA, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = [4, 16, 64, 256]
METHOD = ("k3-loss",)


def run(settings: Settings) -> Numbers:
    """Where k3 as a loss ends, seen from either optimum."""
    paths = {n: simulate(settings, n, BETA, METHOD) for n in SAMPLES}
    star = {n: x.converged(x.to_optimum)[0] for n, x in paths.items()}
    star_rev = {n: x.converged(x.to_forward_optimum)[0] for n, x in paths.items()}
    first, last = SAMPLES[0], SAMPLES[-1]
    return {
        "samples": SAMPLES,
        "to π*": [over_repeats(star[n]) for n in SAMPLES],
        "to π*_rev": [over_repeats(star_rev[n]) for n in SAMPLES],
        "log π* over π*_rev, last": over_repeats((star[last] / star_rev[last]).log()),
        "log first over last, π*_rev": over_repeats((star_rev[first] / star_rev[last]).log()),
        "log first over last, π*": over_repeats((star[first] / star[last]).log()),
    }


def check(numbers: Numbers) -> list[Check]:
    """The claim, sentence by sentence."""
    nearer, gained, stuck = (
        (numbers[k]["mean"], numbers[k]["error"])
        for k in ("log π* over π*_rev, last", "log first over last, π*_rev", "log first over last, π*")
    )
    return [
        exceeds(f"at n = {SAMPLES[-1]} it is nearer π*_rev than π*", *nearer),
        exceeds("with more samples it comes nearer π*_rev", *gained),
        Check("and not nearer π*", f"z = {stuck[0] / stuck[1]:.1f}", stuck[0] / stuck[1] < 4.0),
    ]


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Converged KL to either optimum against n."""
    axis = figure.subplots()
    for name, colour, line in (("to π*", ORANGE, "-"), ("to π*_rev", BLUE, "--")):
        ends = numbers[name]
        axis.errorbar(
            numbers["samples"],
            [x["mean"] for x in ends],
            [x["error"] for x in ends],
            marker="o",
            capsize=3,
            color=colour,
            linestyle=line,
            label=f"k3 as loss, KL {name}",
        )
    axis.set(xscale="log", yscale="log", xlabel="samples n", ylabel="converged KL / KL(ref‖π*)")
    axis.set_xticks(numbers["samples"], [str(n) for n in numbers["samples"]])
    axis.set_xticks([], minor=True)
    axis.legend()
