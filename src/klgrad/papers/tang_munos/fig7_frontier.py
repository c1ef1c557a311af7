"""Near the reference, a KL penalty buys reward at a lower KL, k1 as a loss is the least efficient, and k3 as a loss is
close to the sound gradient.

The paper's experiment with a reward, on a smaller model: SmolLM2-135M-Instruct learns sums and differences. All runs
have the same learning rate and advantages that are centred in their group and not divided by a standard deviation. Arms
are compared by the KL per completion at which they reach a share of right answers. The points of an arm are its runs at
every coefficient, after 20, 40 and 60 updates. Design, table and limits: docs/experiments.md.
"""

from collections.abc import Callable

from ..recorded_runs import (
    Row,
    difference,
    equal_over_seeds,
    exceeds_over_seeds,
    grouped,
    over_seeds,
    provenance,
    rows_of,
)
from ..reward_and_kl import kl_at, runs_of
from ..study import Check, Experiment, Numbers, Settings
from .fig7_frontier_figure import draw as draw

EXPERIMENT = Experiment("comedy.csv", "exp_comedy.py", also=(Experiment("std.csv", "exp_std.py"),))
FEW, MANY = "0.25", "0.45"
"""The shares of right answers at which KLs are compared. Runs without a KL have passed the first one at their first
evaluation, and runs with k3 as a loss do not reach the second."""
NONE, UNSOUND, SOUND, K3 = "none", "k1-loss", "k1-reward", "k3-loss"
ARMS = (NONE, UNSOUND, SOUND, K3, "k2-loss", "exact-loss")
CLOSE = 0.25
"""Two KLs are close if they differ by less than this share."""


def run(settings: Settings) -> Numbers:
    """The KL at two shares of right answers by arm, and all points."""
    rows = [row for each in (EXPERIMENT, *EXPERIMENT.also) for row in rows_of(each, settings)]
    rows = [row for row in rows if row["arm"] in ARMS and row.get("division", "undivided") == "undivided"]
    start = over_seeds([row for row in rows if row["update"] == "0"], "correct_in")["mean"]
    trained = [row for row in rows if row["update"] != "0"]
    return {
        "made": provenance(rows),
        "start": start,
        "arms": _reached(trained, start),
        "points": runs_of(trained, _arm),
    }


def _arm(row: Row) -> str:
    return row["arm"]


def _reached(rows: list[Row], start: float) -> Numbers:
    """By arm and share of right answers: the mean KL over seeds with its error; None if a seed has no value."""
    found: Numbers = {}
    for name, group in grouped(rows, _arm).items():
        seeds = grouped(group, lambda row: row["seed"]).values()
        points = [[(float(row["kl_per_sequence"]), float(row["correct_in"])) for row in own] for own in seeds]
        for right in (FEW, MANY):
            at = [kl_at(own, start, float(right)) for own in points]
            found.setdefault(name, {})[right] = None if None in at else over_seeds([{"kl": str(x)} for x in at], "kl")
    return found


def check(numbers: Numbers) -> list[Check]:
    """The paper's sentences, each by KLs at equal reward."""
    arms = numbers["arms"]
    more: Callable[[str, str, str], dict[str, float]] = lambda a, b, at: difference(arms[a][at], arms[b][at])
    found = [
        exceeds_over_seeds(
            "no KL needs a larger KL than k1 in the reward for 45% right answers", more(NONE, SOUND, MANY)
        )
    ]
    for other, words in {SOUND: "k1 in the reward", K3: "k3 as loss", "exact-loss": "the exact KL as loss"}.items():
        found.append(
            exceeds_over_seeds(
                f"k1 as loss needs a larger KL than {words} for 25% right answers", more(UNSOUND, other, FEW)
            )
        )
    claim = "k3 as loss and k1 in the reward need the same KL for 25% right answers, within a quarter"
    return [*found, equal_over_seeds(claim, more(K3, SOUND, FEW), CLOSE * arms[SOUND][FEW]["mean"])]
