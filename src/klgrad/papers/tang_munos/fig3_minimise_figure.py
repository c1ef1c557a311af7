"""The figure of `fig3_minimise`: the paper's curves, k3 against vanilla on many problems, and where k3 is slower."""

from typing import TYPE_CHECKING

import torch

from ...support.palette import style
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADES = {1: "#CBC5E3", 2: "#A29BCB", 4: "#7B6FB0", 16: "#5A3E97", 64: "#2F0066"}
"""The colour of each n, from light to dark: shades that no estimator has."""


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Above: KL against steps. Below: the share of experiments that show k3 slower, a panel for each start."""
    figure.set_size_inches(9.6, 7)
    above, below = list(figure.subfigures(2, 1, squeeze=False, height_ratios=(1.2, 1)).flat)
    left, right = above.subplots(1, 2)
    _curves(numbers, left)
    _mean_and_median(numbers, right)
    above.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    axes = below.subplots(1, len(numbers["exact"]), sharey=True)
    for axis, start in zip(axes, numbers["exact"], strict=True):
        _shares(numbers, start, axis)
    axes[0].set_ylabel("experiments with k3 slower")
    below.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)


def _curves(numbers: Numbers, axis: "Axes") -> None:
    for name, seen in numbers["kl"].items():
        mean, error, look = torch.tensor(seen["mean"]), torch.tensor(seen["error"]), style(name)
        axis.plot(numbers["steps"], mean, **look)
        low = (mean - error).clamp(min=1e-6)
        axis.fill_between(numbers["steps"], low, mean + error, color=look["color"], alpha=0.2, lw=0)
    axis.set(yscale="log", xlabel="steps", ylabel="KL(π‖ref)")
    axis.set_title("the paper's figure: n = 4, 100 problems", fontsize=10)


def _mean_and_median(numbers: Numbers, axis: "Axes") -> None:
    """At the paper's n and start, where the two disagree."""
    found = numbers["cells"]["n = 4, start x 1"]
    for method, name in enumerate(("k1-reward", "k3-loss")):
        color = style(name)["color"]
        text = ("vanilla", "k3 as loss")[method]
        axis.plot(numbers["points"], found["mean"][method], color=color, marker="o", ms=3, label=f"{text}, mean")
        axis.plot(numbers["points"], found["median"][method], color=color, ls=":", marker="s", ms=3, label="median")
    axis.set(xscale="log", yscale="log", xlabel="steps")
    axis.set_title(f"the same, {found['problems']:,} problems", fontsize=10)
    axis.legend(fontsize=8)


def _shares(numbers: Numbers, start: str, axis: "Axes") -> None:
    for n, color in SHADES.items():
        shares = numbers["cells"][f"n = {n}, start x {start}"]["experiments"]
        axis.plot(numbers["points"], shares, color=color, marker="o", ms=3, label=f"n = {n}")
    axis.plot(
        numbers["points"], numbers["exact"][start]["experiments"], color="black", ls="--", lw=1, label="exact gradients"
    )
    axis.set(xscale="log", xlabel="steps", ylim=(-0.04, 1.04))
    axis.set_title("the paper's start" if start == "1" else f"start x {start}", fontsize=10)
