"""Recorded runs that distil a student by a KL alone: their measures, and sentences about runs that may be missing.

Each seed has questions of its own. The error of right answers is that of so many questions, if the seeds agree more
closely. The KL on the teacher's completions has the error over seeds alone.
"""

import math
from collections.abc import Iterable

from .recorded_runs import ENOUGH_ERRORS, ENOUGH_SEEDS, Row, at_update, exceeds_over_seeds, over_seeds, rows_of
from .study import Check, Experiment, Settings

LAST = 40
OWN, TEACHERS, RIGHT = "kl_per_token", "forward_kl_per_token", "correct"
"""KL(student‖teacher) on the student's own completions, KL(teacher‖student) on the teacher's, and right answers."""
COLUMNS = (OWN, TEACHERS, RIGHT, "entropy_per_token", "length")
QUESTIONS = 182
"""Held-out questions of one evaluation."""

Found = dict[str, float]
"""A mean or a difference over seeds."""


def finite_rows(experiment: Experiment, settings: Settings) -> list[Row]:
    """The evaluations, without those of students that have diverged, and with the errors of right answers."""
    finite = (row for row in rows_of(experiment, settings) if all(math.isfinite(float(row[c])) for c in COLUMNS))
    return [{**row, f"{RIGHT}_se": _binomial_error(float(row[RIGHT]))} for row in finite]


def _binomial_error(share: float) -> str:
    return str((share * (1 - share) / QUESTIONS) ** 0.5)


def at_start(rows: Iterable[Row], column: str) -> Found | None:
    """A column before training, where all runs of a seed are one model on the same questions."""
    by_seed = {row["seed"]: row for row in at_update(rows, 0)}
    return over_seeds(list(by_seed.values()), column) if by_seed else None


def difference_of(high: Found | None, low: Found | None) -> Found | None:
    """A difference of two means or of two differences over seeds; None if one of them is missing."""
    if high is None or low is None:
        return None
    a, b = (found.get("mean", found.get("difference", math.nan)) for found in (high, low))
    error = math.hypot(high["error"], low["error"])
    return {"difference": a - b, "error": error, "seeds": min(high["seeds"], low["seeds"])}


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


def exceeds_if_run(claim: str, found: Found | None) -> Check:
    """Check that a difference is positive; open if runs are missing."""
    return _missing(claim) if found is None else exceeds_over_seeds(claim, found)


def below_if_run(claim: str, found: Found | None, limit: float) -> Check:
    """Check that a difference is below a limit, by two standard errors; open if that depends on them.

    Example:
        >>> below_if_run("it costs little", {"difference": 0.1, "error": 0.1, "seeds": 3}, limit=0.4)
        Check(claim='it costs little', measured='0.1 ± 0.1, limit 0.4, 3 seeds', holds=True, decided=True)
    """
    if found is None:
        return _missing(claim)
    error, enough = ENOUGH_ERRORS * found["error"], found["seeds"] >= ENOUGH_SEEDS
    below, above = enough and found["difference"] + error < limit, enough and found["difference"] - error > limit
    measured = f"{found['difference']:.2g} ± {found['error']:.2g}, limit {limit:.2g}, {found['seeds']:g} seeds"
    return Check(claim, measured, below, decided=below or above)


def _missing(claim: str) -> Check:
    return Check(claim, "no value: runs are missing", holds=False, decided=False)
