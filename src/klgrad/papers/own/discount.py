"""A discounted part of the sequence-level gradient brings a student nearer to its teacher on its own completions than
the token-level gradient does, but not on the teacher's completions.

With discount 0 a token is responsible for its own KL only, with discount 1 for the KL of all later tokens too. A
discount below 1 adds a bias and takes away variance. A student with 20 of SmolLM2-135M's 30 layers is trained towards
the whole model, with completions of fixed length, by the exact KL with five discounts, with and without a leave-one-out
baseline, and by k1 with three. Bias and variance of the same gradients are measured at fixed weights: those of the
start, and those after 20 updates. They are relative to the squared length of the sequence-level gradient. All
sentences are judged at one learning rate; a sweep of three rates with one seed is shown and not judged. Design, tables
and limits: docs/experiments.md.
"""

from ..distillation_runs import COLUMNS, LAST, OWN, TEACHERS, finite_rows
from ..recorded_runs import Found, Row, at_start, at_update, difference_if_run, exceeds_if_run, provenance, summaries
from ..study import Check, Experiment, Numbers, Settings
from .discount_figure import draw as draw
from .discount_gradients import GRADIENTS, gradient_checks, gradients_of, prediction_checks
from .discount_rates import rates_of

EXPERIMENT = Experiment("discount.csv", "exp_discount.py", ("sweep", "seeds"), also=(GRADIENTS,))
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
    """Every arm at both sizes of a batch, their comparisons, the moments of the gradients, and the sweep of rates."""
    rows = finite_rows(EXPERIMENT, settings)
    gradients, measured = gradients_of(settings)
    rates, swept = rates_of(settings)
    end = summaries(at_update(rows, LAST), COLUMNS, setting_of)
    return {
        "made": provenance([*rows, *measured, *swept]),
        "start": {column: at_start(rows, column) for column in COLUMNS},
        "end": end,
        "comparisons": {
            claim: {size: _ahead(end, size, *by) for size in (LARGE, SMALL)} for claim, by in NEARER.items()
        },
        "gradients": gradients,
        "rates": rates,
    }


def setting_of(row: Row) -> str:
    """Size of the batch, and arm."""
    return f"{row['completions']} {row['arm']}"


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
