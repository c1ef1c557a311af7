"""The figure of `discount`: both KLs over the discount, and bias and variance of the gradient over the discount."""

from typing import TYPE_CHECKING, Any

from ...support.palette import BLACK, BLUE, GREEN
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISCOUNTS = ("0", "0.5", "0.75", "0.9", "1")
KINDS = {
    "exact-{}": ("exact", BLACK, "o"),
    "exact-{}-leave-one-out": ("exact, leave-one-out", BLUE, "s"),
    "k1-{}-leave-one-out": ("k1, leave-one-out", GREEN, "^"),
}
"""Label, colour and mark of a kind of arm."""
SIZES = {"256": "-", "64": "--"}
PANELS = {
    "kl_per_token": "KL(student‖teacher) per token,\non the student's completions",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions",
}
STUDENTS = {"0": "gradient at the start", "20": "gradient after 20 updates"}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over seeds and over batches, with bars of one standard error; what has no runs is left out."""
    figure.set_size_inches(16, 4.6)
    axes = figure.subplots(1, 4)
    for axis, (measure, title) in zip(axes[:2], PANELS.items(), strict=True):
        for size, line in SIZES.items():
            end = {arm.partition(" ")[2]: x for arm, x in numbers["end"].items() if arm.startswith(f"{size} ")}
            _lines(axis, end, measure, line, f", {size} completions")
        axis.set(title=title, ylabel="nats")
    for axis, (update, title) in zip(axes[2:], STUDENTS.items(), strict=True):
        at = numbers["gradients"].get(update, {})
        _lines(axis, at, "relative_variance", "-", "")
        _lines(axis, at, "relative_squared_bias", ":", "")
        axis.set(title=f"{title}:\nvariance (lines), squared bias (dotted)", ylabel="relative to the squared true one")
    for axis in axes:
        axis.set(xlabel="discount", xticks=range(len(DISCOUNTS)), xticklabels=DISCOUNTS)
        if any(len(line.get_xdata()) for line in axis.lines):  # an empty axis cannot be logarithmic
            axis.set(yscale="log")
        else:
            axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center")
        axis.title.set_fontsize(10)
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=6, loc="outside lower center", fontsize=8.5)


def _lines(axis: Any, arms: Numbers, measure: str, line: str, suffix: str) -> None:
    for pattern, (label, colour, mark) in KINDS.items():
        # Without a future the exact arm has no baseline: it begins both lines of the exact arms.
        names = ["exact-0" if d == "0" and pattern.startswith("exact") else pattern.format(d) for d in DISCOUNTS]
        found = {x: arms[name][measure] for x, name in enumerate(names) if name in arms}
        # A logarithmic axis has no place for an estimated square that noise made negative.
        shown = {x: each for x, each in found.items() if (each["mean"] or 0) > 0}
        mean, error = [each["mean"] for each in shown.values()], [each["error"] or 0 for each in shown.values()]
        axis.errorbar(
            list(shown), mean, yerr=error, fmt=f"{mark}{line}", color=colour, label=label + suffix, ms=5, lw=1.4
        )
