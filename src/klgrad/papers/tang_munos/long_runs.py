"""In long training with a small coefficient five arms keep their order, none of them collapses, the estimator makes
no difference at equal KL, and the KL of k3 as a loss settles.

The paper leaves long runs open, so all sentences are ours. k3 in the reward, k1 as a loss and divided advantages, which
collapse or fail by other papers, have no long runs. SmolLM2-135M-Instruct learns sums and differences for 300 updates,
with k3 or k2 as a loss or k1 in the reward at a coefficient of 0.03, and without a KL. Advantages are centred in their
group and not divided by a standard deviation. k1 in the reward at a coefficient of 0.07 should end about as far from
the reference as k3 as a loss, after as many updates. A run has collapsed if it ends with fewer right answers than it
began with, or if its weights were not finite before the last update. Design, tables and limits: docs/experiments.md.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...drawing import BLACK, PURPLE, STYLES
from ..runs import (
    Row,
    at_start,
    at_update,
    below_if_run,
    counts,
    difference,
    equal_over_seeds,
    exceeds_over_seeds,
    gap_at_equal_kl,
    grouped,
    over_seeds,
    paths,
    provenance,
    rows_of,
    runs_of,
    summaries,
    undecided_without_runs,
)
from ..study import Check, Experiment, Numbers, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The figure of `long_runs`: four measures over updates, and right answers over the KL.

LABELS = {
    "k3-loss": ("k3 as loss", STYLES["k3-loss"][0], "^"),
    "k1-reward": ("k1 in the reward", STYLES["k1-reward"][0], "o"),
    "k2-loss": ("k2 as loss", STYLES["k1-reward-leave-one-out"][0], "D"),
    "none": ("no KL", BLACK, "x"),
    "k1-reward-near": ("k1 in the reward, β = 0.07", PURPLE, "s"),
}
"""Label, colour and mark of an arm."""
LEGEND = "lines: means of three seeds, bands: one\nstandard error; marks: one evaluation of one run"
PANELS = {
    "correct_in": "right answers, in domain",
    "kl_per_sequence": "KL(π‖ref) per completion, nats",
    "entropy_per_token": "entropy per token, nats",
    "length": "tokens of a completion",
}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over seeds with bands of one standard error, and a mark for each evaluation of each run."""
    figure.set_size_inches(11, 6.4)
    *panels, last, rest = figure.subplots(2, 3).flat
    for (column, title), axis in zip(PANELS.items(), panels, strict=True):
        _over_updates(numbers["paths"][column], axis)
        axis.set(xlabel="updates", title=title)
    _over_kl(numbers, last)
    for axis in (*panels, last):
        axis.title.set_fontsize(10)
    rest.axis("off")
    if numbers["points"]:
        rest.legend(*last.get_legend_handles_labels(), loc="center", title=LEGEND, fontsize=10, title_fontsize=9)


def _over_updates(paths: dict[str, Any], axis: Any) -> None:
    for arm, (_, colour, _) in LABELS.items():
        if (path := paths.get(arm)) is None:
            continue
        axis.plot(path["updates"], path["mean"], color=colour, lw=1.6)
        low, high = ([m + s * e for m, e in zip(path["mean"], path["error"], strict=True)] for s in (-1, 1))
        axis.fill_between(path["updates"], low, high, color=colour, alpha=0.13, lw=0)


def _over_kl(numbers: Numbers, axis: Any) -> None:
    for arm, (label, colour, mark) in LABELS.items():
        if own := [point for point in numbers["points"] if point["name"] == arm]:
            look = {"ms": 4, "color": colour, "mfc": "none", "lw": 0, "label": label}
            axis.plot([p["kl"] for p in own], [p["correct_in"] for p in own], mark, **look)
    axis.set(xlabel="KL(π‖ref) per completion, nats", title="right answers over the KL")


