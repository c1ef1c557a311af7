"""Draw docs/images/fig8-language-model.png from the committed numbers: means over seeds, bands of one error."""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
PANELS = {
    "kl_per_sequence": "KL(student‖teacher) per completion,\non the student's completions (the paper's measure)",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions",
}
LAST_PANEL = {
    "may-end": {"length": "tokens per completion"},
    "fixed-length": {"entropy_per_token": "entropy of the student per token"},
}
MEASURES = (*PANELS, *(name for last in LAST_PANEL.values() for name in last))
TITLES = {"may-end": "Completions may end", "fixed-length": "Completions of 32 tokens"}
STYLES = {
    "k3-loss": ("token: k3 as loss (GRPO)", "#c0392b", "-"),
    "k2-loss": ("token: k2 as loss", "#e08e2b", "-"),
    "exact-token": ("token: exact", "#2e7d32", "-"),
    "k1-reward": ("sequence: k1 in reward", "#1f4e9c", "--"),
    "k1-reward-leave-one-out": ("sequence: k1, leave-one-out", "#5b9bd5", "--"),
    "k1-reward-to-go": ("sequence: k1 to go", "#7b5ea7", "--"),
    "exact-discount-0.9-leave-one-out": ("sequence: exact, discount 0.9, leave-one-out", "#444444", "--"),
}


def main() -> None:
    """One row of panels for each kind of length."""
    points: dict[tuple[str, str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with (ROOT / "benchmarks/results/fig8_seeds.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for measure in MEASURES:
                points[row["lengths"], row["arm"], measure][int(row["update"])].append(float(row[measure]))
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), sharex=True)
    for across, (lengths, title) in zip(axes, TITLES.items(), strict=True):
        for axis, (measure, label) in zip(across, (PANELS | LAST_PANEL[lengths]).items(), strict=True):
            for arm, (name, color, line) in STYLES.items():
                updates, values = zip(*sorted(points[lengths, arm, measure].items()), strict=True)
                middle = [mean(x) for x in values]
                error = [stdev(x) / len(x) ** 0.5 for x in values]
                axis.plot(updates, middle, line, color=color, label=name, lw=1.8)
                low, high = ([m + s * e for m, e in zip(middle, error, strict=True)] for s in (-1, 1))
                axis.fill_between(updates, low, high, color=color, alpha=0.15, lw=0)
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
    figure.legend(handles, names, ncols=4, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(ROOT / "docs/images/fig8-language-model.png", dpi=110)


if __name__ == "__main__":
    main()
