"""In long training every arm ends above its start, five of them keep their order, the estimator makes no difference at
equal KL, and a KL in the reward with divided advantages does not catch up.

The paper leaves long runs open, so all sentences are ours. SmolLM2-135M-Instruct learns sums and differences for 300
updates, with k3 or k2 as a loss or k1 in the reward at a coefficient of 0.03, and without a KL. Advantages are centred
in their group and not divided by a standard deviation. k1 in the reward at a coefficient of 0.07 should end about as
far from the reference as k3 as a loss, after as many updates. Other papers say of the other arms that they collapse or
fail: k3 in the reward and k1 as a loss, at 0.1 and 1, and k1 in the reward at 0.03 with divided advantages. A run has
collapsed if it ends with fewer right answers than it began with, or if its weights were not finite before the last
update. Arms are compared seed by seed. Design, tables and limits: docs/experiments.md.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...drawing import BLACK, BLUE, PURPLE, SKY, STYLES, VERMILION
from .. import runs
from ..study import Axes, Check, Experiment, Figure, Numbers, Settings, ours

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
            axis.plot([p["kl"] for p in own], [p["correct_in"] for p in own], mark, **look)
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

SeedMean = dict[str, float]


def run(settings: Settings) -> Numbers:
    """Every arm early, at the end and over updates, the differences of all pairs, and the growth of the KL."""
    rows = [row for row in runs.rows_of(EXPERIMENT, settings) if all(math.isfinite(float(row[c])) for c in SHOWN)]
    at = {str(update): runs.summaries(runs.at_update(rows, update), COLUMNS, runs.arm_of) for update in (EARLY, LAST)}
    start = {column: runs.at_start(rows, column) for column in COLUMNS}
    trained = [row for row in rows if row["update"] != "0"]
    by_arm = runs.grouped(trained, runs.arm_of)
    return {
        "made": runs.provenance(rows),
        "start": start,
        "at": at,
        "failures": runs.failures(rows, LAST, runs.arm_of),
        "pairs": {_pair(*pair): _differences(by_arm, *pair) for pair in PAIRS},
        "gained": {arm: _gained(group) for arm, group in runs.grouped(rows, runs.arm_of).items()},
        "caught up": _caught_up(by_arm),
        "equal_kl": {_pair(*pair): _gap(by_arm, pair, start[RIGHT]["mean"]) for pair in AT_EQUAL_KL},
        "growth": {arm: _growth(group) for arm, group in by_arm.items()},
        "paths": {column: runs.paths(rows, column, runs.arm_of) for column in SHOWN},
        "points": runs.runs_of(trained, runs.arm_of),
    }


def _pair(one: str, other: str) -> str:
    return f"{one} {other}"


def _differences(by_arm: dict[str, list[runs.Row]], one: str, other: str) -> Numbers:
    """The first arm less the second, seed by seed, by column and update; None without runs of both."""
    ends = lambda arm, update: runs.at_update(by_arm.get(arm, []), update)
    less = lambda column, update: runs.paired_if_run(ends(one, update), ends(other, update), column)
    return {column: {str(update): less(column, update) for update in (EARLY, LAST)} for column in (RIGHT, KL)}


def _gained(rows: list[runs.Row]) -> dict[str, SeedMean | None]:
    """Right answers at the end less those before training and less those early, seed by seed."""
    end = runs.at_update(rows, LAST)
    return {str(update): runs.paired_if_run(end, runs.at_update(rows, update), RIGHT) for update in (0, EARLY)}


def _caught_up(by_arm: dict[str, list[runs.Row]]) -> SeedMean | None:
    """By how much the distance of `DIVIDED` from `K1` is smaller at the end than early, seed by seed."""
    ends = lambda update: (runs.at_update(by_arm.get(arm, []), update) for arm in (K1, DIVIDED))
    behind = lambda update: runs.gaps_by_seed(*ends(update), column=RIGHT)
    return runs.paired_if_run(behind(EARLY), behind(LAST), "gap")


def _gap(by_arm: dict[str, list[runs.Row]], pair: tuple[str, str], start: float) -> SeedMean | None:
    """With whether both arms have evaluations as near to ref as the KL at which they are compared."""
    one, other = (by_arm.get(arm, []) for arm in pair)
    gap = runs.gap_at_equal_kl(_risen(one), _risen(other), start)
    if not gap:
        return None
    nearest = max(min(float(row[KL]) for row in rows) for rows in (one, other))
    return gap | {"measured": gap["kl"] >= nearest}


def _risen(rows: list[runs.Row]) -> list[runs.Row]:
    """The evaluations with a higher KL than all earlier ones of their run.

    In a long run the KL rises at first and then goes up and down, with the right answers. `gap_at_equal_kl` would leave
    out such a run as a whole.
    """
    records = []
    for own in runs.grouped(rows, runs.seed_of).values():
        highest = 0.0
        for row in sorted(own, key=lambda row: int(row["update"])):
            if float(row[KL]) > highest:
                highest = float(row[KL])
                records.append(row)
    return records


def _growth(rows: Sequence[runs.Row]) -> SeedMean | None:
    """The share by which the KL grows between the last two evaluations, seed by seed; None without a seed."""
    return runs.mean_of(
        runs.excess_by_seed(runs.at_update(rows, LAST), runs.at_update(rows, BEFORE_LAST), KL), "excess"
    )


def check(numbers: Numbers) -> list[Check]:
    """Answers to our questions; a sentence whose runs are missing is undecided."""
    checks = [_order(numbers, RIGHT, "right answers"), _order(numbers, KL, "KL")]
    checks += [_no_collapse(numbers, arm) for arm in WORDS]
    checks += [_later(numbers, arm) for arm in WORDS]
    checks += [_at_equal_kl(numbers, *pair) for pair in AT_EQUAL_KL]
    checks += [*_poor(numbers), *_divided(numbers)]
    growth = numbers["growth"].get(K3)
    grows = "the KL of k3 as loss still grows from 270 to 300 updates"
    settles = "the KL of k3 as loss has settled: it grows by less than a twentieth from 270 to 300 updates"
    return ours(*checks, runs.exceeds_over_seeds(grows, growth), runs.below_if_run(settles, growth, SETTLED))


def _poor(numbers: Numbers) -> Iterator[Check]:
    for arm in FEWER:
        less = numbers["pairs"][_pair(arm, NONE)][RIGHT][str(LAST)]
        fewer = {**less, "difference": -less["difference"]} if less else None
        claim = f"{WORDS[arm]} answers fewer right than {WORDS[NONE]} at 300 updates"
        yield runs.exceeds_over_seeds(claim, fewer)


def _divided(numbers: Numbers) -> Iterator[Check]:
    apart = numbers["pairs"][_pair(DIVIDED, K1)][RIGHT][str(LAST)]
    claim = f"{WORDS[DIVIDED]} catches up with {WORDS[K1]} by 300 updates, within 0.05"
    yield runs.equal_over_seeds(claim, apart, MARGIN)
    claim = f"{WORDS[DIVIDED]} is less far behind {WORDS[K1]} at 300 updates than at 60"
    yield runs.exceeds_over_seeds(claim, numbers["caught up"])


def _order(numbers: Numbers, column: str, words: str) -> Check:
    """Whether all pairs that differ early differ in the same direction at the end, by the pair that says so least."""
    claim, kept = f"the order of {words} at 60 updates holds at 300", {}
    for pair in (_pair(*each) for each in ORDERED):
        early, last = (numbers["pairs"][pair][column][str(update)] for update in (EARLY, LAST))
        if early is None or last is None:
            return runs.undecided_without_runs(claim)
        sign = math.copysign(1, early["difference"])
        if runs.counts({**early, "difference": abs(early["difference"])}):
            kept[pair] = {**last, "difference": sign * last["difference"]}
    if not kept:
        return Check(claim, "no value: no two arms differ at 60 updates", holds=False, decided=False)
    judged = {pair: runs.exceeds_over_seeds(claim, gap) for pair, gap in kept.items()}
    # First a pair that contradicts the order, then one that is undecided, then the smallest difference in errors.
    key = lambda pair: (judged[pair].holds, not judged[pair].decided, _in_errors(kept[pair]))
    pair = min(judged, key=key)
    one, other = (WORDS[arm] for arm in pair.split())
    measured = f"least clear of {len(kept)} pairs, {one} and {other}: {judged[pair].measured}"
    return Check(claim, measured, judged[pair].holds, judged[pair].decided)


def _in_errors(gap: SeedMean) -> float:
    return gap["difference"] / gap["error"] if gap["error"] else math.inf * gap["difference"]


def _no_collapse(numbers: Numbers, arm: str) -> Check:
    claim = f"{WORDS[arm]} ends above its start"
    failed = numbers["failures"].get(arm)
    if failed and failed["stopped"]:
        measured = f"weights were not finite in {failed['stopped']} of {failed['runs']} runs"
        return Check(claim, measured, holds=False)
    return runs.exceeds_over_seeds(claim, numbers["gained"].get(arm, {}).get("0"))


def _later(numbers: Numbers, arm: str) -> Check:
    gained = numbers["gained"].get(arm, {}).get(str(EARLY))
    return runs.exceeds_over_seeds(f"{WORDS[arm]} answers more right at 300 updates than at 60", gained)


def _at_equal_kl(numbers: Numbers, one: str, other: str) -> Check:
    """Arms with a KL should be equal to each other, and better than none.

    Where an arm has no evaluation so near to ref, the error is not that of its curve, and the chance is not known.
    """
    gap = numbers["equal_kl"][_pair(one, other)]
    if other == NONE:
        claim = f"at equal KL, {WORDS[one]} answers more right than no KL"
        judged = runs.exceeds_over_seeds(claim, gap)
    else:
        claim = f"at equal KL, {WORDS[one]} and {WORDS[other]} answer equally many right, within 0.05"
        judged = runs.equal_over_seeds(claim, gap, MARGIN)
    if not gap or gap["measured"]:
        return judged
    return replace(judged, measured=f"{judged.measured}; one curve has no evaluation there", chance=None)