EXPERIMENT = Experiment("long.csv", "exp_long.py")
EARLY, BEFORE_LAST, LAST = 60, 270, 300
"""Where the other experiments end, and the last two evaluations of this one."""
RIGHT, KL = "correct_in", "kl_per_sequence"
SHOWN = (RIGHT, KL, "entropy_per_token", "length")
COLUMNS = (*SHOWN, "correct_out", "skipped_updates")
K3, K1, K2, NONE, NEAR = "k3-loss", "k1-reward", "k2-loss", "none", "k1-reward-near"
WORDS = {K3: "k3 as loss", K1: "k1 in the reward", K2: "k2 as loss", NONE: "no KL", NEAR: "k1 at β = 0.07"}
ORDERED = tuple(itertools.combinations((K3, K1, K2, NONE), 2))
PAIRS = (*ORDERED, (K3, NEAR))
MARGIN = 0.05
"""Of right answers; about what a KL gains over none at equal KL in 60 updates (tang-munos/fig7)."""
SETTLED = 0.05
"""Of the KL. Growth in proportion to the updates would add a ninth from 270 to 300."""

Found = dict[str, float]


def arm_of(row: Row) -> str:
    """The arm."""
    return row["arm"]


def seed_of(row: Row) -> str:
    """The seed."""
    return row["seed"]


def run(settings: Settings) -> Numbers:
    """Every arm early, at the end and over updates, the differences of all pairs, and the growth of the KL."""
    rows = [row for row in rows_of(EXPERIMENT, settings) if all(math.isfinite(float(row[c])) for c in SHOWN)]
    at = {str(update): summaries(at_update(rows, update), COLUMNS, arm_of) for update in (EARLY, LAST)}
    start = {column: at_start(rows, column) for column in COLUMNS}
    trained = [row for row in rows if row["update"] != "0"]
    by_arm = grouped(trained, arm_of)
    return {
        "made": provenance(rows),
        "start": start,
        "at": at,
        "failures": {arm: _failures(group) for arm, group in grouped(rows, arm_of).items()},
        "pairs": {_pair(*pair): _differences(at, *pair) for pair in PAIRS},
        "equal_kl": {_pair(*pair): _gap(by_arm, pair, start[RIGHT]["mean"]) for pair in PAIRS},
        "growth": {arm: _growth(group) for arm, group in by_arm.items()},
        "paths": {column: paths(rows, column, arm_of) for column in SHOWN},
        "points": runs_of(trained, arm_of),
    }


def _pair(one: str, other: str) -> str:
    return f"{one} {other}"


def _failures(rows: list[Row]) -> dict[str, int]:
    """The runs of an arm, those that collapsed, and those that stopped before the last update."""
    runs = list(grouped(rows, seed_of).values())
    ended = [each for each in runs if at_update(each, LAST)]
    right = lambda each, update: float(at_update(each, update)[0][RIGHT])
    collapsed = sum(right(each, LAST) < right(each, 0) for each in ended)
    return {"runs": len(runs), "collapsed": collapsed, "stopped": len(runs) - len(ended)}


def _differences(at: Numbers, one: str, other: str) -> Numbers:
    """The first arm less the second, by column and update; None without runs of both."""
    both = lambda found: one in found and other in found
    less = lambda found, column: difference(found[one][column], found[other][column]) if both(found) else None
    return {column: {update: less(found, column) for update, found in at.items()} for column in (RIGHT, KL)}


def _gap(by_arm: dict[str, list[Row]], pair: tuple[str, str], start: float) -> Found | None:
    one, other = (by_arm.get(arm, []) for arm in pair)
    return gap_at_equal_kl(_risen(one), _risen(other), start)


def _risen(rows: list[Row]) -> list[Row]:
    """The evaluations with a higher KL than all earlier ones of their run.

    In a long run the KL rises at first and then goes up and down, with the right answers. `gap_at_equal_kl` would leave
    out such a run as a whole.
    """
    found = []
    for own in grouped(rows, seed_of).values():
        highest = 0.0
        for row in sorted(own, key=lambda row: int(row["update"])):
            if float(row[KL]) > highest:
                highest = float(row[KL])
                found.append(row)
    return found


def _growth(rows: Sequence[Row]) -> Found | None:
    """The share by which the KL grows between the last two evaluations, seed by seed; None without a seed."""
    found = []
    for own in grouped(rows, seed_of).values():
        ends = [at_update(own, update) for update in (BEFORE_LAST, LAST)]
        if all(ends):
            (before, error_before), (last, error_last) = (_kl(each[0]) for each in ends)
            ratio = last / before
            error = ratio * math.hypot(error_before / before, error_last / last)
            found.append({"growth": str(ratio - 1), "growth_se": str(error)})
    if not found:
        return None
    made = over_seeds(found, "growth")
    return {"difference": made["mean"], "error": made["error"], "seeds": made["seeds"]}


