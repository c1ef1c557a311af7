"""Recorded runs that distil a student by a KL alone: their measures.

Each seed has questions of its own. The error of right answers is that of so many questions, if the seeds agree more
closely. The KL on the teacher's completions has the error over seeds alone.
"""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from .recorded_runs import Found, Row, rows_of
from .study import Experiment, Settings

LAST = 40
OWN, TEACHERS, RIGHT = "kl_per_token", "forward_kl_per_token", "correct"
"""KL(student‖teacher) on the student's own completions, KL(teacher‖student) on the teacher's, and right answers."""
COLUMNS = (OWN, TEACHERS, RIGHT, "entropy_per_token", "length")
QUESTIONS = 182
"""Held-out questions of one evaluation."""
FIRST_SEED = "0"
"""The seed by whose runs the settings of an arm are chosen; the arm is judged by others."""

Name = TypeVar("Name")


def finite_rows(experiment: Experiment, settings: Settings) -> list[Row]:
    """The evaluations, without those of students that have diverged, and with the errors of right answers."""
    finite = (row for row in rows_of(experiment, settings) if all(math.isfinite(float(row[c])) for c in COLUMNS))
    return [{**row, f"{RIGHT}_se": _binomial_error(float(row[RIGHT]))} for row in finite]


def _binomial_error(share: float) -> str:
    return str((share * (1 - share) / QUESTIONS) ** 0.5)


def nearest(ends: Iterable[Row], name_of: Callable[[Row], Name]) -> dict[Name, Row]:
    """Of each name, the run of the first seed that ends nearest to the teacher on its own completions.

    Args:
        ends: the last evaluations of runs; those of other seeds and of students that diverged are passed over.
        name_of: what the runs are grouped by.
    """
    found: dict[Name, Row] = {}
    for row in ends:
        if row["seed"] == FIRST_SEED and math.isfinite(float(row[OWN])):
            best = found.setdefault(name_of(row), row)
            found[name_of(row)] = min(best, row, key=lambda each: float(each[OWN]))
    return found


def excess_of(found: Found, base: Found) -> Found:
    """By which share of the second mean the first is higher.

    Example:
        >>> found = excess_of({"mean": 1.2, "error": 0.0, "seeds": 3}, {"mean": 0.8, "error": 0.08, "seeds": 3})
        >>> {name: round(value, 3) for name, value in found.items()}
        {'difference': 0.5, 'error': 0.15, 'seeds': 3}
    """
    ratio = found["mean"] / base["mean"]
    error = ratio * math.hypot(found["error"] / found["mean"], base["error"] / base["mean"])
    return {"difference": ratio - 1, "error": error, "seeds": min(found["seeds"], base["seeds"])}
