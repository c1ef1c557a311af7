"""With completions that are many updates old, training without a KL is unstable; k1 in the reward and k3 as a loss
stabilise it, k1 in the reward best, and k1 as a loss and k3 in the reward do not.

SmolLM2-135M-Instruct learns sums and differences from completions that are 10 or 2 updates old, with a KL at a
coefficient of 0.1. Ours is whether an estimator that is right on old completions is better there: k1 with the
importance ratio of the prefix or of the whole completion, bounded by 2 or unbounded, against the same term without
weights. A run has collapsed if it ends with fewer right answers than it began with; one that has not does not
contradict that it would. k1 as a loss also has lags of 4, 6 and 8, at three coefficients, shown run by run. Runs with
fresh completions are those of `on_policy`. Design, table and limits: docs/experiments/stale-completions.md.
"""

import math
from collections.abc import Iterator
from itertools import product

from ...drawing import BLUE, GREY, PURPLE, STYLES
from .. import runs
from ..study import Axes, Check, Experiment, Figure, Numbers, Settings, ours

# The figure of `asynchronous`: right answers over updates at each lag and over the KL, and what the weights change.

K1, K3 = STYLES["k1-reward"][0], STYLES["k3-loss"][0]
LABELS = {
    "none": ("no KL", "black", "-"),
    "k1-reward": ("k1 in the reward", K1, "-"),
    "k1-loss": ("k1 as loss", K1, ":"),
    "k3-reward": ("k3 in the reward", K3, "-"),
    "k3-loss": ("k3 as loss", K3, ":"),
    "k1-unweighted": ("k1, no weights", GREY, "-"),
    "k1-prefix-unbounded": ("k1, prefix weights", BLUE, "-"),
    "k1-prefix-bounded": ("k1, prefix weights up to 2", BLUE, "--"),
    "k1-sequence-unbounded": ("k1, sequence weights", PURPLE, "-"),
    "k1-sequence-bounded": ("k1, sequence weights up to 2", PURPLE, "--"),
}
"""The label of an arm; its colour is its estimator or its weights, its line the place of the KL or the bound."""
MARKS = {"2": "o", "10": "s"}
"""By lag."""
COEFFICIENT_MARKS = {"0.05": (BLUE, "o"), "0.1": (K1, "^"), "0.2": (PURPLE, "s")}
"""Of k1 as a loss; filled after 180 updates, open after 60."""
FACES = {"correct_in": None, "equal_kl": "white"}
"""By measure; None for the arm's colour."""


def draw(numbers: Numbers, figure: Figure) -> None:
    """A panel for each lag, one with all runs over the KL, one with what weights change, one for k1 as a loss."""
    figure.set_size_inches(14, 9)
    axes = [*figure.subplots(2, 3).flat]
    for lag, axis in zip(MARKS, axes, strict=False):
        _updates(numbers, axis, lag)
        axis.sharey(axes[0])
        axis.set_ylabel("right answers, in domain")
    _over_kl(numbers, axes[2])
    axes[2].sharey(axes[0])
    _k1_loss(numbers, axes[3])
    _weights(numbers, axes[4])
    for arm, (label, colour, line) in LABELS.items():
        if any(f"{arm} {lag}" in numbers["paths"] for lag in MARKS):
            axes[5].plot([], [], line, color=colour, label=label)
    axes[5].axis("off")
    axes[5].legend(loc="center", fontsize=9, title="arms (top row, and weights below)")


def _k1_loss(numbers: Numbers, axis: Axes) -> None:
    """The end of each run of k1 as a loss over the lag, by coefficient."""
    for (i, (coef, (colour, mark))), last in product(enumerate(COEFFICIENT_MARKS.items()), (LAST, LONG_LAST)):
        own = [run for run in numbers["k1-loss"] if (run["kl_coef"], run["update"][-1]) == (coef, last)]
        if own:
            shift, face = (0.15, colour) if last == LONG_LAST else (0, "none")
            at = [int(run["lag"]) + 0.3 * (i - 1) + shift for run in own]
            right, name = [run["correct_in"][-1] for run in own], f"β = {coef}, {last} updates"
            axis.plot(at, right, mark, color=colour, mfc=face, label=name)
    axis.axhline(numbers["start"]["correct_in"]["mean"], color="grey", lw=1)
    axis.set(xlabel="age of the completions, updates", ylabel="right answers, in domain", xticks=[2, 4, 6, 8, 10])
    axis.set_title("k1 as loss, the end of each run;\n2 or 3 seeds; marks of one age are shifted", fontsize=9)
    axis.legend(fontsize=8.5)


