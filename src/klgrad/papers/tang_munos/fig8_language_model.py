"""Far from ref, k3 differentiated token by token makes little progress; sequence-level gradients beat token-level ones,
and variance reduction makes them faster.

Figure 8 of the paper, on a smaller model: a student with 20 of SmolLM2-135M's 30 layers is trained towards the whole
model by the KL alone. The sentences are judged by the KL on the student's own completions, where completions may end
and at fixed length, where no arm can lower it by ending early. The learning rate of an arm is the one that ends lowest
with seed 0. Arms are judged by six other seeds, seed by seed, and k3 as a loss, which has no such runs, by seeds 0 to
2. Design, tables and limits: docs/experiments/distillation.md.
"""

from dataclasses import replace
from statistics import median

from ...drawing import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from .. import runs
from ..study import Check, Experiment, Figure, Numbers, Settings
from .fig8_sequences import LITTLE

PANELS = {
    "kl_per_sequence": "KL(student‖teacher) per completion,\non the student's completions (the paper's measure), nats",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions, nats",
}
SHORT = 4
"""Completions of fewer tokens have a mark of their own."""
TITLES = {"may-end": "Completions may end", "fixed-length": "Completions of 32 tokens"}
STYLES = {
    "k3-loss": ("token: k3 as loss (GRPO)", ORANGE, "-"),
    "k2-loss": ("token: k2 as loss", SKY, "-"),
    "exact-token": ("token: exact", BLACK, "-"),
    "k1-reward": ("sequence: k1 in reward", GREEN, "--"),
    "k1-reward-leave-one-out": ("sequence: k1, leave-one-out", BLUE, "--"),
    "k1-reward-to-go": ("sequence: k1 to go", PURPLE, "--"),
    "exact-discount-0.9-leave-one-out": ("sequence: exact, discount 0.9, leave-one-out", VERMILION, "--"),
}

MOST_LINES = 6
"""In a panel: of our arm, the last one, the ends are drawn alone."""


