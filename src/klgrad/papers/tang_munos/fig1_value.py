"""Averaged over few samples the squared and the variance-reduced estimate of the KL beat the plain log-ratio; over
many, the squared one is stuck at its bias.

Figure 1 of the paper: mean squared error of k1, k2 and k3 as values of KL(π‖ref), against the number of samples,
over 100 problems. We add the exact error of each problem, bias² + variance / n, summed over arms, and compare by
it, problem by problem, in logarithms: the mean over problems is dominated by the few whose ref has heavy tails.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.estimators import k1, k2, k3
from ...drawing import style
from ..study import Check, Numbers, Settings, exceeds, over_repeats
from . import bandits

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
SAMPLES = [2**i for i in range(11)]
FEW, MANY = 4, 1024


def run(settings: Settings) -> Numbers:
    """Simulated and exact squared errors."""
    generator = torch.Generator().manual_seed(settings.seed)
    problems = bandits.draw(settings.size(100, 50), generator)
    logp = problems.logp
    p, values = logp.exp(), {name: k.value(logp - problems.ref_logp) for name, k in ESTIMATORS.items()}
    kl = bandits.divergence(logp, problems.ref_logp)
    exact = {name: _exact_error(value, p, kl) for name, value in values.items()}
    simulated = {name: [] for name in ESTIMATORS}
    for n in SAMPLES:
        counts = bandits.count(p, n, generator)
        for name, value in values.items():
            simulated[name].append(((value * counts).sum(-1) / n - kl).square())
    at = SAMPLES.index
    return {
        "samples": SAMPLES,
        "problems": len(p),
        "kl": float(kl.mean()),
        "simulated": {name: over_repeats(torch.stack(x)) for name, x in simulated.items()},
        "exact": {name: x.mean(-1).tolist() for name, x in exact.items()},
        "paired": {
            "k1 / k2, few": over_repeats((exact["k1"][at(FEW)] / exact["k2"][at(FEW)]).log()),
            "k1 / k3, few": over_repeats((exact["k1"][at(FEW)] / exact["k3"][at(FEW)]).log()),
            "k2 / k1, many": over_repeats((exact["k2"][at(MANY)] / exact["k1"][at(MANY)]).log()),
        },
    }


def _exact_error(value: Tensor, p: Tensor, kl: Tensor) -> Tensor:
    """(len(SAMPLES), R) bias² + variance / n."""
    mean = (p * value).sum(-1)
    variance = (p * (value - mean[:, None]).square()).sum(-1)
    return torch.stack([(mean - kl).square() + variance / n for n in SAMPLES])


def check(numbers: Numbers) -> list[Check]:
    """The claim, sentence by sentence."""
    paired = {name: (x["mean"], x["error"]) for name, x in numbers["paired"].items()}
    return [
        exceeds(f"at n = {FEW} squared is more accurate than vanilla", *paired["k1 / k2, few"]),
        exceeds("variance reduced is more accurate than vanilla, at every n alike", *paired["k1 / k3, few"]),
        exceeds(f"at n = {MANY} squared is less accurate than vanilla", *paired["k2 / k1, many"]),
    ]


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Error against samples, lines exact, points simulated."""
    axis = figure.subplots()
    for name in ESTIMATORS:
        look, seen = style(name), numbers["simulated"][name]
        axis.plot(numbers["samples"], numbers["exact"][name], **look)
        axis.errorbar(numbers["samples"], seen["mean"], seen["error"], fmt="o", ms=4, color=look["color"], capsize=2)
    axis.set(xscale="log", yscale="log", xlabel="samples n", ylabel="mean squared error of the KL estimate")
    number = numbers["problems"]
    axis.set_title(f"means over {number} problems; lines: exact; points: simulated, ± 1 SE", fontsize=10)
    axis.legend()
