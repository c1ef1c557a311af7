"""The figure of `discount`: both KLs over the discount, and bias and variance of the gradient over the discount."""

import math
from typing import TYPE_CHECKING, Any

from ...support.palette import BLACK, BLUE, GREEN
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISCOUNTS = ("0", "0.5", "0.75", "0.9", "1")
X = range(len(DISCOUNTS))
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
    students = [update for update in STUDENTS if numbers["gradients"].get(update)]
    count = len(PANELS) + len(students)
    figure.set_size_inches(4 * count, 4.6)
    axes = figure.subplots(1, count)
    for axis, (measure, title) in zip(axes, PANELS.items(), strict=False):
        for size, line in SIZES.items():
            end = {arm.partition(" ")[2]: x for arm, x in numbers["end"].items() if arm.startswith(f"{size} ")}
            _lines(axis, end, measure, line, f", {size} completions")
        axis.set(title=title, ylabel="nats")
    for axis, update in zip(axes[len(PANELS) :], students, strict=True):
        _lines(axis, numbers["gradients"][update], "relative_variance", "-", "")
        _lines(axis, numbers["gradients"][update], "relative_squared_bias", ":", None)
        title = f"{STUDENTS[update]}:\nvariance (lines), squared bias (dotted)"
        axis.set(title=title, ylabel="relative to the squared true one")
    for axis in axes:
        axis.set(xlabel="discount", xticks=X, xticklabels=DISCOUNTS)
        if axis.lines:  # an empty axis cannot be logarithmic
            axis.set(yscale="log")
        axis.title.set_fontsize(10)
    named = _named(axes)
    figure.legend(
        named.values(), named.keys(), ncols=min(len(named), count + 2), loc="outside lower center", fontsize=8.5
    )


def _named(axes: Any) -> dict[str, Any]:
    """The legend: the runs, and the kinds of arms of which gradients alone were measured."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if not any(f"{label}, {size} completions" in found for size in SIZES):
                found[label] = handle
    return found


def _lines(axis: Any, arms: Numbers, measure: str, line: str, suffix: str | None) -> None:
    """A line for each kind of arm, with gaps at discounts without a value; without a suffix it is not in the legend."""
    for pattern, (label, colour, mark) in KINDS.items():
        # Without a future the exact arm has no baseline: it begins both lines of the exact arms.
        names = ["exact-0" if d == "0" and pattern.startswith("exact") else pattern.format(d) for d in DISCOUNTS]
        found = [arms[name][measure] if name in arms else {} for name in names]
        # A logarithmic axis has no place for an estimated square that noise made negative.
        mean = [each["mean"] if (each.get("mean") or 0) > 0 else math.nan for each in found]
        own = [m for m, name in zip(mean, names, strict=True) if name != "exact-0" or pattern == "exact-{}"]
        if not all(math.isnan(m) for m in own):
            # The earlier kind in front: the arm without a future is of the first.
            order = 3 - list(KINDS).index(pattern) / len(KINDS)
            look = {"fmt": f"{mark}{line}", "color": colour, "ms": 5, "lw": 1.4, "zorder": order}
            label = None if suffix is None else label + suffix
            axis.errorbar(X, mean, yerr=[each.get("error") or 0 for each in found], label=label, **look)
