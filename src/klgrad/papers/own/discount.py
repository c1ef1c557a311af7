"""A discounted part of the sequence-level gradient brings a student nearer to its teacher on its own completions than
the token-level gradient does, but not on the teacher's completions.

With discount 0 a token is responsible for its own KL only, with discount 1 for the KL of all later tokens too. A
discount below 1 adds a bias and takes away variance. A student with 20 of SmolLM2-135M's 30 layers is trained towards
the whole model, with completions of fixed length, by the exact KL with five discounts, with and without a leave-one-out
baseline, and by k1 with three. Bias and variance of the same gradients are measured at fixed weights: those of the
start, and those after 20 updates. They are relative to the squared length of the sequence-level gradient. The learning
rate of every arm and size of a batch is the best of three with one seed, by the KL on the student's completions, and
the arm is judged at that rate by three other seeds. Runs with one rate for all arms are shown and not judged. Design,
tables and limits: docs/experiments.md.
"""

from dataclasses import replace

from ..distillation_runs import COLUMNS, FIRST_SEED, LAST, OWN, TEACHERS, finite_rows
from ..recorded_runs import Found, Row, at_start, at_update, difference_if_run, exceeds_if_run, provenance, summaries
from ..study import Check, Experiment, Numbers, Settings
from .discount_figure import draw as draw
from .discount_gradients import GRADIENTS, gradient_checks, gradients_of, prediction_checks
from .discount_rates import SWEEP, arm_of, at_all_rates, best_rates, rate_of

SEEDS = Experiment("discount.csv", SWEEP.script, ("seeds",))
EXPERIMENT = replace(SWEEP, also=(SEEDS, GRADIENTS))
"""The sweep first: the seeds have the rates that it finds."""
ONE_RATE = 0.0001
"""Of the runs with one rate for all arms, which are shown beside those at the best rates."""
LARGE, SMALL = "256", "64"
"""Completions of a batch. The first is where most sentences are judged."""
TOKEN, HALF, MOST, WHOLE = "exact-0", *(f"exact-{d}-leave-one-out" for d in ("0.5", "0.9", "1"))
STUDENTS, OF_TEACHER = "on the student's completions", "on the teacher's completions"
NEARER = {
    f"a future discounted by 0.5 ends nearer than none, {STUDENTS}": (OWN, TOKEN, HALF),
    f"a future discounted by 0.9 ends nearer than none, {STUDENTS}": (OWN, TOKEN, MOST),
    f"the whole future ends nearer than none, {STUDENTS}": (OWN, TOKEN, WHOLE),
    f"a future discounted by 0.9 ends nearer than the whole, {STUDENTS}": (OWN, WHOLE, MOST),
    f"no future ends nearer than one discounted by 0.5, {OF_TEACHER}": (TEACHERS, HALF, TOKEN),
    f"no future ends nearer than one discounted by 0.9, {OF_TEACHER}": (TEACHERS, MOST, TOKEN),
    f"with discount 0.9, leave-one-out ends nearer than no baseline, {STUDENTS}": (OWN, "exact-0.9", MOST),
    f"with the whole future, leave-one-out ends nearer than no baseline, {STUDENTS}": (OWN, "exact-1", WHOLE),
    f"without a future, the exact KL ends nearer than k1, {STUDENTS}": (OWN, "k1-0-leave-one-out", TOKEN),
    f"with the whole future, the exact KL ends nearer than k1, {STUDENTS}": (OWN, "k1-1-leave-one-out", WHOLE),
}
"""A measure, the arm that should end farther from the teacher, and the one that should end nearer."""
AT_BOTH_SIZES = (
    f"a future discounted by 0.9 ends nearer than none, {STUDENTS}",
    f"no future ends nearer than one discounted by 0.9, {OF_TEACHER}",
)
GAINS_LESS = f"a batch of 64 gains less than one of 256 by a future discounted by 0.9, {STUDENTS}"


def run(settings: Settings) -> Numbers:
    """Every arm at its best rate and at one rate for all, comparisons, moments of gradients, and the sweep of rates."""
    swept, rows = (finite_rows(experiment, settings) for experiment in (SWEEP, SEEDS))
    gradients, measured = gradients_of(settings)
    best, last = best_rates(swept), at_update(rows, LAST)
    judged = (row for row in last if row["seed"] != FIRST_SEED and rate_of(row) == best.get(arm_of(row)))
    end = summaries(judged, COLUMNS, setting_of)
    return {
        "made": provenance([*rows, *measured, *swept]),
        "start": {column: at_start(rows, column) for column in COLUMNS},
        "end": end,
        "one_rate": summaries((row for row in last if rate_of(row) == ONE_RATE), COLUMNS, setting_of),
        "comparisons": {
            claim: {size: _ahead(end, size, *by) for size in (LARGE, SMALL)} for claim, by in NEARER.items()
        },
        "gradients": gradients,
        "rates": at_all_rates(swept),
    }


def setting_of(row: Row) -> str:
    """Size of the batch, and arm."""
    return " ".join(arm_of(row))


def _ahead(end: Numbers, size: str, measure: str, farther: str, nearer: str) -> Found | None:
    sides = [end[name][measure] if name in end else None for name in (f"{size} {farther}", f"{size} {nearer}")]
    return difference_if_run(*sides)


def check(numbers: Numbers) -> list[Check]:
    """Sentences about the training runs, about the gradients, and about what the gradients predict of the runs."""
    compared = numbers["comparisons"]
    found = [exceeds_if_run(claim, at[LARGE]) for claim, at in compared.items()]
    found += [exceeds_if_run(f"with batches of 64, {claim}", compared[claim][SMALL]) for claim in AT_BOTH_SIZES]
    gains = (compared[AT_BOTH_SIZES[0]][size] for size in (LARGE, SMALL))
    found.append(exceeds_if_run(GAINS_LESS, difference_if_run(*gains)))
    ends = {name: columns[OWN] for name, columns in numbers["end"].items()}
    return [*found, *gradient_checks(numbers["gradients"]), *prediction_checks(numbers["gradients"], ends)]
