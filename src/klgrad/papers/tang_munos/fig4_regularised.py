"""Maximising a reward under a KL penalty, the vanilla gradients bring π towards the optimum π*; k1 and k3
differentiated as losses do not.

Figure 4 of the paper: KL(π‖π*) over its initial value against steps, n = 4. β and the number of steps are not given; we
take 1000 steps and sweep β. At β = 1 the figure looks as printed. At β = 0.1 the reward dominates, and all methods,
including the analytic one, hardly differ after these steps. The checks marked as ours are about the sweep.
"""

from typing import TYPE_CHECKING

import torch

from ...support.palette import style
from ..study import Check, Numbers, Settings, exceeds, no_gain, over_repeats
from .regularised import BETA, EVERY, METHODS, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = 4
BETAS = [0.1, 0.3, 1.0, 3.0]


def run(settings: Settings) -> Numbers:
    """Paths at β = 1, and where each method ends for every β."""
    paths = {
        beta: simulate(settings, SAMPLES, beta, settings.size(1000, 800 if beta == BETA else 300)) for beta in BETAS
    }
    main = paths[BETA].to_optimum
    ends = {beta: dict(zip(METHODS, x.converged(x.to_optimum), strict=True)) for beta, x in paths.items()}
    return {
        "steps": [EVERY * i for i in range(main.shape[1])],
        "normalised kl": {name: over_repeats(x) for name, x in zip(METHODS, main, strict=True)},
        "betas": BETAS,
        "converged": {name: [over_repeats(ends[beta][name]) for beta in BETAS] for name in METHODS},
        "log end over start": {name: over_repeats(ends[BETA][name].log()) for name in METHODS},
        "log k3 over vanilla": {
            str(beta): over_repeats((end["k3-loss"] / end["k1-reward"]).log()) for beta, end in ends.items()
        },
        "log vanilla over leave-one-out": over_repeats(
            (ends[BETA]["k1-reward"] / ends[BETA]["k1-reward-leave-one-out"]).log()
        ),
    }


def check(numbers: Numbers) -> list[Check]:
    """The claim, sentence by sentence, at β = 1; then what the sweep adds."""
    gain, error = -numbers["log end over start"]["k3-loss"]["mean"], numbers["log end over start"]["k3-loss"]["error"]
    end = {name: (x["mean"], x["error"]) for name, x in numbers["log end over start"].items()}
    worse = {beta: (x["mean"], x["error"]) for beta, x in numbers["log k3 over vanilla"].items()}
    saved = numbers["log vanilla over leave-one-out"]
    approach = ["exact", "k1-reward", "k1-reward-leave-one-out"]
    return [
        *(exceeds(f"{name} approaches π*", -end[name][0], end[name][1]) for name in approach),
        exceeds("k1 as loss ends further from π* than it began", *end["k1-loss"]),
        no_gain("k3 as loss ends no nearer π* than it began", gain, error),
        *(exceeds(f"k3 as loss ends further from π* than vanilla, β = {b}", *worse[b]) for b in ("0.3", "1.0", "3.0")),
        exceeds("leave-one-out ends nearer than vanilla", saved["mean"], saved["error"]),
    ]


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Paths at β = 1, and the ends for every β."""
    paths, sweep = figure.subplots(1, 2, width_ratios=(1.4, 1))
    for name in METHODS:
        look, seen = style(name), numbers["normalised kl"][name]
        mean, error = torch.tensor(seen["mean"]), torch.tensor(seen["error"])
        paths.plot(numbers["steps"], mean, **look)
        paths.fill_between(
            numbers["steps"], (mean - error).clamp(min=1e-4), mean + error, color=look["color"], alpha=0.2, lw=0
        )
        ends = [x["mean"] for x in numbers["converged"][name]]
        sweep.plot(numbers["betas"], ends, marker="o", ms=4, **look)
    paths.axhline(1, color="#999999", lw=0.8)
    paths.set(yscale="log", xlabel="steps", ylabel="KL(π‖π*) / KL(ref‖π*)")
    paths.set_title(f"β = {BETA:g}, n = {SAMPLES}", fontsize=10)
    sweep.axhline(1, color="#999999", lw=0.8)
    sweep.set(xscale="log", yscale="log", xlabel="β", ylabel="the same, at the end")
    figure.legend(*paths.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
