"""The figure of `discount`: both KLs over the discount, each arm at its best rate; bias and variance of the gradient
over the discount; and one KL over the other for every run of the sweep of rates.
"""

import math
from typing import TYPE_CHECKING, Any

from ...support.palette import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION
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
COLOURS = dict(zip(DISCOUNTS, (BLACK, GREEN, BLUE, ORANGE, VERMILION), strict=True))
"""Of a discount, in the panel of the sweep."""
MARKS = {("exact", "256"): "o", ("exact", "64"): "s", ("k1", "256"): "^", ("k1", "64"): "v"}
"""Of an estimator with a size of the batch, in that panel."""
STUDENTS = {"0": "gradient at the start", "20": "gradient after 20 updates"}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over seeds and over batches, with bars of one standard error; what has no runs is left out."""
    students = [update for update in STUDENTS if numbers["gradients"].get(update)]
    (*axes, sweep), of_gradients = _places(figure, len(students))
    _rates(sweep, numbers["rates"], numbers["start"])
    for axis, (measure, title) in zip(axes, PANELS.items(), strict=True):
        for size, line in SIZES.items():
            end = {arm.partition(" ")[2]: x for arm, x in numbers["end"].items() if arm.startswith(f"{size} ")}
            _lines(axis, end, measure, line, f", {size} completions")
        axis.set(title=title, ylabel="nats, each arm at its best rate")
    for axis, update in zip(of_gradients, students, strict=True):
        _lines(axis, numbers["gradients"][update], "relative_variance", "-", "")
        _lines(axis, numbers["gradients"][update], "relative_squared_bias", ":", None)
        title = f"{STUDENTS[update]}:\nvariance (lines), squared bias (dotted)"
        axis.set(title=title, ylabel="relative to the squared true one")
    for axis in (*axes, *of_gradients):
        axis.set(xlabel="discount", xticks=X, xticklabels=DISCOUNTS)
        if axis.lines:
            _logarithmic(axis)
        else:  # an empty axis cannot be logarithmic
            axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center")
        axis.title.set_fontsize(10)
    named = _named((*axes, *of_gradients))
    figure.legend(named.values(), named.keys(), ncols=len(KINDS), loc="outside lower center", fontsize=8.5)


def _places(figure: "Figure", gradients: int) -> tuple[list[Any], list[Any]]:
    """A row with the panels of the runs, and below it one with those of the gradients, if there are any."""
    columns, rows = len(PANELS) + 1, 1 + bool(gradients)
    figure.set_size_inches(4 * columns + 1, 4.2 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False)
    below = list(grid[1]) if gradients else []
    for unused in below[gradients:]:
        unused.remove()
    return list(grid[0]), below[:gradients]


def _logarithmic(axis: Any) -> None:
    axis.set(yscale="log")
    low, high = axis.get_ylim()
    if high > 10 * low:  # labels of all minor ticks would overlap
        axis.yaxis.get_minor_locator().set_params(subs=(2, 5))
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter("{x:g}")
    axis.tick_params(axis="y", which="both", labelsize=8)


def _rates(axis: Any, rates: list[Numbers], start: Numbers) -> None:
    """Both KLs of every run of the sweep; the best rate of an arm is filled."""
    own, teachers = PANELS
    for run in rates:
        kind, discount = run["arm"].split("-")[:2]
        face = COLOURS[discount] if run["best"] else "none"
        look = {"marker": MARKS[kind, run["completions"]], "color": COLOURS[discount], "mfc": face, "ms": 6, "lw": 0}
        axis.plot(run[own], run[teachers], **look)
    _logarithmic(axis)
    axis.axhline(start[teachers]["mean"], color=GREY, lw=1, ls=":")
    axis.text(1, start[teachers]["mean"], "before training", transform=axis.get_yaxis_transform(), fontsize=8,
              ha="right", va="bottom", color=GREY)  # fmt: skip
    discounts = {run["arm"].split("-")[1] for run in rates}
    shown = {f"discount {d}": {"marker": "o", "color": COLOURS[d]} for d in DISCOUNTS if d in discounts}
    shown |= {f"{kind}, {size}": {"marker": mark, "color": GREY} for (kind, size), mark in MARKS.items()}
    for label, look in shown.items():
        axis.plot([], [], lw=0, ms=5, label=label, **look)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside the points, which may be anywhere
    axis.set(title="one seed, three rates (filled: the best);\nboth KLs per token", xlabel="on the student's, nats")
    axis.set_ylabel("on the teacher's, nats")
    axis.title.set_fontsize(10)


def _named(axes: Any) -> dict[str, Any]:
    """The legend: the runs, and the kinds of arms of which gradients alone were measured."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if not any(f"{label}, {size} completions" in found for size in SIZES):
                found[label] = handle
    return found


def _lines(axis: Any, arms: Numbers, measure: str, line: str, suffix: str | None) -> None:
    """A line for each kind of arm, over the discounts that were run; without a suffix it is not in the legend."""
    for pattern, (label, colour, mark) in KINDS.items():
        # Without a future the exact arm has no baseline: it begins both lines of the exact arms.
        names = ["exact-0" if d == "0" and pattern.startswith("exact") else pattern.format(d) for d in DISCOUNTS]
        run = {x: name for x, name in zip(X, names, strict=True) if name in arms}
        found = [arms[name][measure] for name in run.values()]
        # A logarithmic axis has no place for an estimated square that noise made negative.
        mean = [each["mean"] if (each.get("mean") or 0) > 0 else math.nan for each in found]
        own = [m for m, name in zip(mean, run.values(), strict=True) if name != "exact-0" or pattern == "exact-{}"]
        if not all(math.isnan(m) for m in own):
            # The earlier kind in front: the arm without a future is of the first.
            order = 3 - list(KINDS).index(pattern) / len(KINDS)
            look = {"fmt": f"{mark}{line}", "color": colour, "ms": 5, "lw": 1.4, "zorder": order}
            label = None if suffix is None else label + suffix
            axis.errorbar(list(run), mean, yerr=[each.get("error") or 0 for each in found], label=label, **look)
