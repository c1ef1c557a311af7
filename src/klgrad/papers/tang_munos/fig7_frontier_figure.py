"""The figure of `fig7_frontier`: right answers over the KL, and the KL at equal right answers."""

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
    "k3-loss": ("k3 as loss", STYLES["k3-loss"][0], "^"),
}
"""Label, colour and mark of an arm."""


def draw(numbers: Numbers, figure: "Figure") -> None:
    """A mark for each evaluation of each run; bars for the KL that an arm needs."""
    shares = list(next(iter(numbers["arms"].values())))
    figure.set_size_inches(4.2 + 4.2 * len(shares), 4.4)
    points, *bars = figure.subplots(1, 1 + len(shares), width_ratios=[1.4] + [1] * len(shares))
    _points(numbers, points)
    for axis, share in zip(bars, shares, strict=True):
        _bars(numbers, axis, share)
    handles, labels = points.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LABELS), fontsize=8.5)


def _points(numbers: Numbers, axis: Any) -> None:
    for arm, (label, colour, mark) in LABELS.items():
        own = [point for point in numbers["points"] if point["name"] == arm]
        kl, right = [p["kl"] for p in own], [p["correct_in"] for p in own]
        axis.plot(kl, right, mark, ms=4, color=colour, mfc="none", label=label, lw=0)
    axis.set(xlabel="KL(π‖ref) per completion, nats", ylabel="right answers, in domain", title="every β and evaluation")


def _bars(numbers: Numbers, axis: Any, share: str) -> None:
    """A bar for each arm that has a value, with its name and number."""
    arms = [arm for arm in LABELS if numbers["arms"][arm][share] is not None]
    found = [numbers["arms"][arm][share] for arm in arms]
    far = max(each["mean"] + each["error"] for each in found)
    for i, (arm, each) in enumerate(zip(arms, found, strict=True)):
        axis.barh(i, each["mean"], xerr=each["error"], color=LABELS[arm][1], alpha=0.75, capsize=3)
        axis.text(each["mean"] + each["error"] + 0.03 * far, i, f"{each['mean']:.2f}", va="center", fontsize=9)
    axis.set_yticks(range(len(arms)), [LABELS[arm][0] for arm in arms])
    axis.set(xlim=(0, 1.2 * far), xlabel="KL, nats", title=f"KL at {float(share):.0%} right answers")
    axis.invert_yaxis()