def _updates(numbers: Numbers, axis: Axes, lag: str) -> None:
    """The arms without weights; those with weights lie on k1 in the reward."""
    for arm in UNCORRECTED:
        label, colour, line = LABELS[arm]
        runs.curve(axis, numbers["paths"].get(f"{arm} {lag}"), colour, line, label=label)
    axis.axhline(numbers["start"]["correct_in"]["mean"], color="grey", lw=1)
    axis.set(xlabel="updates", title=f"completions {lag} updates old\n3 seeds, ± 1 SE")
    axis.set_xticks([0, 20, 40, LAST] if axis.get_xlim()[1] < 2 * LAST else [0, LAST, 2 * LAST, LONG_LAST])


def _over_kl(numbers: Numbers, axis: Axes) -> None:
    """Runs on fresh completions are left out: `on_policy` has them."""
    for run in numbers["runs"]:
        arm, lag = run["name"].split()
        if lag in MARKS:
            _, colour, line = LABELS[arm]
            face = colour if line == "-" else "none"
            axis.plot(run["kl"], run["correct_in"], MARKS[lag], ms=5, color=colour, mfc=face, zorder=3)
    # Linear up to 1 nat, so that runs near ref and runs far from it can both be told apart.
    axis.set_xscale("symlog", linthresh=1)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="KL(π‖ref) per completion, nats\n(linear up to 1, then logarithmic)", xlim=(0, None))
    axis.set_title("each run after 60 updates; circles: lag 2;\nsquares: lag 10; open: as loss, or bounded", fontsize=9)


