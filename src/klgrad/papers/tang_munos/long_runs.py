"""In long training every arm ends above its start, five of them keep their order, the estimator makes no difference at
equal KL, and a KL in the reward with divided advantages does not catch up.

The paper leaves long runs open, so all sentences are ours. SmolLM2-135M-Instruct learns sums and differences for 300
updates, at a coefficient of 0.03 where it is not said. Advantages are centred in their group and not divided by a
standard deviation, but in one arm. Other papers say of k3 in the reward, k1 as a loss and divided advantages that they
collapse or fail. A run has collapsed if it ends with fewer right answers than it began with, or if its weights were not
finite before the last update. Arms are compared seed by seed. Design and limits: docs/experiments/reward-and-kl.md.
"""

import itertools
import math
from dataclasses import replace

from ...drawing import BLACK, BLUE, PURPLE, SKY, STYLES, VERMILION
from .. import runs
from ..study import Axes, Check, Experiment, Figure, Numbers, Settings, columns, ours

LABELS = {
    "k3-loss": ("k3 as loss", STYLES["k3-loss"][0], "^"),
    "k1-reward": ("k1 in the reward", STYLES["k1-reward"][0], "o"),
    "k2-loss": ("k2 as loss", STYLES["k1-reward-leave-one-out"][0], "D"),
    "none": ("no KL", BLACK, "x"),
    "k1-reward-near": ("k1 in the reward, β = 0.07", PURPLE, "s"),
}
"""Label, colour and mark of an arm of the upper row; β = 0.03 where it is not said."""
POOR = {
    "k1-reward": LABELS["k1-reward"],
    "k1-reward-divided": ("k1 in the reward, divided", VERMILION, "o"),
    "k1-loss-0.1": ("k1 as loss, β = 0.1", SKY, "v"),
    "k1-loss-1": ("k1 as loss, β = 1", BLUE, "v"),
    "k3-reward-0.1": ("k3 in the reward, β = 0.1", "#888888", "*"),
    "k3-reward-1": ("k3 in the reward, β = 1", "#444444", "*"),
}
"""Those of the lower row."""
PANELS = {
    "correct_in": "right answers, in domain",
    "kl_per_sequence": "KL(π‖ref) per completion, nats",
    "entropy_per_token": "entropy per token, nats",
}


def draw(numbers: Numbers, figure: Figure) -> None:
    """Means over seeds with bands of one standard error, and a mark for each evaluation of each run."""
    figure.set_size_inches(13, 8.4)
    axes = figure.subplots(2, 4, width_ratios=[1, 1, 1, 1])
    for across, arms in zip(axes, (LABELS, POOR), strict=True):
        for (column, title), axis in zip(PANELS.items(), across, strict=False):
            _over_updates(numbers["paths"][column], axis, arms)
            axis.set_xlabel("updates")
            axis.set_title(f"{title}\n3 seeds, ± 1 SE", fontsize=9.5)
        _over_kl(numbers, across[3], arms)
        across[3].set_title("right answers over the KL,\neach evaluation of each run", fontsize=9.5)
        if across[3].lines:
            across[0].legend(*across[3].get_legend_handles_labels(), loc="lower right", fontsize=7.5)
        across[0].set_ylim(0, 0.8)


def _over_updates(paths: Numbers, axis: Axes, arms: dict[str, tuple[str, str, str]]) -> None:
    for arm, (_, colour, _) in arms.items():
        runs.curve(axis, paths.get(arm), colour, lw=1.6)


def _over_kl(numbers: Numbers, axis: Axes, arms: dict[str, tuple[str, str, str]]) -> None:
    for arm, (label, colour, mark) in arms.items():
        if own := [point for point in numbers["points"] if point["name"] == arm]:
            look = {"ms": 4, "color": colour, "mfc": "none", "lw": 0, "label": label}
            axis.plot(*columns(own, "kl", "correct_in"), mark, **look)
    axis.set_xlabel("KL(π‖ref) per completion, nats")


