"""The figure of `fig7_frontier`: right answers over the KL, and the KL at equal right answers."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...support.palette import STYLES
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "none": ("no KL", "black", "x"),
    "k1-loss": ("k1 as loss", STYLES["k1-loss"][0], "s"),
    "k1-reward": ("k1 in the reward", STYLES["k1-reward"][0], "o"),
    "k2-loss": ("k2 as loss", STYLES["k1-reward-leave-one-out"][0], "D"),
    "exact-loss": ("exact as loss", STYLES["k3-reward"][0], "v"),
    "exact-discount-0.9": ("exact, discounted future", STYLES["to-go"][0], "P"),
    "k3-loss": ("k3 as loss", STYLES["k3-loss"][0], "^"),
}
"""Label, colour and mark of an arm."""


def draw(numbers: Numbers, figure: "Figure") -> None:
    """A mark for each evaluation of each run; bars for the KL that an arm needs, and for differences at equal KL."""
    figure.set_size_inches(15, 4.4)
    points, needed, gaps = figure.subplots(1, 3, width_ratios=[1.3, 0.8, 1])
    _points(numbers, points)
    arms = {arm: found for arm, found in numbers["arms"].items() if found is not None}
    colours = [LABELS[arm][1] for arm in arms]
    _bars(needed, [LABELS[arm][0] for arm in arms], [each["mean"] for each in arms.values()], arms.values(), colours)
    needed.set(xlabel="KL(π‖ref) per completion, nats", title="KL at 25% right answers, every β")
    words = [name.replace(" answers ", "\nanswers ") for name in numbers["gaps"]]
    found = numbers["gaps"].values()
    _bars(gaps, words, [each["difference"] for each in found], found, ["#999999"] * len(words))
    gaps.set(xlabel="difference of right answers", title="at equal KL")
    handles, labels = points.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LABELS), fontsize=8.5)


def _points(numbers: Numbers, axis: Any) -> None:
    for arm, (label, colour, mark) in LABELS.items():
        own = [point for point in numbers["points"] if point["name"] == arm]
        kl, right = [p["kl"] for p in own], [p["correct_in"] for p in own]
        axis.plot(kl, right, mark, ms=4, color=colour, mfc="none", label=label, lw=0)
    axis.set(xlabel="KL(π‖ref) per completion, nats", ylabel="right answers, in domain", title="every β and evaluation")


def _bars(axis: Any, names: list[str], values: list[float], found: Iterable[Numbers], colours: list[str]) -> None:
    """A bar for each name, with its error and its number."""
    errors = [each["error"] for each in found]
    far = max((abs(value) + error for value, error in zip(values, errors, strict=True)), default=1.0)
    for i, (value, error, colour) in enumerate(zip(values, errors, colours, strict=True)):
        axis.barh(i, value, xerr=error, color=colour, alpha=0.75, capsize=3)
        axis.text(max(value, 0) + error + 0.03 * far, i, f"{value:.2f}", va="center", fontsize=9)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_xlim(min(0.0, *values) - 0.02 * far, 1.2 * far)
    axis.invert_yaxis()
