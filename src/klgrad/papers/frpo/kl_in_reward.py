"""A KL in the reward is better than k3 as a loss if advantages are not divided by the group's standard deviation (Shah
et al.), and learns far less if they are (after Yao et al., who report a collapse).

The papers use different algorithms and models. Here the division is all that differs: SmolLM2-135M-Instruct learns sums
and differences with k1 in the reward, k1 in the advantage after the division, or the gradient of k2 or k3 as a loss. A
group whose answers are all right or all wrong has no spread but that of the KL. The division makes that spread 1
whatever the coefficient is, so a smaller coefficient does not weaken the KL there. A KL outside the reward becomes
weaker instead, because the division enlarges the reward's part alone. Both show in the effective coefficient: the
weight of the KL's gradient relative to that of the reward's. No run collapses here in its 60 updates. Right answers are
judged at a coefficient of 0.1, which has three seeds. Design, table and limits: docs/experiments.md.
"""

from ..recorded_runs import (
    Row,
    at_start,
    at_update,
    difference,
    exceeds_over_seeds,
    paths,
    provenance,
    rows_of,
    summaries,
)
from ..reward_and_kl import curve_of, runs_of
from ..study import Check, Experiment, Numbers, Settings
from .kl_in_reward_figure import draw as draw

EXPERIMENT = Experiment("std.csv", "exp_std.py")
LAST = 60
GROUP = 8
"""Completions of a prompt."""
COMPARED_AT = "0.1"
"""The coefficient with three seeds, at which the claims are judged."""
COLUMNS = ("correct_in", "correct_out", "kl_per_sequence", "train_groups_without_spread", "skipped_updates")
COMPARISONS = {
    "k1 in the reward answers more right undivided than divided": (
        "correct_in",
        "k1-reward undivided",
        "k1-reward divided",
    ),
    "divided, k1 in the advantage answers more right than k1 in the reward": (
        "correct_in",
        "k1-advantage-leave-one-out divided",
        "k1-reward divided",
    ),
    "undivided, k1 in the reward answers more right than k3 as loss": (
        "correct_in",
        "k1-reward undivided",
        "k3-loss undivided",
    ),
    "undivided, k1 in the reward answers more right than k2 as loss": (
        "correct_in",
        "k1-reward undivided",
        "k2-loss undivided",
    ),
    "undivided, k1 in the reward answers more right than k1 in the advantage": (
        "correct_in",
        "k1-reward undivided",
        "k1-advantage-leave-one-out undivided",
    ),
    "undivided, out of domain, k1 in the reward answers more right than k3 as loss": (
        "correct_out",
        "k1-reward undivided",
        "k3-loss undivided",
    ),
    "the division raises the effective coefficient of k1 in the reward": (
        "effective",
        "k1-reward divided",
        "k1-reward undivided",
    ),
    "the division lowers the effective coefficient of k1 in the advantage": (
        "effective",
        "k1-advantage-leave-one-out undivided",
        "k1-advantage-leave-one-out divided",
    ),
}
"""What should be higher, and than what: a column and two settings."""
CLAIMED = tuple(COMPARISONS)[:3]
"""The comparisons that follow from the papers' claims; the others are ours."""


def run(settings: Settings) -> Numbers:
    """The settings at the last update, their paths, their comparisons, and the curve that they have in common."""
    rows = [{**row, "effective": _effective(row)} for row in rows_of(EXPERIMENT, settings)]
    last = at_update(rows, LAST)
    end = summaries(last, (*COLUMNS, "effective"), setting_of)
    return {
        "made": provenance(rows),
        "start": {c: at_start(rows, c) for c in COLUMNS[:2]},
        "end": end,
        "paths": paths([row for row in rows if row["kl_coef"] in (COMPARED_AT, "0.0")], "correct_in", name_of),
        "comparisons": {claim: _at_every_coefficient(end, *sides) for claim, sides in COMPARISONS.items()},
        "runs": runs_of(last, name_of),
        "curve": curve_of(last, name_of),
    }


def _effective(row: Row) -> str:
    """The effective coefficient of the updates before this row.

    The script measured what the division makes of the coefficient. In addition, a reward minus the mean of its group,
    its own among them, has 1 - 1/n of the reward's gradient; so has a KL inside the reward, but no other.
    """
    measured = float(row["train_effective_kl_coef"] or 0)
    return str(measured if row["arm"] == "k1-reward" else measured * GROUP / (GROUP - 1))


def name_of(row: Row) -> str:
    """Arm and division."""
    return f"{row['arm']} {row['division']}"


def setting_of(row: Row) -> str:
    """Arm, division and coefficient."""
    return f"{name_of(row)} {row['kl_coef']}"


def _at_every_coefficient(end: Numbers, column: str, higher: str, lower: str) -> dict[str, dict[str, float]]:
    coefficients = sorted({name.rpartition(" ")[2] for name in end} - {"0.0"}, key=float)
    return {c: difference(end[f"{higher} {c}"][column], end[f"{lower} {c}"][column]) for c in coefficients}


def check(numbers: Numbers) -> list[Check]:
    """The papers' claims at the coefficient with three seeds, and ours."""
    found = {claim: each[COMPARED_AT] for claim, each in numbers["comparisons"].items()}
    ours = [claim for claim in found if claim.startswith("the division")]
    return [
        *(exceeds_over_seeds(claim, found[claim]) for claim in CLAIMED),
        *(exceeds_over_seeds(f"(ours) {claim}", found[claim]) for claim in ours),
    ]
