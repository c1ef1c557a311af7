"""The figure of `long_runs`: four measures over updates, and right answers over the KL."""

from typing import TYPE_CHECKING, Any

from ...support.palette import BLACK, PURPLE, STYLES
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "k3-loss": ("k3 as loss", STYLES["k3-loss"][0], "^"),
    "k1-reward": ("k1 in the reward", STYLES["k1-reward"][0], "o"),
    "k2-loss": ("k2 as loss", STYLES["k1-reward-leave-one-out"][0], "D"),
    "none": ("no KL", BLACK, "x"),
    "k1-reward-near": ("k1 in the reward, β = 0.07", PURPLE, "s"),
}
"""Label, colour and mark of an arm."""
LEGEND = "lines: means of three seeds, bands: one\nstandard error; marks: one evaluation of one run"
PANELS = {
    "correct_in": "right answers, in domain",
    "kl_per_sequence": "KL(π‖ref) per completion, nats",
    "entropy_per_token": "entropy per token, nats",
    "length": "tokens of a completion",
}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over seeds with bands of one standard error, and a mark for each evaluation of each run."""
    figure.set_size_inches(11, 6.4)
    *panels, last, rest = figure.subplots(2, 3).flat
    for (column, title), axis in zip(PANELS.items(), panels, strict=True):
        _over_updates(numbers["paths"][column], axis)
        axis.set(xlabel="updates", title=title)
    _over_kl(numbers, last)
    for axis in (*panels, last):
        axis.title.set_fontsize(10)
    rest.axis("off")
    if numbers["points"]:
        rest.legend(*last.get_legend_handles_labels(), loc="center", title=LEGEND, fontsize=10, title_fontsize=9)


def _over_updates(paths: dict[str, Any], axis: Any) -> None:
    for arm, (_, colour, _) in LABELS.items():
        if (path := paths.get(arm)) is None:
            continue
        axis.plot(path["updates"], path["mean"], color=colour, lw=1.6)
        low, high = ([m + s * e for m, e in zip(path["mean"], path["error"], strict=True)] for s in (-1, 1))
        axis.fill_between(path["updates"], low, high, color=colour, alpha=0.13, lw=0)


def _over_kl(numbers: Numbers, axis: Any) -> None:
    for arm, (label, colour, mark) in LABELS.items():
        if own := [point for point in numbers["points"] if point["name"] == arm]:
            look = {"ms": 4, "color": colour, "mfc": "none", "lw": 0, "label": label}
            axis.plot([p["kl"] for p in own], [p["correct_in"] for p in own], mark, **look)
    axis.set(xlabel="KL(π‖ref) per completion, nats", title="right answers over the KL")
