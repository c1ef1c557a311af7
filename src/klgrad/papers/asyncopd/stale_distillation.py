"""In distillation the forward KL is robust to stale completions, and the reverse KL is not, unless it is recomputed
under the current student.

The paper's first two results, on a smaller model: a student with 20 of SmolLM2-135M's 30 layers is trained towards the
whole model, on completions that are 0, 4 or 16 updates old, or that are used for 1, 4 or 16 updates. The exact KL of a
token is summed over the vocabulary under the current student, and the top-64 one over the teacher's likeliest tokens.
The sampled terms are recomputed for the token that the old student drew, without an importance weight: k1 for the
reverse KL, k3 for the forward KL. What staleness costs is the share by which the KL is higher than with fresh
completions: arms end at different KLs, so differences in nats do not compare. After the same number of updates a run
with a lag has also seen fewer different batches, because the first one is repeated until completions are old enough. So
a control compares it with the fresh run of its seed after as many different batches, which has had fewer updates: the
cost of age alone is between the two. Design, tables and limits: docs/experiments.md.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...drawing import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from ..runs import (
    COLUMNS,
    ENOUGH_ERRORS,
    ENOUGH_SEEDS,
    LAST,
    OWN,
    RIGHT,
    TEACHERS,
    Found,
    Row,
    at_start,
    at_update,
    band,
    below_if_run,
    difference,
    difference_if_run,
    exceeds_if_run,
    excess_of,
    finite_rows,
    grouped,
    over_seeds,
    paths,
    provenance,
    summaries,
)
from ..study import Check, Experiment, Numbers, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The figure of `stale_distillation`: a row of panels for each KL, over updates, over the lag and over the reuse.

ARMS = {
    "reverse-exact": ("reverse, exact", BLUE, "o"),
    "reverse-top-64": ("reverse, top 64", SKY, "s"),
    "reverse-sampled": ("reverse, sampled (k1)", GREEN, "^"),
    "forward-exact": ("forward, exact", VERMILION, "o"),
    "forward-top-64": ("forward, top 64", ORANGE, "s"),
    "forward-sampled": ("forward, sampled (k3)", PURPLE, "^"),
}
"""Label, colour and mark of an arm."""
ROWS = {
    "kl_per_token": "KL(student‖teacher) per token,\non the student's completions",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions",
}
AGES = {
    "age of the completions, updates": {0: "fresh", 4: "lag-4", 16: "lag-16"},
    "updates with each batch": {1: "fresh", 4: "reuse-4", 16: "reuse-16"},
}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over seeds, with bands or bars of one standard error; settings without runs are left out."""
    figure.set_size_inches(14, 8.4)
    axes = figure.subplots(2, 3, sharey="row")
    for (measure, label), (updates, *ages) in zip(ROWS.items(), axes, strict=True):
        _over_updates(numbers["paths"][measure], updates)
        for axis, (name, places) in zip(ages, AGES.items(), strict=True):
            _over_ages(numbers, measure, axis, places)
            axis.set(xlabel=name, xticks=list(places))
        updates.set(ylabel=f"{label}, nats", yscale="log")
        updates.yaxis.set_major_formatter("{x:g}")
        updates.yaxis.set_minor_formatter("{x:g}")
        updates.tick_params(which="both", labelsize=8)
    axes[0][0].set_title("fresh (lines) and 16 updates old (dashed)", fontsize=10)
    axes[0][1].set_title("after the last update", fontsize=10)
    axes[0][2].set_title("after the last update", fontsize=10)
    figure.legend(*axes[0][1].get_legend_handles_labels(), ncols=6, loc="outside lower center", fontsize=8.5)


def _over_updates(paths: dict[str, Any], axis: Any) -> None:
    for arm, (_, colour, _) in ARMS.items():
        for stale, line in (("fresh", "-"), ("lag-16", "--")):
            if (path := paths.get(f"{arm} {stale}")) is None:
                continue
            axis.plot(path["updates"], path["mean"], line, color=colour, lw=1.6)
            band(axis, path["updates"], path, colour)
    axis.set_xlabel("updates")


def _over_ages(numbers: Numbers, measure: str, axis: Any, places: dict[int, str]) -> None:
    for arm, (label, colour, mark) in ARMS.items():
        settings = {x: f"{arm} {stale}" for x, stale in places.items()}
        known = {x: numbers["end"][name][measure] for x, name in settings.items() if name in numbers["end"]}
        mean, error = ([each[name] for each in known.values()] for name in ("mean", "error"))
        axis.errorbar(list(known), mean, yerr=error, fmt=f"{mark}-", color=colour, label=label, ms=5, lw=1.4, capsize=2)