def _weights(numbers: Numbers, axis: Axes) -> None:
    """Right answers with weights less those without, with an error bar, by lag and measure."""
    places = [(lag, measure) for lag in MARKS for measure in FACES]
    for (i, arm), (j, (lag, measure)) in product(enumerate(CORRECTED), enumerate(places)):
        change, colour = numbers["weighted"][lag][arm][measure], LABELS[arm][1]
        if change["seeds"]:
            look = {"fmt": MARKS[lag], "color": colour, "mfc": FACES[measure] or colour, "ms": 5}
            axis.errorbar(change["mean"], i + 0.15 * (j - 1.5), xerr=change["error"], **look)
    axis.axvline(0, color="grey", lw=1)
    names = [LABELS[arm][0].replace(" weights", "\nweights") for arm in CORRECTED]
    axis.set_yticks(range(len(CORRECTED)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel(f"right answers, less those of {LABELS[CONTROL][0]}")
    axis.set_title(
        "3 seeds, ± 1 SE (at equal KL 2 where a run has no value);\n"
        "circles: lag 2; squares: lag 10;\nfilled: at the last update; open: at equal KL",
        fontsize=9,
    )


FRESH = Experiment("comedy.csv", "exp_comedy.py")
"""The runs with fresh completions."""
LONG = Experiment("async_long.csv", "exp_async.py", ("long",))
EXPERIMENT = Experiment("async.csv", "exp_async.py", also=(FRESH, LONG))
LAST, LONG_LAST = 60, 180
LAGS = ("10", "2")
SETTING = "{arm} {lag}"
COEFFICIENTS = ("0.1", "0.0")
"""That of every KL, and that of the runs without one."""
RIGHT = "correct_in"
COLUMNS = (RIGHT, "correct_out", "kl_per_sequence", "entropy_per_token", "length", "skipped_updates")
NONE, REWARD, K3_LOSS = "none", "k1-reward", "k3-loss"
UNCORRECTED = (NONE, REWARD, "k3-reward", "k1-loss", K3_LOSS)
CONTROL = "k1-unweighted"
"""The arms of `CORRECTED` without weights: a token is paired with its own and later terms, as there."""
CORRECTED = ("k1-prefix-unbounded", "k1-prefix-bounded", "k1-sequence-unbounded", "k1-sequence-bounded")
"""Arms whose KL has importance weights; with fresh completions these and `CONTROL` have the expected gradient of
`REWARD`."""
ARMS = (*UNCORRECTED, CONTROL, *CORRECTED)
WITHOUT_FRESH = (CONTROL, *CORRECTED)
"""Their runs with fresh completions are those of `REWARD`."""
CLAIMED = {
    "k3 in the reward ends below its start": ("start", "k3-reward 10"),
    "k1 as loss ends below its start": ("start", "k1-loss 10"),
}
"""At a lag of 10: the setting that should answer more right, and the other."""
LONG_CLAIMED = {
    "without a KL, training ends below its start": ("start", "none 10"),
    "k1 in the reward ends above its start": ("k1-reward 10", "start"),
    "k3 as loss ends above its start": ("k3-loss 10", "start"),
    "k1 in the reward answers more right than k3 as loss": ("k1-reward 10", "k3-loss 10"),
}
"""The same after `LONG_LAST` updates."""
OUR_CLAIMS = {
    "k1 in the reward answers more right than no KL": ("k1-reward 10", "none 10"),
    "k3 as loss answers more right than no KL": ("k3-loss 10", "none 10"),
    "without a KL, fresh completions give more right answers": ("none 0", "none 10"),
}
"""That an arm stabilises training would show in more right answers than without a KL only where training without one is
unstable, so these sentences are ours."""
BETWEEN, BETWEEN_COEFFICIENTS = ("4", "6", "8"), ("0.05", "0.1", "0.2")
"""Lags and coefficients of k1 as a loss alone."""
HORIZON = "after {} updates, which may be too few"
STEADIER = {
    "the lag costs k1 in the reward fewer right answers than no KL": REWARD,
    "the lag costs k3 as loss fewer right answers than no KL": K3_LOSS,
}
"""At a lag of 10: the arm that should lose less than `NONE`, compared with its own runs on fresh completions."""


def run(settings: Settings) -> Numbers:
    """Every arm and lag at the last update and over updates, what the lag costs, and what the weights change."""
    stale, long = (runs.rows_of(each, settings) for each in (EXPERIMENT, LONG))
    fresh = [{**row, "lag": "0"} for row in runs.rows_of(FRESH, settings)]
    rows = [row for row in stale if row["lag"] in LAGS] + fresh
    rows = [row for row in rows if row["arm"] in ARMS and row["kl_coef"] in COEFFICIENTS]
    # Evaluations before training differ a little between the files; those of the old completions are compared with it.
    start = {RIGHT: runs.at_start([row for row in rows if row["lag"] in LAGS], RIGHT)}
    by_name = runs.by_setting(runs.at_update(rows, LAST), SETTING)
    trained = runs.grouped((row for row in rows if row["update"]), SETTING)
    long_end = runs.summaries(runs.at_update(long, LONG_LAST), COLUMNS, SETTING)
    of = lambda name: by_name.get(name, [])
    lost = lambda arm, lag: runs.gaps(of(f"{REWARD if arm in WITHOUT_FRESH else arm} 0"), of(f"{arm} {lag}"), RIGHT)
    weighted = lambda arm, control: {
        **{column: runs.difference(of(arm), of(control), column) for column in COLUMNS},
        "equal_kl": runs.gap_at_equal_kl(trained.get(arm, []), trained.get(control, []), start[RIGHT]["mean"]),
    }
    return {
        "made": runs.provenance([*rows, *long, *stale]),
        "start": start,
        "end": runs.summaries(runs.at_update(rows, LAST), COLUMNS, SETTING),
        "long_end": {name: columns for name, columns in long_end.items() if name in by_name},
        "claimed": _claimed(CLAIMED | OUR_CLAIMS, rows, LAST),
        "long_claimed": _claimed(LONG_CLAIMED, long, LONG_LAST),
        "failures": runs.failures(rows, LAST, SETTING),
        "cost": {f"{arm} {lag}": runs.over_seeds(lost(arm, lag), "gap") for arm, lag in product(ARMS, LAGS)},
        "steadier": {arm: runs.difference(lost(NONE, "10"), lost(arm, "10"), "gap") for arm in STEADIER.values()},
        "weighted": {lag: {arm: weighted(f"{arm} {lag}", f"{CONTROL} {lag}") for arm in CORRECTED} for lag in LAGS},
        "paths": runs.paths(rows, RIGHT, SETTING) | runs.paths(long, RIGHT, SETTING),
        "runs": runs.points_of(runs.at_update(rows, LAST), SETTING),
        "k1-loss": sorted(
            [*_each_k1_loss(stale), *_each_k1_loss(long)],
            key=lambda run: (float(run["kl_coef"]), int(run["lag"]), run["update"][-1], run["seed"]),
        ),
    }


def _claimed(claims: dict[str, tuple[str, str]], rows: list[runs.Row], last: int) -> dict[str, runs.SeedMean]:
    """The differences of claims, seed by seed; a start is that of the runs that are compared with it."""
    ends, starts = (runs.grouped(runs.at_update(rows, update), SETTING) for update in (last, 0))
    return runs.differences({claim: (RIGHT, *sides) for claim, sides in claims.items()}, ends, starts)


def _each_k1_loss(rows: list[runs.Row]) -> Iterator[Numbers]:
    """Every run of k1 as a loss on old completions: lag, coefficient, seed, and right answers and KL over updates."""
    own = (row for row in rows if row["arm"] == "k1-loss")
    for path in runs.grouped(own, "{lag} {kl_coef} {seed}").values():
        labels = {name: path[0][name] for name in ("lag", "kl_coef", "seed")}
        yield labels | {column: [row[column] for row in path] for column in ("update", RIGHT, runs.FAR)}


def check(numbers: Numbers) -> list[Check]:
    """The paper's sentences at a lag of 10, and ours; a sentence whose runs are missing is undecided.

    What the weights change is a question, to which the paper has no sentence: its numbers are in the tables.
    """
    claimed, long, steadier = numbers["claimed"], numbers["long_claimed"], numbers["steadier"]
    return [
        *(_judged(f"{claim}, lag 10, {LONG_LAST} updates", gap, LONG_LAST) for claim, gap in long.items()),
        *(_judged(f"{claim}, lag 10", claimed[claim], LAST) for claim in CLAIMED),
        *ours(
            *(_judged(f"{claim}, lag 10", claimed[claim], LAST) for claim in OUR_CLAIMS),
            *(runs.exceeds_over_seeds(f"{claim}, lag 10", steadier[arm]) for claim, arm in STEADIER.items()),
            *_of_lags_between(numbers["k1-loss"]),
        ),
    ]


def _judged(sentence: str, gap: runs.SeedMean, last: int) -> Check:
    if "below its start" in sentence:
        return runs.collapses(sentence, gap, HORIZON.format(last))
    return runs.exceeds_over_seeds(sentence, gap)


def _of_lags_between(each: list[Numbers]) -> Iterator[Check]:
    """How many runs of k1 as a loss end below their start, by coefficient, and whether lag times coefficient decides.

    A sentence about all runs is decided by as many runs as other sentences need seeds.
    """
    ended = _longest(each)
    fallen = lambda run: run[RIGHT][-1] < run[RIGHT][0]
    for coef in BETWEEN_COEFFICIENTS:
        own = [run for run in ended if run["kl_coef"] == coef and run["lag"] in BETWEEN]
        count, seeds = sum(map(fallen, own)), len({run["seed"] for run in own})
        holds = len(own) >= runs.ENOUGH_SEEDS and count == len(own)
        horizon = "" if holds else f"; {HORIZON.format(max((run['update'][-1] for run in own), default=0))}"
        claim = f"k1 as loss at β = {coef} ends below its start in every run, lags 4 to 8"
        yield Check(claim, f"in {count} of {len(own)} runs, {seeds} seeds{horizon}", holds, decided=holds)
    product_of = lambda run: round(int(run["lag"]) * float(run["kl_coef"]), 9)
    most = max((product_of(run) for run in ended if not fallen(run)), default=0.0)
    least = min((product_of(run) for run in ended if fallen(run)), default=math.inf)
    claim = "the product of lag and β decides whether k1 as loss ends below its start"
    measured = f"largest product without a fall {most:g}, smallest with one {least:g}; {HORIZON.format('60 or 180')}"
    yield Check(claim, measured, holds=most < least, decided=most < least)


def _longest(each: list[Numbers]) -> list[Numbers]:
    """The runs that have ended, those of 180 updates in the place of those of 60 with the same lag and coefficient."""
    last, same = (lambda run: run["update"][-1]), (lambda run: (run["lag"], run["kl_coef"]))
    long = {same(run) for run in each if last(run) == LONG_LAST}
    return [run for run in each if last(run) == (LONG_LAST if same(run) in long else LAST)]
