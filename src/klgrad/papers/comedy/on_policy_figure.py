"""The figure of `on_policy`: right answers over updates at each coefficient, and over the KL."""

from typing import TYPE_CHECKING, Any

from ...support.palette import BLUE, STYLES
from ..figure_parts import band
from ..reward_and_kl import height
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "none": ("no KL", "black", "-"),
    "k1-reward": ("k1 in the reward", STYLES["k1-reward"][0], "-"),
    "k1-loss": ("k1 as loss", STYLES["k1-reward"][0], ":"),
    "k1-both": ("k1 in both", STYLES["k1-reward"][0], "--"),
    "k3-reward": ("k3 in the reward", STYLES["k3-loss"][0], "-"),
    "k3-loss": ("k3 as loss", STYLES["k3-loss"][0], ":"),
    "k3-both": ("k3 in both", STYLES["k3-loss"][0], "--"),
    "exact-loss": ("exact as loss", BLUE, ":"),
}
"""The label of an arm; its colour is its estimator, its line the place of the KL."""
MARKS = {"-": "o", ":": "s", "--": "^"}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """A panel for each coefficient, and one with all runs over the KL."""
    coefficients = sorted({run["kl_coef"] for run in numbers["runs"]} - {"0.0"}, key=float)
    figure.set_size_inches(3.5 * (len(coefficients) + 1), 4.4)
    *panels, last = figure.subplots(1, len(coefficients) + 1, sharey=True)
    for coefficient, axis in zip(coefficients, panels, strict=True):
        _updates(numbers, axis, coefficient)
    _frontier(numbers, last)
    panels[0].set_ylabel("right answers, in domain")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=8.5)


def _updates(numbers: Numbers, axis: Any, coefficient: str) -> None:
    for arm, (label, colour, line) in LABELS.items():
        path = numbers["paths"].get(f"{arm} {'0.0' if arm == 'none' else coefficient}")
        if path is None:
            continue
        axis.plot(path["updates"], path["mean"], line, color=colour, label=label)
        band(axis, path["updates"], path, colour)
    axis.set(xlabel="updates", title=f"β = {float(coefficient):g}", xticks=[0, 20, 40, 60])


def _frontier(numbers: Numbers, axis: Any) -> None:
    for run in numbers["runs"]:
        _, colour, line = LABELS[run["name"]]
        axis.plot(run["kl"], run["correct_in"], MARKS[line], ms=5, color=colour, mfc="none", zorder=3)
    far = max(run["kl"] for run in numbers["runs"] if run["name"] in numbers["curve"]["off"])
    at = [far * i / 100 for i in range(1, 101)]
    axis.plot(at, [height(numbers["curve"]["weights"], x) for x in at], color="black", lw=1)
    axis.set(xlabel="KL(π‖ref) per completion, nats")
    axis.set_title("circles reward, squares loss, triangles both", fontsize=10)
