"""With more samples per step the vanilla gradients end nearer to π*; k3 as a loss does not, because it has another
target.

Figure 5 of the paper: converged KL(π‖π*), over its initial value, against the number of samples n. β and the number of
steps are not given: β = 1 and 3000 steps here, the mean over the last fifth; the analytic line shows how far the runs
are from convergence. At β = 3, which is also ours, k3 as a loss does gain from more samples: there the optima of the
two problems are near each other.
"""

from typing import TYPE_CHECKING

from ..study import Check, Comparison, Numbers, Settings, exceeds, no_gain, ours, over_repeats
from .bandits import BETA, METHODS, looks, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SAMPLES = [4, 16, 64]
OTHER_BETA = 3.0


def run(settings: Settings) -> Numbers:
    """Where each method ends, by n."""
    methods = (*METHODS, *settings.arms)
    paths = {n: simulate(settings, n, BETA, settings.size(3000, 400), methods) for n in SAMPLES}
    other = {n: simulate(settings, n, OTHER_BETA, settings.size(1000, 200), ("k3-loss",)) for n in (4, 64)}
    few, many = (other[n].converged(other[n].to_optimum)[0] for n in (4, 64))
    ends = {n: dict(zip(methods, x.converged(x.to_optimum), strict=True)) for n, x in paths.items()}
    first, last = ends[SAMPLES[0]], ends[SAMPLES[-1]]
    return {
        "samples": SAMPLES,
        "problems": len(first["k3-loss"]),
        "converged": {name: [over_repeats(ends[n][name]) for n in SAMPLES] for name in methods},
        "log first over last": {name: over_repeats((first[name] / last[name]).log()) for name in METHODS},
        "log first over last, k3, other β": over_repeats((few / many).log()),
        "log k3 over vanilla": over_repeats((last["k3-loss"] / last["k1-reward"]).log()),
    }


def check(numbers: Numbers) -> list[Check]:
    """The claim, sentence by sentence."""
    gained = {name: (x["mean"], x["error"]) for name, x in numbers["log first over last"].items()}
    gap = numbers["log k3 over vanilla"]
    other = numbers["log first over last, k3, other β"]
    return [
        exceeds("vanilla ends nearer π* with 64 samples than with 4", *gained["k1-reward"]),
        exceeds("leave-one-out does too", *gained["k1-reward-leave-one-out"]),
        no_gain("k3 as loss gains nothing", *gained["k3-loss"]),
        exceeds("at 64 samples k3 as loss is further from π* than vanilla", gap["mean"], gap["error"]),
        *ours(exceeds(f"at β = {OTHER_BETA:g} k3 as loss does gain", other["mean"], other["error"])),
    ]


def compare(numbers: Numbers) -> Comparison:
    """Where each arm ends, by the number of samples."""
    rows = {name: [x["mean"] for x in ends] for name, ends in numbers["converged"].items()}
    return Comparison("KL(π‖π*) / KL(ref‖π*) at the end", [f"n = {n}" for n in numbers["samples"]], rows)


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Converged KL against n."""
    axis = figure.subplots()
    for name, look in looks(numbers["converged"]).items():
        ends = numbers["converged"][name]
        axis.errorbar(
            numbers["samples"],
            [x["mean"] for x in ends],
            [x["error"] for x in ends],
            marker="o",
            ms=4,
            capsize=3,
            **look,
        )
    axis.axhline(1, color="#999999", lw=0.8)
    axis.set(xscale="log", yscale="log", xlabel="samples n", ylabel="KL(π‖π*) / KL(ref‖π*) at the end")
    axis.set_xticks(numbers["samples"], [str(n) for n in numbers["samples"]])
    axis.set_xticks([], minor=True)
    axis.set_title(f"means over {numbers['problems']} problems, ± 1 SE", fontsize=10)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
