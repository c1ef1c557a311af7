"""The figure of `stale_distillation`: a row of panels for each KL, over updates, over the lag and over the reuse."""

from typing import TYPE_CHECKING, Any

from ...support.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from ..figure_parts import band
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARMS = {
    "reverse-exact": ("reverse, exact", BLUE, "o"),
    "reverse-top-64": ("reverse, top 64", SKY, "s"),
    "reverse-sampled": ("reverse, sampled (k1)", GREEN, "^"),
    "forward-exact": ("forward, exact", VERMILION, "o"),
    "forward-top-64": ("forward, top 64", ORANGE, "s"),
    "forward-sampled": ("forward, sampled (k3)", PURPLE, "^"),
}
"""Label, colour and mark of an arm."""
ROWS = {
    "kl_per_token": "KL(student‖teacher) per token,\non the student's completions",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions",
}
AGES = {
    "age of the completions, updates": {0: "fresh", 4: "lag-4", 16: "lag-16"},
    "updates with each batch": {1: "fresh", 4: "reuse-4", 16: "reuse-16"},
}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over seeds, with bands or bars of one standard error; settings without runs are left out."""
    figure.set_size_inches(14, 8.4)
    axes = figure.subplots(2, 3, sharey="row")
    for (measure, label), (updates, *ages) in zip(ROWS.items(), axes, strict=True):
        _over_updates(numbers["paths"][measure], updates)
        for axis, (name, places) in zip(ages, AGES.items(), strict=True):
            _over_ages(numbers, measure, axis, places)
            axis.set(xlabel=name, xticks=list(places))
        updates.set(ylabel=f"{label}, nats", yscale="log")
        updates.yaxis.set_major_formatter("{x:g}")
        updates.yaxis.set_minor_formatter("{x:g}")
        updates.tick_params(which="both", labelsize=8)
    axes[0][0].set_title("fresh (lines) and 16 updates old (dashed)", fontsize=10)
    axes[0][1].set_title("after the last update", fontsize=10)
    axes[0][2].set_title("after the last update", fontsize=10)
    figure.legend(*axes[0][1].get_legend_handles_labels(), ncols=6, loc="outside lower center", fontsize=8.5)


def _over_updates(paths: dict[str, Any], axis: Any) -> None:
    for arm, (_, colour, _) in ARMS.items():
        for stale, line in (("fresh", "-"), ("lag-16", "--")):
            if (path := paths.get(f"{arm} {stale}")) is None:
                continue
            axis.plot(path["updates"], path["mean"], line, color=colour, lw=1.6)
            band(axis, path["updates"], path, colour)
    axis.set_xlabel("updates")


def _over_ages(numbers: Numbers, measure: str, axis: Any, places: dict[int, str]) -> None:
    for arm, (label, colour, mark) in ARMS.items():
        settings = {x: f"{arm} {stale}" for x, stale in places.items()}
        known = {x: numbers["end"][name][measure] for x, name in settings.items() if name in numbers["end"]}
        mean, error = ([each[name] for each in known.values()] for name in ("mean", "error"))
        axis.errorbar(list(known), mean, yerr=error, fmt=f"{mark}-", color=colour, label=label, ms=5, lw=1.4, capsize=2)
