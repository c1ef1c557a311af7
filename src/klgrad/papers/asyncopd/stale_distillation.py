"""In distillation the forward KL is robust to stale completions, and the reverse KL is not, unless it is recomputed
under the current student.

A student with 20 of SmolLM2-135M's 30 layers is trained towards the whole model, on completions that are 0, 4 or 16
updates old, or that are used for 1, 4 or 16 updates. What staleness costs is the share by which the KL is higher, seed
by seed. With a filled queue of old completions ("filled-16") runs differ from fresh ones in the age alone. A plain lag
repeats its first batch until the next is old enough, and has 24 batches in 40 updates ("lag-16"); its control uses 24
fresh batches once or twice ("fresh-24"). Design, tables and limits: docs/experiments/stale-distillation.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...drawing import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from .. import runs
from ..study import Axes, Check, Experiment, Figure, Numbers, Settings, error_bars, ours

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
SHOWN = {
    "fresh": "fresh,\n40 batches",
    "fresh-24": "fresh,\n24 batches",
    "lag-16": "16 old,\n24 batches",
    "filled-16": "16 old,\n40 batches",
}
"""What the middle panels compare."""
REUSES = {"fresh": "1", "reuse-4": "4", "reuse-16": "16"}
PER_PANEL = "3 seeds, ± 1 SE"


def draw(numbers: Numbers, figure: Figure) -> None:
    """Exact terms over updates, and all runs after the last one; settings without runs are left out."""
    figure.set_size_inches(14, 8.4)
    axes = figure.subplots(2, 3)
    for (measure, label), (updates, ages, reuses) in zip(ROWS.items(), axes, strict=True):
        _over_updates(numbers["paths"][measure], updates)
        _each_run(numbers["runs"], measure, ages)
        _over_reuses(numbers["end"], measure, reuses)
        updates.set(ylabel=f"{label}, nats")
    axes[0][0].set_title(f"exact terms: fresh (lines), 16 old (dashed: filled queue)\n{PER_PANEL}", fontsize=9.5)
    axes[0][1].set_title("after 40 updates, each run a mark, 3 seeds", fontsize=9.5)
    axes[0][2].set_title(f"after 40 updates, {PER_PANEL}", fontsize=9.5)
    figure.legend(*axes[0][2].get_legend_handles_labels(), ncols=6, loc="outside lower center", fontsize=8.5)


def _over_updates(paths: Numbers, axis: Axes) -> None:
    """Without the start, which is several times as high."""
    for arm, (stale, line) in product(("reverse-exact", "forward-exact"), (("fresh", "-"), ("filled-16", "--"))):
        if path := paths.get(f"{arm} {stale}"):
            runs.curve(axis, {name: values[1:] for name, values in path.items()}, ARMS[arm][1], line, lw=1.6)
    axis.set_xlabel("updates")


def _each_run(by_setting: Numbers, measure: str, axis: Axes) -> None:
    for i, (arm, (_, colour, mark)) in enumerate(ARMS.items()):
        for at, stale in enumerate(SHOWN):
            own = by_setting.get(f"{arm} {stale}", {}).get(measure, {})
            axis.plot([at + 0.12 * (i - 2.5)] * len(own), list(own.values()), mark, color=colour, mfc="none", ms=5)
    runs.logarithmic(axis)
    axis.set_xticks(range(len(SHOWN)), list(SHOWN.values()), fontsize=8.5)
    axis.set_xlabel("age of the completions, different batches")


def _over_reuses(end: Numbers, measure: str, axis: Axes) -> None:
    runs.logarithmic(axis)
    for arm, (label, colour, mark) in ARMS.items():
        settings = {at: f"{arm} {stale}" for at, stale in enumerate(REUSES)}
        known = {at: end[name][measure] for at, name in settings.items() if name in end}
        error_bars(axis, known, known.values(), f"{mark}-", color=colour, label=label, ms=5, lw=1.4, capsize=2)
    axis.set_xticks(range(len(REUSES)), list(REUSES.values()))
    axis.set_xlabel("updates with each batch")


EXPERIMENT = Experiment("stale_distill.csv", "exp_stale_distill.py")
SETTING = "{arm} {stale}"
FRESH, OLD, LATE, FEWER, REUSED = "fresh", "filled-16", "lag-16", "fresh-24", "reuse-16"
COMPARED = {
    OLD: (OLD, FRESH),
    f"{LATE} against {FEWER}": (LATE, FEWER),
    FEWER: (FEWER, FRESH),
    "lag-4": ("lag-4", FRESH),
    LATE: (LATE, FRESH),
    "reuse-4": ("reuse-4", FRESH),
    REUSED: (REUSED, FRESH),
}
"""What is compared with what. The first differs in the age alone, the second in it and in which batches are repeated,
the third in the number of different batches alone; the others differ in both."""
SAME_BATCHES = f"{LATE} against {FEWER}"
MEASURES = {runs.OWN: "on the student's completions", runs.TEACHERS: "on the teacher's completions"}
"""The two KLs by which sentences are judged; right answers are in the table."""
SMALL = 0.1
"""Staleness costs little if it costs less than this share."""
SAMPLED_REVERSE, EXACT_REVERSE, TOP_REVERSE = "reverse-sampled", "reverse-exact", "reverse-top-64"
SAMPLED_FORWARD, EXACT_FORWARD, TOP_FORWARD = "forward-sampled", "forward-exact", "forward-top-64"
AGE = "an age of 16 updates"
Sides = dict[str, tuple[str, str]]
"""Two sides by claim."""
COSTS_MORE = {
    f"{AGE} costs the sampled reverse KL more than the exact forward KL": (SAMPLED_REVERSE, EXACT_FORWARD),
    f"{AGE} costs the sampled reverse KL more than the top-64 forward KL": (SAMPLED_REVERSE, TOP_FORWARD),
    f"{AGE} costs the sampled reverse KL more than the exact, recomputed one": (SAMPLED_REVERSE, EXACT_REVERSE),
    f"{AGE} costs the top-64 reverse KL more than the top-64 forward KL": (TOP_REVERSE, TOP_FORWARD),
}
"""The arm that should lose more by completions that are 16 updates old, and the one that should lose less."""
OUR_COSTS_MORE = {
    f"{AGE} costs the exact reverse KL more than the exact forward KL": (EXACT_REVERSE, EXACT_FORWARD),
    f"{AGE} costs the sampled reverse KL more than the sampled forward KL": (SAMPLED_REVERSE, SAMPLED_FORWARD),
    f"{AGE} costs the top-64 reverse KL more than the exact one": (TOP_REVERSE, EXACT_REVERSE),
}
WORSE = {f"{AGE} makes the sampled reverse KL worse": (SAMPLED_REVERSE, OLD)}
"""An arm, and what is compared."""
OUR_WORSE = {
    f"{AGE} makes the top-64 reverse KL worse": (TOP_REVERSE, OLD),
    f"{AGE} makes the exact reverse KL worse": (EXACT_REVERSE, OLD),
    f"{AGE} makes the exact forward KL worse": (EXACT_FORWARD, OLD),
    "a lag of 16 makes the sampled reverse KL worse than 24 fresh batches do": (SAMPLED_REVERSE, SAME_BATCHES),
    "a lag of 16 makes the top-64 reverse KL worse than 24 fresh batches do": (TOP_REVERSE, SAME_BATCHES),
    "a lag of 16 makes the exact reverse KL worse than 24 fresh batches do": (EXACT_REVERSE, SAME_BATCHES),
    "a lag of 16 makes the exact forward KL worse than 24 fresh batches do": (EXACT_FORWARD, SAME_BATCHES),
}
COSTS_LITTLE = {
    f"{AGE} costs the exact reverse KL less than a tenth": (EXACT_REVERSE, OLD),
    f"{AGE} costs the exact forward KL less than a tenth": (EXACT_FORWARD, OLD),
    "16 updates with each batch cost the exact reverse KL less than a tenth": (EXACT_REVERSE, REUSED),
    "16 updates with each batch cost the exact forward KL less than a tenth": (EXACT_FORWARD, REUSED),
    "24 batches in place of 40 cost the exact reverse KL less than a tenth": (EXACT_REVERSE, FEWER),
    "24 batches in place of 40 cost the exact forward KL less than a tenth": (EXACT_FORWARD, FEWER),
}
NEARER = "with stale completions every arm ends nearer to the teacher than it began"


def run(settings: Settings) -> Numbers:
    rows = runs.finite_rows(EXPERIMENT, settings)
    last, before = (runs.grouped(runs.at_update(rows, update), SETTING) for update in (runs.LAST, 0))
    at = lambda arm, age: last.get(f"{arm} {age}", [])
    sides = product(ARMS, COMPARED.items())
    comparisons = [(f"{arm} {name}", at(arm, old), at(arm, new)) for arm, (name, (old, new)) in sides]
    shares = lambda arm, measure: runs.gaps(at(arm, OLD), at(arm, FRESH), measure, share=True)
    return {
        "made": runs.provenance(rows),
        "end": runs.summaries(runs.at_update(rows, runs.LAST), runs.COLUMNS, SETTING),
        "runs": {name: {m: {row["seed"]: row[m] for row in group} for m in MEASURES} for name, group in last.items()},
        "paths": {measure: runs.paths(rows, measure, SETTING) for measure in MEASURES},
        # What each arm loses in each comparison, seed by seed: the share of a KL, or right answers.
        "costs": {
            **{m: {name: runs.excess(old, new, m) for name, old, new in comparisons} for m in MEASURES},
            runs.RIGHT: {name: runs.difference(new, old, runs.RIGHT) for name, old, new in comparisons},
        },
        "gains": {m: {name: runs.difference(before[name], last[name], m) for name in last} for m in MEASURES},
        # By how much more one arm loses by the age than another.
        "more": {
            m: {
                claim: runs.difference(shares(more, m), shares(less, m), "gap")
                for claim, (more, less) in (COSTS_MORE | OUR_COSTS_MORE).items()
            }
            for m in MEASURES
        },
    }


def check(numbers: Numbers) -> list[Check]:
    theirs = [check for measure in MEASURES for check in _differences(numbers, measure, WORSE, COSTS_MORE)]
    return [*theirs, *ours(*(check for measure in MEASURES for check in _our_sentences(numbers, measure)))]


def _differences(numbers: Numbers, measure: str, worse: Sides, costs_more: Sides) -> Iterator[Check]:
    for claim, (arm, name) in worse.items():
        yield runs.exceeds_over_seeds(f"{claim}, {MEASURES[measure]}", numbers["costs"][measure][f"{arm} {name}"])
    for claim in costs_more:
        yield runs.exceeds_over_seeds(f"{claim}, {MEASURES[measure]}", numbers["more"][measure][claim])


def _our_sentences(numbers: Numbers, measure: str) -> Iterator[Check]:
    yield from _differences(numbers, measure, OUR_WORSE, OUR_COSTS_MORE)
    for claim, (arm, name) in COSTS_LITTLE.items():
        cost = numbers["costs"][measure][f"{arm} {name}"]
        yield runs.below_over_seeds(f"{claim}, {MEASURES[measure]}", cost, SMALL)
    yield _every_one_nearer(f"{NEARER}, {MEASURES[measure]}", numbers, measure)


def _every_one_nearer(claim: str, numbers: Numbers, measure: str) -> Check:
    """By the progress of the stale setting whose lower bound is the lowest, of those with enough seeds."""
    stale = [gain for setting, gain in numbers["gains"][measure].items() if not setting.split()[1].startswith(FRESH)]
    judged = [gain for gain in stale if gain["seeds"] >= runs.ENOUGH_SEEDS]
    if not judged:
        return runs.undecided(claim)
    verdict = runs.exceeds_over_seeds(claim, min(judged, key=lambda x: x["mean"] - runs.ENOUGH_ERRORS * x["error"]))
    left_out = len(stale) - len(judged)
    more = f"; without {left_out} of {len(stale)} settings, with fewer seeds" if left_out else ""
    return replace(verdict, measured=verdict.measured + more)