EXPERIMENT = Experiment("stale_distill.csv", "exp_stale_distill.py")
FRESH, LATE, REUSED = "fresh", "lag-16", "reuse-16"
MEASURES = {OWN: "on the student's completions", TEACHERS: "on the teacher's completions"}
"""The two KLs by which sentences are judged; right answers are in the table."""
SMALL = 0.1
"""Staleness costs little if it costs less than this share."""
SAMPLED_REVERSE, EXACT_REVERSE, TOP_REVERSE = "reverse-sampled", "reverse-exact", "reverse-top-64"
SAMPLED_FORWARD, EXACT_FORWARD, TOP_FORWARD = "forward-sampled", "forward-exact", "forward-top-64"
COSTS_MORE = {
    "a lag of 16 costs the sampled reverse KL more than the exact forward KL": (SAMPLED_REVERSE, EXACT_FORWARD),
    "a lag of 16 costs the sampled reverse KL more than the top-64 forward KL": (SAMPLED_REVERSE, TOP_FORWARD),
    "a lag of 16 costs the sampled reverse KL more than the exact, recomputed one": (SAMPLED_REVERSE, EXACT_REVERSE),
    "(ours) a lag of 16 costs the exact reverse KL more than the exact forward KL": (EXACT_REVERSE, EXACT_FORWARD),
    "(ours) a lag of 16 costs the sampled reverse KL more than the sampled forward KL": (
        SAMPLED_REVERSE,
        SAMPLED_FORWARD,
    ),
    "a lag of 16 costs the top-64 reverse KL more than the top-64 forward KL": (TOP_REVERSE, TOP_FORWARD),
    "(ours) a lag of 16 costs the top-64 reverse KL more than the exact one": (TOP_REVERSE, EXACT_REVERSE),
}
"""The arm that should lose more by completions that are 16 updates old, and the one that should lose less."""
COSTS_LITTLE = {
    "(ours) after as many updates, a lag of 16 costs the exact reverse KL less than a tenth": (EXACT_REVERSE, LATE),
    "(ours) after as many updates, a lag of 16 costs the exact forward KL less than a tenth": (EXACT_FORWARD, LATE),
    "(ours) after as many updates, 16 with each batch cost the exact reverse KL less than a tenth": (
        EXACT_REVERSE,
        REUSED,
    ),
    "(ours) after as many updates, 16 with each batch cost the exact forward KL less than a tenth": (
        EXACT_FORWARD,
        REUSED,
    ),
}
"""An arm, and the age of its completions."""
LAGS = {"lag-4": 4, LATE: 16}
BY_BATCHES = "(ours) after as many different batches, a lag of 16"
LITTLE_BY_BATCHES = {
    f"{BY_BATCHES} costs the exact reverse KL less than a tenth": EXACT_REVERSE,
    f"{BY_BATCHES} costs the exact forward KL less than a tenth": EXACT_FORWARD,
}
WORSE_BY_BATCHES = {
    f"{BY_BATCHES} makes the sampled reverse KL worse": SAMPLED_REVERSE,
    f"{BY_BATCHES} makes the top-64 reverse KL worse": TOP_REVERSE,
}
SUFFERS = "a lag of 16 makes the sampled reverse KL worse"
NEARER = "(ours) with stale completions every arm ends nearer to the teacher than it began"


def run(settings: Settings) -> Numbers:
    """Every setting at the last update and over updates, and what staleness costs it."""
    rows = finite_rows(EXPERIMENT, settings)
    end = summaries(at_update(rows, LAST), COLUMNS, setting_of)
    return {
        "made": provenance(rows),
        "start": {column: at_start(rows, column) for column in COLUMNS},
        "end": end,
        "paths": {measure: paths(rows, measure, setting_of) for measure in MEASURES},
        "costs": {column: _costs(end, column) for column in (*MEASURES, RIGHT)},
        "by batches": {measure: _by_batches(rows, measure) for measure in MEASURES},
    }


def setting_of(row: Row) -> str:
    """Arm and age of the completions."""
    return f"{row['arm']} {row['stale']}"


def _costs(end: Numbers, column: str) -> dict[str, Found]:
    """What each stale setting loses against its arm with fresh completions, where both have runs."""
    found = {}
    for setting, stale in end.items():
        fresh = end.get(f"{setting.split()[0]} {FRESH}")
        if fresh is not None and fresh is not stale:
            found[setting] = _cost(stale[column], fresh[column], column)
    return found


