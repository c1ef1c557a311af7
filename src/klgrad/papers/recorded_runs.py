"""Numbers of training runs on a GPU, from the CSV file that the experiment's script wrote, compared over seeds.

Such a run takes minutes on a GPU, so a study reads the committed file. `klgrad reproduce --run` measures it again.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from .study import Check, Experiment, Settings

Row = dict[str, str]

CHECKOUT = Path(__file__).parents[3]
"""The root of the repository, for a package that is not installed from a wheel."""
COMMITTED = Path(__file__).parent / "recorded"

ENOUGH_SEEDS = 3
ENOUGH_ERRORS = 2.0
"""A difference between training runs counts beyond this many standard errors, from `ENOUGH_SEEDS` seeds on."""


def rows_of(experiment: Experiment, settings: Settings) -> list[Row]:
    """The rows that were measured here with `--run`, or else the committed ones."""
    folder = Path(settings.measured) if settings.measured else COMMITTED
    with (folder / experiment.file).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def provenance(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Versions, commits and dates of the measurements."""
    return {name: sorted({row[name] for row in rows}) for name in ("torch", "klgrad", "commit", "date")}


def over_seeds(rows: Sequence[Row], column: str) -> dict[str, float]:
    """Mean, standard error and number of seeds of one column.

    The error is the larger of two: that of the mean over seeds, and that of the evaluations (column `<column>_se`, if
    there is one). Two or three seeds may agree by chance, more closely than the evaluations can tell.

    Example:
        >>> rows = [{"right": "0.5", "right_se": "0.2"}, {"right": "0.5", "right_se": "0.2"}]
        >>> {name: round(x, 3) for name, x in over_seeds(rows, "right").items()}
        {'mean': 0.5, 'error': 0.141, 'seeds': 2}
    """
    values, n = [float(row[column]) for row in rows], len(rows)
    spread = stdev(values) / n**0.5 if n > 1 else 0.0  # one seed never counts
    own = sum(float(row.get(f"{column}_se") or 0) ** 2 for row in rows) ** 0.5 / n
    return {"mean": fmean(values), "error": max(spread, own), "seeds": n}


def at_start(rows: Iterable[Row], column: str) -> dict[str, float]:
    """One column before training, where all runs are one model on the same questions.

    So the error is that of one evaluation, and it does not become smaller with the number of runs.
    """
    first = at_update(rows, 0)
    found = over_seeds(first, column)
    return {**found, "error": float(first[0].get(f"{column}_se") or 0), "seeds": len({row["seed"] for row in first})}


def difference(higher: dict[str, float], lower: dict[str, float]) -> dict[str, float]:
    """A difference of two means over seeds, its error, and the smaller number of seeds."""
    error = (higher["error"] ** 2 + lower["error"] ** 2) ** 0.5
    seeds = min(higher["seeds"], lower["seeds"])
    return {"difference": higher["mean"] - lower["mean"], "error": error, "seeds": seeds}


def counts(found: dict[str, float]) -> bool:
    """Whether a difference is positive by the rule of these experiments."""
    return found["seeds"] >= ENOUGH_SEEDS and found["difference"] > ENOUGH_ERRORS * found["error"]


def exceeds_over_seeds(claim: str, found: dict[str, float]) -> Check:
    """Check that a difference is positive; with too few seeds that is not decided.

    Example:
        >>> exceeds_over_seeds("it learns more", {"difference": 0.3, "error": 0.1, "seeds": 3})
        Check(claim='it learns more', measured='by 0.3 ± 0.1, 3.0 standard errors, 3 seeds', holds=True, decided=True)
    """
    errors = found["difference"] / found["error"] if found["error"] else float("inf") * found["difference"]
    by = f"by {found['difference']:.2g} ± {found['error']:.2g}"
    measured = f"{by}, {errors:.1f} standard errors, {found['seeds']:g} seed{'s' * (found['seeds'] != 1)}"
    return Check(claim, measured, counts(found), decided=found["seeds"] >= ENOUGH_SEEDS)


def open_without_runs(claim: str) -> Check:
    """The sentence of a claim whose runs have not been made, or have not reached their last update."""
    return Check(claim, "no value: runs are missing", holds=False, decided=False)


def equal_over_seeds(claim: str, found: dict[str, float], margin: float) -> Check:
    """Check that a difference is within a margin, by two standard errors; undecided if that depends on them.

    Example:
        >>> equal_over_seeds("they agree", {"difference": 0.1, "error": 0.1, "seeds": 3}, margin=0.4)
        Check(claim='they agree', measured='0.1 ± 0.1, margin 0.4, 3 seeds', holds=True, decided=True)
    """
    size, error, enough = abs(found["difference"]), ENOUGH_ERRORS * found["error"], found["seeds"] >= ENOUGH_SEEDS
    within, beyond = enough and size + error < margin, enough and size - error > margin
    measured = f"{found['difference']:.2g} ± {found['error']:.2g}, margin {margin:.2g}, {found['seeds']:g} seeds"
    return Check(claim, measured, within, decided=within or beyond)


def at_update(rows: Iterable[Row], update: int) -> list[Row]:
    """The rows of one evaluation."""
    return [row for row in rows if int(row["update"]) == update]


def grouped(rows: Iterable[Row], name_of: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Rows by name, in their order."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[name_of(row)].append(row)
    return dict(found)


def summaries(
    rows: Iterable[Row], columns: Sequence[str], name_of: Callable[[Row], str]
) -> dict[str, dict[str, dict[str, float]]]:
    """`over_seeds` of several columns, by name."""
    return {name: {c: over_seeds(group, c) for c in columns} for name, group in grouped(rows, name_of).items()}


def paths(rows: Sequence[Row], column: str, name_of: Callable[[Row], str]) -> dict[str, dict[str, list[float]]]:
    """Mean and standard error of a column over updates, by name."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"updates": [], "mean": [], "error": []})
    for update in sorted({int(row["update"]) for row in rows}):
        for name, group in grouped(at_update(rows, update), name_of).items():
            here = over_seeds(group, column)
            found[name]["updates"].append(update)
            found[name]["mean"].append(here["mean"])
            found[name]["error"].append(here["error"])
    return dict(found)
