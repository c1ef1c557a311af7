"""The figure of `fig8_language_model`: a row of panels for each kind of length."""

from typing import TYPE_CHECKING

from ...support.palette import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from ..figure_parts import band
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "kl_per_sequence": "KL(student‖teacher) per completion,\non the student's completions (the paper's measure)",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions",
}
LAST_PANEL = {
    "may-end": {"length": "tokens per completion"},
    "fixed-length": {"entropy_per_token": "entropy of the student per token"},
}
TITLES = {"may-end": "Completions may end", "fixed-length": "Completions of 32 tokens"}
STYLES = {
    "k3-loss": ("token: k3 as loss (GRPO)", ORANGE, "-"),
    "k2-loss": ("token: k2 as loss", SKY, "-"),
    "exact-token": ("token: exact", BLACK, "-"),
    "k1-reward": ("sequence: k1 in reward", GREEN, "--"),
    "k1-reward-leave-one-out": ("sequence: k1, leave-one-out", BLUE, "--"),
    "k1-reward-to-go": ("sequence: k1 to go", PURPLE, "--"),
    "exact-discount-0.9-leave-one-out": ("sequence: exact, discount 0.9, leave-one-out", VERMILION, "--"),
}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over seeds, with bands of one standard error."""
    figure.set_size_inches(15, 8.4)
    axes = figure.subplots(2, 3, sharex=True)
    for across, (lengths, title) in zip(axes, TITLES.items(), strict=True):
        for axis, (measure, label) in zip(across, (PANELS | LAST_PANEL[lengths]).items(), strict=True):
            for arm, (name, color, line) in STYLES.items():
                found = numbers["arms"][f"{lengths} {arm}"][measure]
                path = {column: [x[column] for x in found] for column in ("mean", "error")}
                axis.plot(numbers["updates"], path["mean"], line, color=color, label=name, lw=1.8)
                band(axis, numbers["updates"], path, color, alpha=0.15)
            axis.set_title(f"{title}: {label}", fontsize=10)
            axis.set_xlabel("updates")
            axis.grid(alpha=0.25)
            axis.set_ylabel("tokens" if measure == "length" else "nats")
            if measure in PANELS:
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter("{x:g}")
                axis.tick_params(which="both", labelsize=8)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, ncols=4, loc="outside lower center")