EXPERIMENT = Experiment("long.csv", "exp_long.py")
EARLY, BEFORE_LAST, LAST = 60, 270, 300
"""Where the other experiments end, and the last two evaluations of this one."""
RIGHT, KL = "correct_in", "kl_per_sequence"
SHOWN = (RIGHT, KL, "entropy_per_token", "length")
COLUMNS = (*SHOWN, "correct_out", "skipped_updates")
K3, K1, K2, NONE, NEAR = "k3-loss", "k1-reward", "k2-loss", "none", "k1-reward-near"
DIVIDED = "k1-reward-divided"
WORDS = {
    K3: "k3 as loss",
    K1: "k1 in the reward",
    K2: "k2 as loss",
    NONE: "no KL",
    NEAR: "k1 at β = 0.07",
    "k3-reward-0.1": "k3 in the reward at β = 0.1",
    "k3-reward-1": "k3 in the reward at β = 1",
    "k1-loss-0.1": "k1 as loss at β = 0.1",
    "k1-loss-1": "k1 as loss at β = 1",
    DIVIDED: "the divided KL",
}
FEWER = ("k3-reward-0.1", "k3-reward-1", "k1-loss-0.1", "k1-loss-1")
"""Arms that should answer fewer right than no KL."""
ORDERED = tuple(itertools.combinations((K3, K1, K2, NONE), 2))
AT_EQUAL_KL = (*ORDERED, (K3, NEAR))
PAIRS = (*AT_EQUAL_KL, *((arm, NONE) for arm in (NEAR, *FEWER)), (DIVIDED, K1))
MARGIN = 0.05
"""Of right answers; about what a KL gains over none at equal KL in 60 updates (tang-munos/fig7)."""
SETTLED = 0.05
"""Of the KL. Growth in proportion to the updates would add a ninth from 270 to 300."""


def run(settings: Settings) -> Numbers:
    """Every arm early and at the end, the differences of all pairs, and the growth of the KL."""
    rows = [row for row in runs.rows_of(EXPERIMENT, settings) if all(math.isfinite(row[c]) for c in SHOWN)]
    trained, start = [row for row in rows if row["update"]], runs.at_start(rows, RIGHT)["mean"]
    by_arm, of_trained = (runs.grouped(each, runs.ARM) for each in (rows, trained))
    at = lambda arm, update: runs.at_update(by_arm.get(arm, []), update)
    less = lambda one, other, column: {
        str(update): runs.difference(at(one, update), at(other, update), column) for update in (EARLY, LAST)
    }
    behind = lambda update: runs.gaps(at(K1, update), at(DIVIDED, update), RIGHT)
    return {
        "made": runs.provenance(rows),
        "at": {str(u): runs.summaries(runs.at_update(rows, u), COLUMNS, runs.ARM) for u in (EARLY, LAST)},
        "failures": runs.failures(rows, LAST, runs.ARM),
        "pairs": {f"{one} {other}": {c: less(one, other, c) for c in (RIGHT, KL)} for one, other in PAIRS},
        "gained": {
            arm: {str(u): runs.difference(at(arm, LAST), at(arm, u), RIGHT) for u in (0, EARLY)} for arm in WORDS
        },
        "caught up": runs.difference(behind(EARLY), behind(LAST), "gap"),
        "equal_kl": {f"{one} {other}": _gap(of_trained, one, other, start) for one, other in AT_EQUAL_KL},
        "growth": {arm: runs.excess(at(arm, LAST), at(arm, BEFORE_LAST), KL) for arm in WORDS},
        "paths": {column: runs.paths(rows, column, runs.ARM) for column in SHOWN},
        "points": runs.points_of(trained, runs.ARM),
    }


def _gap(by_arm: dict[str, list[runs.Row]], one: str, other: str, start: float) -> Numbers:
    """With whether both arms have evaluations as near to ref as the KL at which they are compared."""
    own, others = (_risen(by_arm.get(arm, [])) for arm in (one, other))
    gap = runs.gap_at_equal_kl(own, others, start)
    return gap | {"measured": all(any(row[KL] <= gap["kl"] for row in rows) for rows in (own, others))}


def _risen(rows: list[runs.Row]) -> list[runs.Row]:
    """The evaluations with a higher KL than all earlier ones of their run.

    In a long run the KL rises at first and then goes up and down, with the right answers. `gap_at_equal_kl` would leave
    out such a run as a whole.
    """
    records = []
    for own in runs.grouped(rows, runs.SEED).values():
        highest = 0.0
        for row in sorted(own, key=lambda row: row["update"]):
            if row[KL] > highest:
                highest = row[KL]
                records.append(row)
    return records


