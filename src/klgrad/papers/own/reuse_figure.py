"""The figure of `reuse`: both KLs over completions, over updates and over seconds."""

from typing import TYPE_CHECKING, Any

from ...support.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARMS = {
    "klgrad 1 256": ("1 use", SKY, "-"),
    "klgrad 2 256": ("2 uses", BLUE, "-"),
    "klgrad 4 256": ("4 uses", GREEN, "-"),
    "klgrad 8 256": ("8 uses", ORANGE, "-"),
    "klgrad 1 64": ("1 use, batches of 64", SKY, ":"),
    "klgrad 2 64": ("2 uses, batches of 64", BLUE, ":"),
    "trl-reverse 1 256": ("TRL, reverse KL", BLACK, "--"),
    "trl-jsd 1 256": ("TRL, JSD", PURPLE, "--"),
    "trl-forward 1 256": ("TRL, forward KL", GREY, "--"),
    "trl-reverse 1 64": ("TRL, reverse KL, batches of 64", BLACK, ":"),
}
"""Label, colour and line of an arm."""
ROWS = {
    "kl_per_token": "KL(student‖teacher) per token,\non the student's completions, nats",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions, nats",
}
OVER = {"completions": "sampled completions", "updates": "updates", "seconds": "seconds of training, on a shared GPU"}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over seeds after the first evaluation, with bars of one standard error; what has no runs is left out."""
    figure.set_size_inches(14, 8.4)
    axes = figure.subplots(len(ROWS), len(OVER), sharey="row", sharex="col")
    for (column, label), row in zip(ROWS.items(), axes, strict=True):
        for (over, _), axis in zip(OVER.items(), row, strict=True):
            _lines(numbers, column, over, axis)
        row[0].set(ylabel=label, yscale="log")
        for formatter in (row[0].yaxis.set_major_formatter, row[0].yaxis.set_minor_formatter):
            formatter("{x:g}")
        for axis in row:
            axis.tick_params(which="both", labelsize=8)
    for axis, name in zip(axes[-1], OVER.values(), strict=True):
        axis.set_xlabel(name)
    # Handles so long that dots differ from dashes; four columns of the longest labels just fit.
    look = {"ncols": 4, "fontsize": 8.5, "handlelength": 3, "columnspacing": 1.2}
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", **look)


def _seeds(count: float) -> str:
    return f"{count:g} seed{'s' * (count != 1)}"


def _lines(numbers: Numbers, column: str, over: str, axis: Any) -> None:
    """Without the evaluation before training, whose KL is several times as large."""
    for arm, (label, colour, line) in ARMS.items():
        if (path := numbers["paths"].get(arm)) is None or None in path[over]:
            continue
        x = path[over][1:]
        mean, error = ([each[name] for each in path[column][1:]] for name in ("mean", "error"))
        look = {"fmt": line, "marker": "o", "ms": 4, "color": colour, "lw": 1.4, "capsize": 2}
        name = f"{label}, {numbers['settings'][arm]} ({_seeds(path[column][-1]['seeds'])})"
        axis.errorbar(x, mean, yerr=error, label=name, **look)
    if not axis.lines:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center")
