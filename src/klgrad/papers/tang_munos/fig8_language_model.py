"""Far from ref, k3 differentiated token by token makes little progress; sequence-level gradients beat token-level ones,
and variance reduction makes them faster.

Figure 8 of the paper, on a smaller model: a student with 20 of SmolLM2-135M's 30 layers is trained towards the whole
model by the KL alone. The sentences are judged by the paper's measure, the KL on the student's own completions, where
completions may end, as the paper's do, and at fixed length, where no arm can lower it by ending early. The learning
rate of an arm is the one that ends lowest with seed 0, which is also one of the three seeds by which it is judged. The
middle panels show what that measure hides: on the teacher's completions the sequence-level students are farther from
the teacher than at the start. Design, tables and limits: docs/experiments.md.
"""

import math
from typing import TYPE_CHECKING

from ...drawing import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from ..runs import (
    Found,
    Row,
    at_update,
    band,
    below_if_run,
    difference,
    exceeds_over_seeds,
    over_seeds,
    provenance,
    rows_of,
    summaries,
)
from ..study import Check, Experiment, Numbers, Settings
from .fig8_sequences import LITTLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The figure of `fig8_language_model`: a row of panels for each kind of length.

PANELS = {
    "kl_per_sequence": "KL(student‖teacher) per completion,\non the student's completions (the paper's measure)",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions",
}
LAST_PANEL = {
    "may-end": {"length": "tokens per completion"},
    "fixed-length": {"entropy_per_token": "entropy of the student per token"},
}
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


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over seeds, with bands of one standard error."""
    figure.set_size_inches(15, 8.4)
    axes = figure.subplots(2, 3, sharex=True)
    for across, (lengths, title) in zip(axes, TITLES.items(), strict=True):
        for axis, (measure, label) in zip(across, (PANELS | LAST_PANEL[lengths]).items(), strict=True):
            for arm, (name, color, line) in STYLES.items():
                found = numbers["arms"][f"{lengths} {arm}"][measure]
                path = {column: [x[column] for x in found] for column in ("mean", "error")}
                axis.plot(numbers["updates"], path["mean"], line, color=color, label=name, lw=1.8)
                band(axis, numbers["updates"], path, color, alpha=0.15)
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
    figure.legend(handles, names, ncols=4, loc="outside lower center")


EXPERIMENT = Experiment("fig8_seeds.csv", "exp_fig8.py", ("sweep", "seeds"))
LAST = 40
COLUMNS = ("kl_per_sequence", "kl_per_token", "length", "forward_kl_per_token", "entropy_per_token", "correct")
KL, FORWARD = "kl_per_sequence", "forward_kl_per_token"
LENGTHS = {"may-end": "where completions may end", "fixed-length": "at fixed length"}
TOKEN_LEVEL = ("k3-loss", "k2-loss", "exact-token")
LITTLE_PROGRESS = "k3 as loss makes little progress, less than half of that of k2 as loss"
SLOWER = {
    "k3 as loss ends farther from the teacher than k2 as loss": ("k3-loss", "k2-loss"),
    "vanilla over sequences ends nearer than k2 as loss": ("k2-loss", "k1-reward"),
    "leave-one-out over sequences ends nearer than k2 as loss": ("k2-loss", "k1-reward-leave-one-out"),
    "cumulative ends nearer than k2 as loss": ("k2-loss", "k1-reward-to-go"),
    "leave-one-out ends nearer than vanilla over sequences": ("k1-reward", "k1-reward-leave-one-out"),
    "cumulative ends nearer than vanilla over sequences": ("k1-reward", "k1-reward-to-go"),
    "(ours) exact with a discounted future ends nearer than exact token": (
        "exact-token",
        "exact-discount-0.9-leave-one-out",
    ),
}
"""The arm that should end at the higher KL, and the one at the lower."""
FARTHER = "(ours) on the teacher's completions the best sequence-level student is farther than the worst token-level"


def run(settings: Settings) -> Numbers:
    """Every arm over updates."""
    rows = rows_of(EXPERIMENT, settings)
    updates = sorted({int(row["update"]) for row in rows})
    at = [summaries(at_update(rows, update), COLUMNS, setting_of) for update in updates]
    return {
        "made": provenance(rows),
        "updates": updates,
        "rates": {setting_of(row): row["learning_rate"] for row in rows},
        "progress": {lengths: _progress(rows, lengths) for lengths in LENGTHS},
        "arms": {name: {column: [found[name][column] for found in at] for column in COLUMNS} for name in at[0]},
    }


def setting_of(row: Row) -> str:
    """Kind of length, and arm."""
    return f"{row['lengths']} {row['arm']}"


def _progress(rows: list[Row], lengths: str) -> Found:
    """The progress of k3 as loss as a share of that of k2 as loss, seed by seed; its mean is under "difference"."""
    at = {(row["arm"], row["seed"], int(row["update"])): row for row in rows if row["lengths"] == lengths}
    kl = lambda arm, seed, update: float(at[arm, seed, update][KL])
    gained = lambda arm, seed: kl(arm, seed, 0) - kl(arm, seed, LAST)
    relative = lambda arm, seed: float(at[arm, seed, LAST][f"{KL}_se"]) / gained(arm, seed)
    shares = []
    for seed in sorted({seed for _, seed, _ in at}):
        share = gained("k3-loss", seed) / gained("k2-loss", seed)
        error = share * math.hypot(relative("k3-loss", seed), relative("k2-loss", seed))
        shares.append({"share": str(share), "share_se": str(error)})
    found = over_seeds(shares, "share")
    return {"difference": found["mean"], "error": found["error"], "seeds": found["seeds"]}


def check(numbers: Numbers) -> list[Check]:
    """The claim at the last update, where completions may end and at fixed length."""
    found = [each for lengths, words in LENGTHS.items() for each in _at_length(numbers, lengths, words)]
    return sorted(found, key=lambda each: each.ours)  # the paper's sentences first


def _at_length(numbers: Numbers, lengths: str, words: str) -> list[Check]:
    arms = {name.split()[1]: arm for name, arm in numbers["arms"].items() if name.startswith(lengths)}
    last = lambda arm, column: arms[arm][column][numbers["updates"].index(LAST)]
    best = min((arm for arm in arms if arm not in TOKEN_LEVEL), key=lambda arm: last(arm, FORWARD)["mean"])
    worst = max(TOKEN_LEVEL, key=lambda arm: last(arm, FORWARD)["mean"])
    compared = {claim: difference(*(last(arm, KL) for arm in sides)) for claim, sides in SLOWER.items()}
    compared[FARTHER] = difference(last(best, FORWARD), last(worst, FORWARD))
    return [
        below_if_run(f"{LITTLE_PROGRESS}, {words}", numbers["progress"][lengths], LITTLE),
        *(exceeds_over_seeds(f"{claim}, {words}", found) for claim, found in compared.items()),
    ]
