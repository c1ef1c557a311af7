"""In distillation the forward KL is robust to stale completions, and the reverse KL is not, unless it is recomputed
under the current student.

The paper's first two results, on a smaller model: a student with 20 of SmolLM2-135M's 30 layers is trained towards the
whole model, on completions that are 0, 4 or 16 updates old, or that are used for 1, 4 or 16 updates. The exact KL of a
token is summed over the vocabulary under the current student, and the top-64 one over the teacher's likeliest tokens.
The sampled terms are recomputed for the token that the old student drew, without an importance weight: k1 for the
reverse KL, k3 for the forward KL. What staleness costs is the share by which the KL is higher than with fresh
completions, after the same number of updates: arms end at different KLs, so differences in nats do not compare. Design,
table and limits: docs/experiments.md.
"""

from collections.abc import Iterator
from dataclasses import replace

from ..distillation_runs import COLUMNS, LAST, OWN, RIGHT, TEACHERS, excess_of, finite_rows
from ..recorded_runs import (
    ENOUGH_ERRORS,
    ENOUGH_SEEDS,
    Found,
    Row,
    at_start,
    at_update,
    below_if_run,
    difference,
    difference_if_run,
    exceeds_if_run,
    paths,
    provenance,
    summaries,
)
from ..study import Check, Experiment, Numbers, Settings
from .stale_distillation_figure import draw as draw

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
    "(ours) a lag of 16 costs the exact reverse KL less than a tenth": (EXACT_REVERSE, LATE),
    "(ours) a lag of 16 costs the exact forward KL less than a tenth": (EXACT_FORWARD, LATE),
    "(ours) 16 updates with each batch cost the exact reverse KL less than a tenth": (EXACT_REVERSE, REUSED),
    "(ours) 16 updates with each batch cost the exact forward KL less than a tenth": (EXACT_FORWARD, REUSED),
}
"""An arm, and the age of its completions."""
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