def _kl(row: Row) -> tuple[float, float]:
    return float(row[KL]), float(row[f"{KL}_se"])


def check(numbers: Numbers) -> list[Check]:
    """Answers to our questions; a sentence whose runs are missing is undecided."""
    found = [_order(numbers, RIGHT, "right answers"), _order(numbers, KL, "KL")]
    found += [_no_collapse(numbers, arm) for arm in WORDS]
    found += [_later(numbers, arm) for arm in WORDS]
    found += [_at_equal_kl(numbers, *pair) for pair in PAIRS]
    growth = numbers["growth"].get(K3)
    grows = "(ours) the KL of k3 as loss still grows from 270 to 300 updates"
    settles = "(ours) the KL of k3 as loss has settled: it grows by less than a twentieth from 270 to 300 updates"
    return [*found, _judged(grows, growth, exceeds_over_seeds), below_if_run(settles, growth, SETTLED)]


def _order(numbers: Numbers, column: str, words: str) -> Check:
    """Whether all pairs that differ early differ in the same direction at the end, by the pair that says so least."""
    claim, kept = f"(ours) the order of {words} at 60 updates holds at 300", {}
    for pair in (_pair(*each) for each in ORDERED):
        early, last = (numbers["pairs"][pair][column][str(update)] for update in (EARLY, LAST))
        if early is None or last is None:
            return undecided_without_runs(claim)
        sign = math.copysign(1, early["difference"])
        if counts({**early, "difference": abs(early["difference"])}):
            kept[pair] = {**last, "difference": sign * last["difference"]}
    if not kept:
        return Check(claim, "no value: no two arms differ at 60 updates", holds=False, decided=False)
    judged = {pair: exceeds_over_seeds(claim, found) for pair, found in kept.items()}
    # First a pair that contradicts the order, then one that is undecided, then the smallest difference in errors.
    key = lambda pair: (judged[pair].holds, not judged[pair].decided, _in_errors(kept[pair]))
    pair = min(judged, key=key)
    one, other = (WORDS[arm] for arm in pair.split())
    measured = f"least clear of {len(kept)} pairs, {one} and {other}: {judged[pair].measured}"
    return Check(claim, measured, judged[pair].holds, judged[pair].decided)


def _in_errors(found: Found) -> float:
    return found["difference"] / found["error"] if found["error"] else math.inf * found["difference"]


def _no_collapse(numbers: Numbers, arm: str) -> Check:
    claim = f"(ours) {WORDS[arm]} ends above its start"
    failed, end = numbers["failures"].get(arm), numbers["at"][str(LAST)].get(arm)
    if failed and failed["stopped"]:
        measured = f"weights were not finite in {failed['stopped']} of {failed['runs']} runs"
        return Check(claim, measured, holds=False)
    return _judged(claim, difference(end[RIGHT], numbers["start"][RIGHT]) if end else None, exceeds_over_seeds)


def _later(numbers: Numbers, arm: str) -> Check:
    early, last = (numbers["at"][str(update)].get(arm) for update in (EARLY, LAST))
    gained = difference(last[RIGHT], early[RIGHT]) if early and last else None
    return _judged(f"(ours) {WORDS[arm]} answers more right at 300 updates than at 60", gained, exceeds_over_seeds)


def _at_equal_kl(numbers: Numbers, one: str, other: str) -> Check:
    """Arms with a KL should be equal to each other, and better than none."""
    gap = numbers["equal_kl"][_pair(one, other)]
    if other == NONE:
        claim = f"(ours) at equal KL, {WORDS[one]} answers more right than no KL"
        return _judged(claim, gap, exceeds_over_seeds)
    claim = f"(ours) at equal KL, {WORDS[one]} and {WORDS[other]} answer equally many right, within 0.05"
    return _judged(claim, gap, lambda name, found: equal_over_seeds(name, found, MARGIN))


def _judged(claim: str, found: Found | None, judge: Callable[[str, Found], Check]) -> Check:
    return judge(claim, found) if found else undecided_without_runs(claim)