def draw(numbers: Numbers, figure: Figure) -> None:
    figure.set_size_inches(15, 8.6)
    axes = figure.subplots(2, 3)
    for across, (lengths, title) in zip(axes, TITLES.items(), strict=True):
        by_arm = {arm: numbers["runs"][f"{lengths} {arm}"] for arm in STYLES}
        for axis, (measure, label) in zip(across, PANELS.items(), strict=False):
            for arm, (name, color, line) in list(STYLES.items())[:MOST_LINES]:
                at = [median(run[measure][i] for run in by_arm[arm]) for i in range(len(numbers["updates"]))]
                axis.plot(numbers["updates"], at, line, color=color, label=name, lw=1.8)
            axis.set_title(f"{title}: {label}\nmedians of 6 seeds (k3: 3)", fontsize=9.5)
            axis.set_xlabel("updates")
        for i, (arm, (_, color, _)) in enumerate(STYLES.items()):
            for j, run in enumerate(by_arm[arm]):
                face = "none" if run["length"][-1] < SHORT else color
                at = i + 0.1 * (j - (len(by_arm[arm]) - 1) / 2)
                across[2].plot(at, run[KL][-1], "o", color=color, mfc=face, ms=5)
        across[2].set_xticks([])
        across[2].set_xlabel(f"arms in the order of the legend; open: fewer than {SHORT} tokens")
        across[2].set_title(f"{title}: {PANELS[KL]}\neach run after 40 updates, 6 seeds (k3: 3)", fontsize=9.5)
        for axis in across:
            axis.grid(alpha=0.25)
            runs.logarithmic(axis)
    for name, color, line in list(STYLES.values())[MOST_LINES:]:
        axes[0][0].plot([], [], line, color=color, label=f"{name} (ends alone)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), ncols=4, loc="outside lower center")


EXPERIMENT = Experiment("fig8_seeds.csv", "exp_fig8.py", ("sweep", "seeds", "fresh"))
LAST = 40
SETTING = "{lengths} {arm}"
COLUMNS = ("kl_per_sequence", "kl_per_token", "length", "forward_kl_per_token", "entropy_per_token", "correct")
KL, FORWARD = "kl_per_sequence", "forward_kl_per_token"
LENGTHS = {"may-end": "where completions may end", "fixed-length": "at fixed length"}
FRESH_SEEDS = ("3", "4", "5", "6", "7", "8")
"""They had no part in the choice of rates."""
TOKEN_LEVEL = ("k3-loss", "k2-loss", "exact-token")
LITTLE_PROGRESS = "k3 as loss makes little progress, less than half of that of k2 as loss"
SLOWER = {
    "k3 as loss ends farther from the teacher than k2 as loss": ("k3-loss", "k2-loss"),
    "vanilla over sequences ends nearer than k2 as loss": ("k2-loss", "k1-reward"),
    "leave-one-out over sequences ends nearer than k2 as loss": ("k2-loss", "k1-reward-leave-one-out"),
    "cumulative ends nearer than k2 as loss": ("k2-loss", "k1-reward-to-go"),
    "leave-one-out ends nearer than vanilla over sequences": ("k1-reward", "k1-reward-leave-one-out"),
    "cumulative ends nearer than vanilla over sequences": ("k1-reward", "k1-reward-to-go"),
}
"""The arm that should end at the higher KL, and the one at the lower."""
OUR_SLOWER = {
    "exact with a discounted future ends nearer than exact token": ("exact-token", "exact-discount-0.9-leave-one-out")
}
FARTHER = "on the teacher's completions the best sequence-level student is farther than the worst token-level"


def run(settings: Settings) -> Numbers:
    rows = runs.finite_rows(EXPERIMENT, settings)
    judged = _judged(rows)
    updates = sorted({row["update"] for row in rows})
    by_seed = lambda group: runs.grouped(group, runs.SEED).values()
    at = [runs.summaries(runs.at_update(judged, update), COLUMNS, SETTING) for update in updates]
    return {
        "made": runs.provenance(rows),
        "updates": updates,
        "rates": {SETTING.format_map(row): f"{row['learning_rate']:g}" for row in rows},
        "progress": {lengths: _progress(rows, lengths) for lengths in LENGTHS},
        "arms": {name: {column: [arms[name][column] for arms in at] for column in COLUMNS} for name in at[0]},
        # What is drawn of each run, over updates.
        "runs": {
            name: [{c: [row[c] for row in own] for c in (*PANELS, "length")} for own in by_seed(group)]
            for name, group in runs.grouped(judged, SETTING).items()
        },
        "differences": {lengths: _differences(runs.at_update(rows, LAST), lengths) for lengths in LENGTHS},
    }


def _judged(rows: list[runs.Row]) -> list[runs.Row]:
    """The runs with fresh seeds, and all runs of an arm that has none."""
    with_fresh = {SETTING.format_map(row) for row in rows if row["seed"] in FRESH_SEEDS}
    return [row for row in rows if row["seed"] in FRESH_SEEDS or SETTING.format_map(row) not in with_fresh]


def _differences(last: list[runs.Row], lengths: str) -> dict[str, runs.SeedMean]:
    """The arm that should be higher less the other, by the seeds of `_judged` of both, or by all that both have."""
    last = [row for row in last if row["lengths"] == lengths]
    by_arm, judged = (runs.grouped(rows, runs.ARM) for rows in (last, _judged(last)))

    def less(one: str, other: str, column: str) -> runs.SeedMean:
        have_fresh = all(row["seed"] in FRESH_SEEDS for arm in (one, other) for row in judged[arm])
        chosen = judged if have_fresh else by_arm
        return runs.difference(chosen[one], chosen[other], column)

    forward = lambda arm: runs.over_seeds(judged[arm], FORWARD)["mean"]
    best = min((arm for arm in judged if arm not in TOKEN_LEVEL), key=forward)
    worst = max((arm for arm in judged if arm in TOKEN_LEVEL), key=forward)
    ends = {claim: less(*sides, KL) for claim, sides in (SLOWER | OUR_SLOWER).items()}
    return ends | {FARTHER: less(best, worst, FORWARD)}


def _progress(rows: list[runs.Row], lengths: str) -> runs.SeedMean:
    """The progress of k3 as loss as a share of that of k2 as loss, seed by seed; the start is taken as known."""
    at = runs.grouped((row for row in rows if row["lengths"] == lengths), "{arm} {update}")
    start = lambda arm: [{"seed": row["seed"], KL: row[KL]} for row in at[f"{arm} 0"]]
    gained = lambda arm: runs.gaps(start(arm), at[f"{arm} {LAST}"], KL)
    excess = runs.excess(gained("k3-loss"), gained("k2-loss"), "gap")
    return excess | {"mean": 1 + excess["mean"]}


def check(numbers: Numbers) -> list[Check]:
    """The claim at the last update, where completions may end and at fixed length."""
    checks = []
    for lengths, words in LENGTHS.items():
        checks.append(runs.below_over_seeds(f"{LITTLE_PROGRESS}, {words}", numbers["progress"][lengths], LITTLE))
        for claim, gap in numbers["differences"][lengths].items():
            check = runs.exceeds_over_seeds(f"{claim}, {words}", gap)
            checks.append(replace(check, ours=claim not in SLOWER))
    return sorted(checks, key=lambda each: each.ours)  # the paper's sentences first
