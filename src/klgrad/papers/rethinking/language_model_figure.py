"""The figure of `language_model`: reward, its noise, the gap of log-probs, entropy and length over updates."""

from typing import TYPE_CHECKING, Any

from ...support.palette import STYLES
from ..figure_parts import band
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "none": ("no KL", "black", "-"),
    "k1-loss": ("k1 as loss", *STYLES["k1-loss"]),
    "k2-loss": ("k2 as loss", *STYLES["k2-loss"]),
    "k3-loss": ("k3 as loss", *STYLES["k3-loss"]),
}
PANELS = {
    "train_reward": "training reward",
    "train_reward_noise": "noise of the training reward",
    "kl_per_token": "KL(π‖ref) per token, nats",
    "entropy_per_token": "entropy per token, nats",
    "length": "tokens of a completion",
}
"""Columns, and what they are."""


def draw(numbers: Numbers, figure: "Figure") -> None:
    """A row for each learning rate, a panel for each column."""
    rates = sorted({name.split()[1] for paths in numbers["paths"].values() for name in paths}, key=float)
    figure.set_size_inches(3.2 * len(PANELS), 3.1 * len(rates) + 0.5)
    axes = figure.subplots(len(rates), len(PANELS), squeeze=False, sharex=True, sharey="col")
    for row, rate in zip(axes, rates, strict=True):
        row[0].set_ylabel(f"learning rate {rate}")
        for axis, column in zip(row, PANELS, strict=True):
            _updates(axis, numbers["paths"][column], rate)
    for axis, title in zip(axes[0], PANELS.values(), strict=True):
        axis.set_title(title, fontsize=10)
    for axis in axes[-1]:
        axis.set(xlabel="updates", xticks=[0, 20, 40, 60])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LABELS), fontsize=9)


def _updates(axis: Any, paths: Numbers, rate: str) -> None:
    """Means over seeds, with bands of one standard error."""
    for arm, (label, colour, line) in LABELS.items():
        path = paths.get(f"{arm} {rate}")
        if path is None:
            continue
        axis.plot(path["updates"], path["mean"], color=colour, linestyle=line, label=label)
        band(axis, path["updates"], path, colour, alpha=0.15)
