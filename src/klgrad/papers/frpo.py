"""A KL in the reward is better than k3 as a loss if advantages are not divided by the group's standard deviation (Shah
et al.), and learns far less if they are (after Yao et al., who report a collapse).

The papers use different algorithms and models. Here the division is all that differs: SmolLM2-135M-Instruct learns sums
and differences with k1 in the reward, k1 in the advantage after the division, or the gradient of k2 or k3 as a loss.
The effective coefficient is the weight of the KL's gradient relative to that of the reward's. Right answers are judged
at a coefficient of 0.1. Reasons, table and limits: docs/experiments/division.md.
"""

from ..drawing import STYLES
from . import runs
from .study import Check, Experiment, Figure, Numbers, Settings, ours

SOURCE = """Yao et al., FRPO, arXiv 2601.10201, against Shah et al., "A Comedy of Estimators", arXiv 2512.21852."""
LABELS = {
    "k1-reward": ("k1 in the reward", "k1-reward"),
    "k1-advantage-leave-one-out": ("k1 in the advantage", "k1-advantage"),
    "k2-loss": ("k2 as loss", "k2-loss"),
    "k3-loss": ("k3 as loss", "k3-loss"),
    "none": ("no KL", "k1-loss"),
}
"""The label of an arm, and the estimator whose colour it has."""


def draw(numbers: Numbers, figure: Figure) -> None:
    """Four panels; filled marks are undivided, open marks divided."""
    figure.set_size_inches(15, 4.4)
    undivided, divided, frontier, effective = figure.subplots(1, 4)
    for axis, division in ((undivided, "undivided"), (divided, "divided")):
        for arm, (label, estimator) in LABELS.items():
            runs.curve(axis, numbers["paths"][f"{arm} {division}"], STYLES[estimator][0], label=label)
        axis.set(xlabel="updates", ylabel="right answers, in domain", xticks=[0, 20, 40, 60])
        axis.set_title(f"advantages {division}, β = 0.1\n3 seeds, ± 1 SE")
    divided.sharey(undivided)
    for run in numbers["runs"]:
        colour, face = _look(run["name"])
        frontier.plot(run["kl"], run["correct_in"], "o", ms=5, color=colour, mfc=face, zorder=3)
    runs.over_kl(frontier, numbers["curve"], numbers["runs"])
    frontier.set_ylabel("right answers, in domain")
    frontier.set_title("each run of every β\n(filled: undivided; open: divided)")
    for setting, end in numbers["end"].items():
        colour, face = _look(setting.rpartition(" ")[0])
        if not setting.startswith("none"):
            x, y = end["effective"], end["kl_per_sequence"]
            look = {"fmt": "o", "ms": 5, "color": colour, "mfc": face, "lw": 1}
            effective.errorbar(x["mean"], y["mean"], xerr=x["error"], yerr=y["error"], **look)
    effective.set(xscale="log", yscale="log", xlabel="effective coefficient", ylabel="KL(π‖ref) per completion, nats")
    effective.set_title("every β (filled: undivided)\n3 seeds, ± 1 SE")
    effective.set_xticks([0.01, 0.03, 0.1, 0.3], ["0.01", "0.03", "0.1", "0.3"])
    effective.set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    effective.minorticks_off()
    figure.legend(*undivided.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8.5)


def _look(name: str) -> tuple[str, str]:
    """Colour of an arm, and what fills its mark."""
    arm, division = name.split()
    colour = STYLES[LABELS[arm][1]][0]
    return colour, colour if division == "undivided" else "white"


EXPERIMENT = Experiment("std.csv", "exp_std.py")
ARM, SETTING = "{arm} {division}", "{arm} {division} {kl_coef}"
LAST = 60
GROUP = 8
"""Completions of a prompt."""
COMPARED_AT = "0.1"
"""The coefficient at which the claims are judged."""
COLUMNS = ("correct_in", "correct_out", "kl_per_sequence", "train_groups_without_spread", "skipped_updates")
REWARD, DIVIDED = "k1-reward undivided", "k1-reward divided"
ADVANTAGE, DIVIDED_ADVANTAGE = "k1-advantage-leave-one-out undivided", "k1-advantage-leave-one-out divided"
RIGHT, OUT, EFFECTIVE = "correct_in", "correct_out", "effective"
COMPARISONS = {
    "k1 in the reward answers more right undivided than divided": (RIGHT, REWARD, DIVIDED),
    "divided, k1 in the advantage answers more right than k1 in the reward": (RIGHT, DIVIDED_ADVANTAGE, DIVIDED),
    "undivided, k1 in the reward answers more right than k3 as loss": (RIGHT, REWARD, "k3-loss undivided"),
    "undivided, k1 in the reward answers more right than k2 as loss": (RIGHT, REWARD, "k2-loss undivided"),
    "undivided, k1 in the reward answers more right than k1 in the advantage": (RIGHT, REWARD, ADVANTAGE),
    "undivided, out of domain, k1 in the reward answers more right than k3 as loss": (OUT, REWARD, "k3-loss undivided"),
    "the division raises the effective coefficient of k1 in the reward": (EFFECTIVE, DIVIDED, REWARD),
    "the division lowers the effective coefficient of k1 in the advantage": (EFFECTIVE, ADVANTAGE, DIVIDED_ADVANTAGE),
}
"""What should be higher, and than what: a column and two settings."""
CLAIMED = tuple(COMPARISONS)[:3]
"""The comparisons that follow from the papers' claims; the others are ours."""
OF_COEFFICIENTS = tuple(claim for claim, (column, *_) in COMPARISONS.items() if column == EFFECTIVE)


def run(settings: Settings) -> Numbers:
    rows = [{**row, "effective": _measured_effective(row)} for row in runs.rows_of(EXPERIMENT, settings)]
    last = runs.at_update(rows, LAST)
    by_name = runs.by_setting(last, SETTING)
    of = lambda arm, coef: by_name.get(f"{arm} {coef}", [])
    coefficients = sorted({row["kl_coef"] for row in last} - {"0.0"}, key=float)
    return {
        "made": runs.provenance(rows),
        "end": runs.summaries(last, (*COLUMNS, "effective"), SETTING),
        "paths": runs.paths([row for row in rows if row["kl_coef"] in (COMPARED_AT, "0.0")], "correct_in", ARM),
        "comparisons": {
            claim: {c: runs.difference(of(higher, c), of(lower, c), column) for c in coefficients}
            for claim, (column, higher, lower) in COMPARISONS.items()
        },
        "runs": runs.points_of(last, ARM),
        "curve": runs.curve_of(last, ARM),
    }


def _measured_effective(row: runs.Row) -> float:
    """The effective coefficient of the updates before this row.

    The script measured what the division makes of the coefficient. In addition, a reward minus the mean of its group,
    its own among them, has 1 - 1/n of the reward's gradient; so has a KL inside the reward, but no other.
    """
    measured = row["train_effective_kl_coef"] or 0.0
    return measured if row["arm"] == "k1-reward" else measured * GROUP / (GROUP - 1)


def check(numbers: Numbers) -> list[Check]:
    differences = {claim: each[COMPARED_AT] for claim, each in numbers["comparisons"].items()}
    judged = lambda claims: (runs.exceeds_over_seeds(claim, differences[claim]) for claim in claims)
    return [*judged(CLAIMED), *ours(*judged(OF_COEFFICIENTS))]
