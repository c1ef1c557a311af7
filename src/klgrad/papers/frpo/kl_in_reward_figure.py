"""The figure of `kl_in_reward`: right answers by update and by KL, and the KL by the effective coefficient."""

from typing import TYPE_CHECKING, Any

from ...support.palette import STYLES
from ..figure_parts import band
from ..reward_and_kl import height
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "k1-reward": ("k1 in the reward", "k1-reward"),
    "k1-advantage-leave-one-out": ("k1 in the advantage", "k1-advantage"),
    "k2-loss": ("k2 as loss", "k2-loss"),
    "k3-loss": ("k3 as loss", "k3-loss"),
    "none": ("no KL", "k1-loss"),
}
"""The label of an arm, and the estimator whose colour it has."""
LINES = {"undivided": "-", "divided": "--"}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Three panels; lines and filled marks are undivided, dashed lines and open marks divided."""
    figure.set_size_inches(13, 4.6)
    updates, frontier, effective = figure.subplots(1, 3)
    _updates(numbers, updates)
    _frontier(numbers, frontier)
    _effective(numbers, effective)
    handles, labels = updates.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8.5)


def _look(name: str) -> tuple[str, str, str]:
    """Colour, label and division of an arm's name."""
    arm, division = name.split()
    label, estimator = LABELS[arm]
    return STYLES[estimator][0], f"{label}, {division}", division


def _updates(numbers: Numbers, axis: Any) -> None:
    for name in (f"{arm} {division}" for arm in LABELS for division in LINES):
        colour, label, division = _look(name)
        path = numbers["paths"][name]
        axis.plot(path["updates"], path["mean"], LINES[division], color=colour, label=label)
        band(axis, path["updates"], path, colour)
    axis.set(xlabel="updates", ylabel="right answers, in domain", title="β = 0.1", xticks=[0, 20, 40, 60])


def _frontier(numbers: Numbers, axis: Any) -> None:
    for run in numbers["runs"]:
        colour, _, division = _look(run["name"])
        face = colour if division == "undivided" else "white"
        axis.plot(run["kl"], run["correct_in"], "o", ms=5, color=colour, mfc=face, zorder=3)
    far = max(run["kl"] for run in numbers["runs"])
    at = [far * i / 100 for i in range(1, 101)]
    axis.plot(at, [height(numbers["curve"]["weights"], x) for x in at], color="black", lw=1)
    axis.set(
        xlabel="KL(π‖ref) per completion, nats", ylabel="right answers, in domain", title="every β, one mark per run"
    )


def _effective(numbers: Numbers, axis: Any) -> None:
    for setting, found in numbers["end"].items():
        colour, _, division = _look(setting.rpartition(" ")[0])
        if setting.startswith("none"):
            continue
        face = colour if division == "undivided" else "white"
        x, y = found["effective"], found["kl_per_sequence"]
        axis.errorbar(
            x["mean"], y["mean"], xerr=x["error"], yerr=y["error"], fmt="o", ms=5, color=colour, mfc=face, lw=1
        )
    axis.set(xscale="log", yscale="log", xlabel="effective coefficient", ylabel="KL(π‖ref) per completion, nats")
    axis.set_title("every β, means over seeds")
    axis.set_xticks([0.01, 0.03, 0.1, 0.3], ["0.01", "0.03", "0.1", "0.3"])
    axis.set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    axis.minorticks_off()
