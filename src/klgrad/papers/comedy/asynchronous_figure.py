"""The figure of `asynchronous`: right answers over updates at each lag and over the KL, and what the weights change."""

from typing import TYPE_CHECKING, Any

from ...support.palette import BLUE, GREY, PURPLE, STYLES
from ..figure_parts import band
from ..study import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

K1, K3 = STYLES["k1-reward"][0], STYLES["k3-loss"][0]
LABELS = {
    "none": ("no KL", "black", "-"),
    "k1-reward": ("k1 in the reward", K1, "-"),
    "k1-loss": ("k1 as loss", K1, ":"),
    "k3-reward": ("k3 in the reward", K3, "-"),
    "k3-loss": ("k3 as loss", K3, ":"),
    "k1-unweighted": ("k1, no weights", GREY, "-"),
    "k1-prefix-unbounded": ("k1, prefix weights", BLUE, "-"),
    "k1-prefix-bounded": ("k1, prefix weights up to 2", BLUE, "--"),
    "k1-sequence-unbounded": ("k1, sequence weights", PURPLE, "-"),
    "k1-sequence-bounded": ("k1, sequence weights up to 2", PURPLE, "--"),
}
"""The label of an arm; its colour is its estimator or its weights, its line the place of the KL or the bound."""
MARKS = {"2": "o", "10": "s"}
"""By lag."""
FACES = {"correct_in": None, "equal_kl": "white"}
"""By measure; None for the arm's colour."""


def draw(numbers: Numbers, figure: "Figure") -> None:
    """A panel for each lag, one with all runs over the KL, and one with the differences that the weights make."""
    figure.set_size_inches(16, 4.8)
    axes = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.1])
    for lag, axis in zip(MARKS, axes, strict=False):
        _updates(numbers, axis, lag)
        axis.sharey(axes[0])
    axes[0].set_ylabel("right answers, in domain")
    _over_kl(numbers, axes[2])
    axes[2].sharey(axes[0])
    _weights(numbers, axes[3])
    named = {
        label: handle for axis in axes[:2] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, fontsize=8.5)


def _updates(numbers: Numbers, axis: Any, lag: str) -> None:
    for arm, (label, colour, line) in LABELS.items():
        path = numbers["paths"].get(f"{arm} {lag}")
        if path is None:
            continue
        axis.plot(path["updates"], path["mean"], line, color=colour, label=label)
        band(axis, path["updates"], path, colour)
    axis.axhline(numbers["start"]["correct_in"]["mean"], color="grey", lw=1)
    axis.set(xlabel="updates", title=f"completions {lag} updates old", xticks=[0, 20, 40, 60])


def _over_kl(numbers: Numbers, axis: Any) -> None:
    """Runs on fresh completions are left out: `on_policy` has them."""
    for run in numbers["runs"]:
        arm, lag = run["name"].split()
        if lag in MARKS:
            _, colour, line = LABELS[arm]
            face = colour if line == "-" else "none"
            axis.plot(run["kl"], run["correct_in"], MARKS[lag], ms=5, color=colour, mfc=face, zorder=3)
    # Linear up to 1 nat, so that runs near ref and runs far from it can both be told apart.
    axis.set_xscale("symlog", linthresh=1)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="KL(π‖ref) per completion, nats", xlim=(0, None))
    axis.set_title("circles: lag 2; squares: lag 10; open: as loss, or bounded", fontsize=9)


def _weights(numbers: Numbers, axis: Any) -> None:
    """Right answers with weights less those without, with an error bar, by lag and measure."""
    names = [arm for arm in LABELS if any(arm in arms for arms in numbers["weighted"].values())]
    places = [(lag, measure) for lag in MARKS for measure in FACES]
    for i, arm in enumerate(names):
        for j, (lag, measure) in enumerate(places):
            found = numbers["weighted"][lag].get(arm, {}).get(measure)
            if found:
                look = {"fmt": MARKS[lag], "color": LABELS[arm][1], "mfc": FACES[measure] or LABELS[arm][1], "ms": 5}
                axis.errorbar(found["difference"], i + 0.15 * (j - 1.5), xerr=found["error"], **look)
    axis.axvline(0, color="grey", lw=1)
    axis.set_yticks(range(len(names)), [LABELS[name][0].replace(" weights", "\nweights") for name in names], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel(f"right answers, less those of {_others(numbers['compared_with'])}")
    axis.set_title("filled: at the last update; open: at equal KL", fontsize=9)


def _others(compared_with: dict[str, str]) -> str:
    """What the arms with weights are compared with, by lag if it differs."""
    names = {lag: LABELS[arm][0] for lag, arm in compared_with.items()}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return "\n" + ", ".join(f"{name} (lag {lag})" for lag, name in names.items())
