"""The figure of `fig8_sequences`: a row of panels for each kind of length."""

from typing import TYPE_CHECKING

from ...support.palette import STYLES
from ..figure_parts import band
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "k3-loss": "token: k3 as loss",
    "token": "token: vanilla",
    "k1-reward": "sequence: vanilla",
    "k1-reward-leave-one-out": "sequence: leave-one-out",
    "to-go": "sequence: cumulative",
    "exact-leave-one-out": "sequence: exact, leave-one-out by step",
    "discount": "the same with discount 0.9",
}
TITLES = {"may end": "Completions may end", "fixed length": "16 tokens"}
PANELS = {
    "kl": "KL(student‖teacher),\non the student's completions (the paper's measure)",
    "forward": "KL(teacher‖student),\non the teacher's completions",
    "length": "tokens per completion",
}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over problems, with bands of one standard error; lengths only where they vary."""
    figure.set_size_inches(12, 7.2)
    axes = figure.subplots(2, len(PANELS))
    for across, (lengths, title) in zip(axes, TITLES.items(), strict=True):
        for axis, (measure, label) in zip(across, PANELS.items(), strict=True):
            if (lengths, measure) == ("fixed length", "length"):
                axis.set_axis_off()
                axis.legend(*axes[0][0].get_legend_handles_labels(), loc="center", fontsize=10)
                continue
            for name in LABELS:
                _curve(axis, numbers["steps"], numbers["descents"][lengths]["arms"][name][measure], name)
            axis.set_title(f"{title}: {label}", fontsize=9)
            axis.set(xlabel="steps of the run", ylabel="tokens" if measure == "length" else "nats", yscale="log")
            axis.grid(alpha=0.25)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.tick_params(which="both", labelsize=8)


def _curve(axis: "Axes", steps: list[int], seen: dict[str, list[float]], name: str) -> None:
    """A curve with its standard error."""
    colour, line = STYLES[name]
    axis.plot(steps, seen["mean"], color=colour, linestyle=line, label=LABELS[name], lw=1.6)
    band(axis, steps, seen, colour, alpha=0.15)
