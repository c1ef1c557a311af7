"""Near the reference, a KL penalty buys reward at a lower KL, k1 as a loss does not, and k3 as a loss is close to the
sound gradient.

The paper's experiment with a reward, on a smaller model: SmolLM2-135M-Instruct learns sums and differences. Arms are
compared by the KL per completion at which they reach a share of right answers, from their evaluations after 20, 40 and
60 updates. Design, table and limits: docs/experiments/reward-and-kl.md.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from ...drawing import STYLES
from .. import runs
from ..study import Axes, Check, Experiment, Figure, Numbers, Settings, columns

LABELS = {
    "none": ("no KL", "black", "x"),
    "k1-loss": ("k1 as loss", STYLES["k1-loss"][0], "s"),
    "k1-reward": ("k1 in the reward", STYLES["k1-reward"][0], "o"),
    "k2-loss": ("k2 as loss", STYLES["k1-reward-leave-one-out"][0], "D"),
    "exact-loss": ("exact as loss", STYLES["k3-reward"][0], "v"),
    "exact-discount-0.9": ("exact, discounted future", STYLES["to-go"][0], "P"),
    "k3-loss": ("k3 as loss", STYLES["k3-loss"][0], "^"),
}
"""Label, colour and mark of an arm."""


def draw(numbers: Numbers, figure: Figure) -> None:
    """A mark for each evaluation of each run; bars for the KL that an arm needs, and for differences at equal KL."""
    figure.set_size_inches(15, 4.4)
    points, needed, gaps = figure.subplots(1, 3, width_ratios=[1.3, 0.8, 1])
    for arm, (label, colour, mark) in LABELS.items():
        own = [point for point in numbers["points"] if point["name"] == arm]
        points.plot(*columns(own, "kl", "correct_in"), mark, ms=4, color=colour, mfc="none", label=label, lw=0)
    points.set(xlabel="KL(π‖ref) per completion, nats", ylabel="right answers, in domain")
    points.set_title("each evaluation of each run,\nevery β")
    arms = {arm: kl for arm, kl in numbers["arms"].items() if kl["seeds"]}
    _bars(needed, [LABELS[arm][0] for arm in arms], arms.values(), [LABELS[arm][1] for arm in arms])
    needed.set(xlabel="KL(π‖ref) per completion, nats", title="KL at 25% right answers\n3 seeds, ± 1 SE")
    words = [name.replace(" answers ", "\nanswers ") for name in numbers["gaps"]]
    _bars(gaps, words, numbers["gaps"].values(), ["#999999"] * len(words))
    gaps.set(xlabel="difference of right answers", title="at equal KL\n3 seeds, ± 1 SE")
    figure.legend(*points.get_legend_handles_labels(), loc="outside lower center", ncols=len(LABELS), fontsize=8.5)


def _bars(axis: Axes, names: list[str], estimates: Iterable[Numbers], colours: list[str]) -> None:
    """A bar for each name, with its error and its number."""
    values, errors = columns(estimates, "mean", "error")
    far = max((abs(value) + error for value, error in zip(values, errors, strict=True)), default=1.0)
    for i, (value, error, colour) in enumerate(zip(values, errors, colours, strict=True)):
        axis.barh(i, value, xerr=error, color=colour, alpha=0.75, capsize=3)
        axis.text(max(value, 0) + error + 0.03 * far, i, f"{value:.2f}", va="center", fontsize=9)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_xlim(min(0.0, *values) - 0.02 * far, 1.2 * far)
    axis.invert_yaxis()


EXPERIMENT = Experiment(
    "comedy.csv",
    "exp_comedy.py",
    also=(Experiment("std.csv", "exp_std.py"), Experiment("frontier.csv", "exp_frontier.py")),
)
"""Of the second file only k2 as a loss is read, which the first does not have."""
LAST = 60
SHARE = 0.25
"""Of right answers: the KL at which arms reach it is compared. Runs without a KL have passed it at their first
evaluation, so with them, and with k1 as a loss, right answers are compared at equal KL."""
NONE, UNSOUND, SOUND, K3, EXACT, K2 = "none", "k1-loss", "k1-reward", "k3-loss", "exact-loss", "k2-loss"
DISCOUNTED = "exact-discount-0.9"
ARMS = (NONE, UNSOUND, SOUND, K3, EXACT, K2, DISCOUNTED)
LIMITED = (SOUND, EXACT, DISCOUNTED, K3, K2)
"""The arms that hold the policy, which reach `SHARE` at different KLs."""
SMALL, LARGE = "0.03", "1.0"
GAPS = {
    "k1 in the reward at β = 0.03 answers more right than no KL": (SOUND, SMALL, NONE, 1),
    "the exact KL as loss at β = 0.03 answers more right than no KL": (EXACT, SMALL, NONE, 1),
    "k1 as loss at β = 1 answers fewer right than k1 in the reward": (UNSOUND, LARGE, SOUND, -1),
    "k1 as loss at β = 1 answers fewer right than the exact KL as loss": (UNSOUND, LARGE, EXACT, -1),
    "a discounted future at β = 0.03 answers more right than no KL": (DISCOUNTED, SMALL, NONE, 1),
    "a discounted future at β = 0.03 answers more right than k1 in the reward": (DISCOUNTED, SMALL, SOUND, 1),
    "a discounted future at β = 0.03 answers more right than the exact KL as loss": (DISCOUNTED, SMALL, EXACT, 1),
}
"""At equal KL: an arm at a coefficient, after its last update; the arm whose curve it is compared with; the sign."""
CLOSE = 0.25
"""Two KLs are close if they differ by less than this share."""


def run(settings: Settings) -> Numbers:
    # Of the runs that compare the division by a standard deviation, only k2 as a loss without it.
    shown = {(K2, "undivided"), *((arm, None) for arm in ARMS)}
    rows = [row for each in (EXPERIMENT, *EXPERIMENT.also) for row in runs.rows_of(each, settings)]
    rows = [row for row in rows if (row["arm"], row.get("division")) in shown]
    start = runs.over_seeds(runs.at_update(rows, 0), runs.RIGHT_IN)["mean"]
    trained = [row for row in rows if row["update"]]
    by_arm = runs.grouped(trained, runs.ARM)
    reached = {arm: _reached(by_arm[arm], start) for arm in LIMITED}
    return {
        "made": runs.provenance(rows),
        "arms": {arm: runs.over_seeds(each, "kl") for arm, each in reached.items()},
        "apart": runs.difference(reached[K3], reached[SOUND], "kl"),
        "gaps": {name: _gap(by_arm, start, *sides) for name, sides in GAPS.items()},
        "points": runs.points_of(trained, runs.ARM),
    }


def _reached(rows: list[runs.Row], start: float) -> list[runs.Row]:
    """The KL of each seed at which right answers reach `SHARE`, with its error; none if a seed has no value."""
    crossings = []
    for seed, own in runs.grouped(rows, runs.SEED).items():
        rise = runs.Rise(own, start)
        if (kl := rise.kl_of(SHARE)) is None:
            return []
        crossings.append({"seed": seed, "kl": kl, "kl_se": rise.error_of_kl(kl)})
    return crossings


def _gap(by_arm: dict[str, list[runs.Row]], start: float, arm: str, coef: str, other: str, sign: int) -> runs.SeedMean:
    """Right answers of an arm at its last update, less those of another arm's curve at the same KL and seed."""
    gaps, curves = [], runs.grouped(by_arm[other], runs.SEED)
    for end in runs.at_update((row for row in by_arm[arm] if row["kl_coef"] == coef), LAST):
        curve, kl = runs.Rise(curves[end["seed"]], start), end[runs.FAR]
        gap = sign * (end[runs.RIGHT_IN] - curve.right(kl))
        error = math.hypot(end[f"{runs.RIGHT_IN}_se"], curve.error(kl))
        gaps.append({"seed": end["seed"], "gap": gap, "gap_se": error})
    return runs.over_seeds(gaps, "gap")


def check(numbers: Numbers) -> list[Check]:
    checks = []
    for claim, gap in numbers["gaps"].items():
        check = runs.exceeds_over_seeds(f"at equal KL, {claim}", gap)
        checks.append(replace(check, ours=GAPS[claim][0] == DISCOUNTED))
    claim = "k3 as loss and k1 in the reward need the same KL for 25% right answers, within a quarter"
    sound, apart = numbers["arms"][SOUND], numbers["apart"]
    return [*checks, runs.equal_over_seeds(claim, apart, CLOSE * (sound["mean"] or 0.0))]