def _cost(stale: Found, fresh: Found, column: str) -> Found:
    """The share by which a KL is higher, or by how much right answers are fewer."""
    return difference(fresh, stale) if column == RIGHT else excess_of(stale, fresh)


def batches_of(stale: str) -> int:
    """How many different batches a run with a lag has seen after its last update: its first ones train on one batch."""
    return LAST - LAGS[stale]


def _by_batches(rows: list[Row], column: str) -> dict[str, Found]:
    """What each lag costs against the fresh run of its seed after as many different batches."""
    runs = grouped(rows, lambda row: f"{setting_of(row)} {row['seed']}")
    shares = []
    for late in (row for row in at_update(rows, LAST) if row["stale"] in LAGS):
        fresh = _between(runs.get(f"{late['arm']} {FRESH} {late['seed']}", []), column, batches_of(late["stale"]))
        if fresh is not None:
            ratio, relative = float(late[column]) / fresh[0], float(late.get(f"{column}_se") or 0) / float(late[column])
            error = ratio * math.hypot(relative, fresh[1])
            shares.append({"setting": setting_of(late), "cost": str(ratio - 1), "cost_se": str(error)})
    found = {name: over_seeds(group, "cost") for name, group in grouped(shares, lambda row: row["setting"]).items()}
    return {name: {"difference": x["mean"], "error": x["error"], "seeds": x["seeds"]} for name, x in found.items()}


def _between(run: list[Row], column: str, update: int) -> tuple[float, float] | None:
    """A KL at an update between two evaluations, linear in the logarithm, with the relative error of the evaluations.

    None if the run has no evaluation on one of the sides.
    """
    at = lambda row: int(row["update"])
    before = max((row for row in run if at(row) <= update), key=at, default=None)
    after = min((row for row in run if at(row) >= update), key=at, default=None)
    if before is None or after is None:
        return None
    share = (update - at(before)) / (at(after) - at(before)) if before is not after else 0.0
    weighted = ((1 - share, before), (share, after))
    log = sum(weight * math.log(float(row[column])) for weight, row in weighted)
    errors = (weight * float(row.get(f"{column}_se") or 0) / float(row[column]) for weight, row in weighted)
    return math.exp(log), math.hypot(*errors)


def check(numbers: Numbers) -> list[Check]:
    """The paper's sentences and ours, by both KLs."""
    found = [each for measure, words in MEASURES.items() for each in _by_one_measure(numbers, measure, words)]
    return sorted(found, key=lambda each: each.ours)  # the paper's sentences first


def _by_one_measure(numbers: Numbers, measure: str, words: str) -> Iterator[Check]:
    cost = numbers["costs"][measure].get
    yield exceeds_if_run(f"{SUFFERS}, {words}", cost(f"{SAMPLED_REVERSE} {LATE}"))
    for claim, arms in COSTS_MORE.items():
        yield exceeds_if_run(f"{claim}, {words}", difference_if_run(*(cost(f"{arm} {LATE}") for arm in arms)))
    for claim, (arm, stale) in COSTS_LITTLE.items():
        yield below_if_run(f"{claim}, {words}", cost(f"{arm} {stale}"), SMALL)
    by_batches = numbers["by batches"][measure].get
    for claim, arm in LITTLE_BY_BATCHES.items():
        yield below_if_run(f"{claim}, {words}", by_batches(f"{arm} {LATE}"), SMALL)
    for claim, arm in WORSE_BY_BATCHES.items():
        yield exceeds_if_run(f"{claim}, {words}", by_batches(f"{arm} {LATE}"))
    yield _every_one_nearer(f"{NEARER}, {words}", numbers, measure)


def _every_one_nearer(claim: str, numbers: Numbers, measure: str) -> Check:
    """By the progress of the stale setting whose lower bound is the lowest, of those with enough seeds."""
    stale = [end[measure] for setting, end in numbers["end"].items() if setting.split()[1] != FRESH]
    judged = [difference(numbers["start"][measure], end) for end in stale if end["seeds"] >= ENOUGH_SEEDS]
    least = min(judged, key=lambda each: each["difference"] - ENOUGH_ERRORS * each["error"], default=None)
    found, left_out = exceeds_if_run(claim, least), len(stale) - len(judged)
    if not judged or not left_out:
        return found
    return replace(found, measured=f"{found.measured}; without {left_out} of {len(stale)} settings, with fewer seeds")