def check(numbers: Numbers) -> list[Check]:
    """Answers to our questions; a sentence whose runs are missing is undecided."""
    growth, pairs, gained = numbers["growth"][K3], numbers["pairs"], numbers["gained"]
    fewer = lambda gap: {**gap, "mean": -gap["mean"]} if gap["seeds"] else gap
    return ours(
        _order(numbers, RIGHT, "right answers"),
        _order(numbers, KL, "KL"),
        *(_no_collapse(numbers, arm) for arm in WORDS),
        *(
            runs.exceeds_over_seeds(
                f"{WORDS[arm]} answers more right at 300 updates than at 60", gained[arm][str(EARLY)]
            )
            for arm in WORDS
        ),
        *(_at_equal_kl(numbers, *pair) for pair in AT_EQUAL_KL),
        *(
            runs.exceeds_over_seeds(
                f"{WORDS[arm]} answers fewer right than {WORDS[NONE]} at 300 updates",
                fewer(pairs[f"{arm} {NONE}"][RIGHT][str(LAST)]),
            )
            for arm in FEWER
        ),
        runs.equal_over_seeds(
            f"{WORDS[DIVIDED]} catches up with {WORDS[K1]} by 300 updates, within 0.05",
            pairs[f"{DIVIDED} {K1}"][RIGHT][str(LAST)],
            MARGIN,
        ),
        runs.exceeds_over_seeds(
            f"{WORDS[DIVIDED]} is less far behind {WORDS[K1]} at 300 updates than at 60", numbers["caught up"]
        ),
        runs.exceeds_over_seeds("the KL of k3 as loss still grows from 270 to 300 updates", growth),
        runs.below_over_seeds(
            "the KL of k3 as loss has settled: it grows by less than a twentieth from 270 to 300 updates",
            growth,
            SETTLED,
        ),
    )


def _order(numbers: Numbers, column: str, words: str) -> Check:
    """Whether all pairs that differ early differ in the same direction at the end, by the pair that says so least."""
    claim, kept = f"the order of {words} at 60 updates holds at 300", {}
    for one, other in ORDERED:
        early, last = (numbers["pairs"][f"{one} {other}"][column][str(update)] for update in (EARLY, LAST))
        if not early["seeds"] or not last["seeds"]:
            return runs.undecided(claim)
        if runs.differs(early):
            kept[one, other] = {**last, "mean": math.copysign(1, early["mean"]) * last["mean"]}
    if not kept:
        return Check(claim, "no value: no two arms differ at 60 updates", holds=False, decided=False)
    judged = {pair: runs.exceeds_over_seeds(claim, gap) for pair, gap in kept.items()}
    # First a pair that contradicts the order, then one that is undecided, then the smallest difference in errors.
    key = lambda pair: (judged[pair].holds, not judged[pair].decided, kept[pair]["mean"] / kept[pair]["error"])
    one, other = min(judged, key=key)
    measured = f"least clear of {len(kept)} pairs, {WORDS[one]} and {WORDS[other]}: {judged[one, other].measured}"
    return replace(judged[one, other], measured=measured, chance=None)


def _no_collapse(numbers: Numbers, arm: str) -> Check:
    claim = f"{WORDS[arm]} ends above its start"
    failed = numbers["failures"].get(arm)
    if failed and failed["stopped"]:
        measured = f"weights were not finite in {failed['stopped']} of {failed['runs']} runs"
        return Check(claim, measured, holds=False)
    return runs.exceeds_over_seeds(claim, numbers["gained"][arm]["0"])


def _at_equal_kl(numbers: Numbers, one: str, other: str) -> Check:
    """Arms with a KL should be equal to each other, and better than none.

    Where an arm has no evaluation so near to ref, the error is not that of its curve, and the chance is not known.
    """
    gap = numbers["equal_kl"][f"{one} {other}"]
    if other == NONE:
        judged = runs.exceeds_over_seeds(f"at equal KL, {WORDS[one]} answers more right than no KL", gap)
    else:
        claim = f"at equal KL, {WORDS[one]} and {WORDS[other]} answer equally many right, within 0.05"
        judged = runs.equal_over_seeds(claim, gap, MARGIN)
    if gap["measured"] or not gap["seeds"]:
        return judged
    return replace(judged, measured=f"{judged.measured}; one curve has no evaluation there", chance=None)
