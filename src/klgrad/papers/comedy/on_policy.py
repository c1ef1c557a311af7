"""Training with biased gradients of the KL becomes unstable, and unbiased configurations are better in and out of the
domain.

SmolLM2-135M-Instruct learns sums and differences with k1 or k3 in the reward, as a loss, or in both places. Advantages
are centred in their group and not divided by a standard deviation, as in RLOO. A run has collapsed if it ends with
fewer right answers than it began with; where there are runs of 300 updates they are judged, because the paper's
collapses come within about 250. Design, table and limits: docs/experiments/places.md.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from ...drawing import BLUE, STYLES
from .. import runs
from ..study import Check, Experiment, Figure, Numbers, Settings, ours

LABELS = {
    "none": ("no KL", "black", "-"),
    "k1-reward": ("k1 in the reward", STYLES["k1-reward"][0], "-"),
    "k1-loss": ("k1 as loss", STYLES["k1-reward"][0], ":"),
    "k1-both": ("k1 in both", STYLES["k1-reward"][0], "--"),
    "k3-reward": ("k3 in the reward", STYLES["k3-loss"][0], "-"),
    "k3-loss": ("k3 as loss", STYLES["k3-loss"][0], ":"),
    "k3-both": ("k3 in both", STYLES["k3-loss"][0], "--"),
    "exact-loss": ("exact as loss", BLUE, ":"),
}
"""The label of an arm; its colour is its estimator, its line the place of the KL."""
ROWS = (("none", "k1-reward", "k1-loss", "k1-both", "exact-loss"), ("none", "k3-reward", "k3-loss", "k3-both"))
MARKS = {"-": "o", ":": "s", "--": "^"}


def draw(numbers: Numbers, figure: Figure) -> None:
    """A row for each estimator: a panel for each coefficient, and one with the runs over the KL."""
    coefficients = sorted({run["kl_coef"] for run in numbers["runs"]} - {"0.0"}, key=float)
    figure.set_size_inches(3.5 * (len(coefficients) + 1), 8)
    axes = figure.subplots(len(ROWS), len(coefficients) + 1, sharey=True)
    for (*panels, last), arms in zip(axes, ROWS, strict=True):
        for coefficient, axis in zip(coefficients, panels, strict=True):
            for arm, (label, colour, line) in ((arm, LABELS[arm]) for arm in arms):
                path = numbers["paths"].get(f"{arm} {'0.0' if arm == 'none' else coefficient}")
                runs.curve(axis, path, colour, line, label=label)
            axis.set(xlabel="updates", title=f"β = {float(coefficient):g}\n3 seeds, ± 1 SE", xticks=[0, 20, 40, 60])
        for run in (run for run in numbers["runs"] if run["name"] in arms):
            _, colour, line = LABELS[run["name"]]
            last.plot(run["kl"], run["correct_in"], MARKS[line], ms=5, color=colour, mfc="none", zorder=3)
        runs.over_kl(last, numbers["curve"], [run for run in numbers["runs"] if run["name"] in numbers["curve"]["off"]])
        last.set_title("each run of every β; circles: reward,\nsquares: loss, triangles: both", fontsize=10)
        panels[0].set_ylabel("right answers, in domain")
        panels[0].legend(loc="lower right", fontsize=8.5)


EXPERIMENT = Experiment(
    "comedy.csv",
    "exp_comedy.py",
    also=(Experiment("std.csv", "exp_std.py"), Experiment("long.csv", "exp_long.py")),
)
"""Of the other files only the runs of `POOLED` and of `COLLAPSES` are read."""
LAST = 60
SETTING = "{arm} {kl_coef}"
RIGHT, OUT, FAR, ENTROPY = "correct_in", "correct_out", "kl_per_sequence", "entropy_per_token"
COLUMNS = (RIGHT, OUT, FAR, ENTROPY, "length", "skipped_updates")
NOT_A_KL = ("k1-loss", "k3-reward")
"""Arms whose expected gradient does not lead to ref; the curve of right answers over the KL is that of the others."""
POOLED = ("k1-reward", "k3-loss")
"""The arms that three experiments have at one coefficient, without a division by a standard deviation."""
PLACES = {RIGHT: "", OUT: "out of domain, "}
K1_AND_K3 = ("k1-reward 0.1", "k3-loss 0.1")
HORIZON = "after 60 updates; the paper's collapses come within about 250"
HIGHER = {
    "k3 in the reward ends below its start at β = 0.03": (RIGHT, "start", "k3-reward 0.03"),
    "k1 in the reward answers more right than k3 as loss at β = 0.03": (RIGHT, "k1-reward 0.03", "k3-loss 0.03"),
    "k1 in the reward answers more right than k3 as loss at β = 0.1": (RIGHT, "k1-reward 0.1", "k3-loss 0.1"),
    "out of domain, k1 in the reward answers more right than k3 as loss at β = 0.1": (OUT, *K1_AND_K3),
    "k1 in the reward answers more right at β = 0.03 than at 0.1": (RIGHT, "k1-reward 0.03", "k1-reward 0.1"),
    "k3 in both places answers more right than k3 as loss at β = 0.1": (RIGHT, "k3-both 0.1", "k3-loss 0.1"),
    "k3 as loss keeps a higher entropy than k1 in the reward at β = 0.1": (ENTROPY, "k3-loss 0.1", "k1-reward 0.1"),
}
"""What should be higher, and than what: a column and two settings."""
OUR_HIGHER = {
    "k1 as loss answers fewer right at β = 1 than without a KL": (RIGHT, "none 0.0", "k1-loss 1.0"),
    "k3 in the reward answers fewer right at β = 1 than without a KL": (RIGHT, "none 0.0", "k3-reward 1.0"),
    "k3 in the reward ends at a higher KL at β = 0.1 than without a KL": (FAR, "k3-reward 0.1", "none 0.0"),
}
LONG = 300
COLLAPSES = {
    "k3 in the reward ends below its start at β = 0.1, after 300 updates": "k3-reward-0.1",
    "k3 in the reward ends below its start at β = 1, after 300 updates": "k3-reward-1",
    "k1 as loss ends below its start at β = 1, after 300 updates": "k1-loss-1",
}
"""Arms of the long runs."""


def run(settings: Settings) -> Numbers:
    rows = runs.rows_of(EXPERIMENT, settings)
    std, long = (runs.rows_of(other, settings) for other in EXPERIMENT.also)
    last, *others = (runs.at_update(each, LAST) for each in (rows, std, long))
    ends, starts = (runs.by_setting(runs.at_update(rows, update), SETTING) for update in (LAST, 0))
    fallen = lambda own: runs.difference(runs.at_update(own, 0), runs.at_update(own, LONG), RIGHT)
    return {
        "made": runs.provenance([*rows, *(row for each in others for row in each)]),
        "end": runs.summaries(last, COLUMNS, SETTING),
        # A start is that of the runs that are compared with it.
        "differences": runs.differences(HIGHER | OUR_HIGHER, ends, starts),
        "fallen": {arm: fallen([row for row in long if row["arm"] == arm]) for arm in COLLAPSES.values()},
        "paths": runs.paths(rows, RIGHT, SETTING),
        "runs": runs.points_of(last, runs.ARM),
        "curve": runs.curve_of([row for row in last if row["arm"] not in NOT_A_KL], runs.ARM),
        "pooled": {
            coef: {column: _pooled_gaps((last, *others), coef, column) for column in PLACES} for coef in ("0.03", "0.1")
        },
    }


def _pooled_gaps(files: Iterable[list[runs.Row]], coef: str, column: str) -> Numbers:
    """The runs of `POOLED` with one seed in one experiment, at a coefficient; advantages are not divided."""
    pairs = []
    for last in files:
        rows = [row for row in last if row["kl_coef"] == coef and row.get("division") != "divided"]
        by_arm = runs.grouped(rows, runs.ARM)
        one, other = (by_arm.get(arm, []) for arm in POOLED)
        pairs += runs.gaps(one, other, column)
    return {"pairs": len(pairs), **runs.over_seeds(pairs, "gap")}


def check(numbers: Numbers) -> list[Check]:
    differences = numbers["differences"]
    checks = [runs.exceeds_over_seeds(claim, numbers["fallen"][arm]) for claim, arm in COLLAPSES.items()]
    for claim, (_, high, _) in HIGHER.items():
        gap = differences[claim]
        checks.append(runs.collapses(claim, gap, HORIZON) if high == "start" else runs.exceeds_over_seeds(claim, gap))
    pooled = []  # ours, because these runs contain those by which the paper's sentences are judged
    for coef, (column, place) in product(numbers["pooled"], PLACES.items()):
        gap = numbers["pooled"][coef][column]
        claim = f"{place}k1 in the reward answers more right than k3 as loss at β = {coef}, over all experiments"
        judged = runs.exceeds_over_seeds(claim, gap)
        pooled.append(replace(judged, measured=f"{judged.measured}, {gap['pairs']} pairs of runs"))
    return [*checks, *ours(*pooled, *(runs.exceeds_over_seeds(claim, differences[claim]) for claim in OUR_HIGHER))]
