"""Numbers of training runs on a GPU, from the CSV file that the experiment's script wrote, compared over seeds.

Such a run takes minutes on a GPU, so a study reads the committed file. `klgrad reproduce --run` measures it again.
"""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from ..errors import ExperimentError
from .study import MISSING, Check, Experiment, Settings

Row = dict[str, str]
Found = dict[str, float]
"""A mean or a difference over seeds, with its error and the number of seeds."""

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


def over_seeds(rows: Sequence[Row], column: str) -> Found:
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


def at_start(rows: Iterable[Row], column: str) -> Found:
    """One column before training, over seeds.

    All runs of a seed begin as one model on the same questions, so each seed has one value, that of its first run. Each
    seed has questions of its own.
    """
    by_seed = grouped(at_update(rows, 0), lambda row: row["seed"])
    return over_seeds([runs[0] for runs in by_seed.values()], column)


def difference(higher: Found, lower: Found) -> Found:
    """A difference of two means or of two differences over seeds, its error, and the smaller number of seeds."""
    high, low = (found["mean"] if "mean" in found else found["difference"] for found in (higher, lower))
    error = math.hypot(higher["error"], lower["error"])
    return {"difference": high - low, "error": error, "seeds": min(higher["seeds"], lower["seeds"])}


def paired_difference(pairs: Sequence[tuple[Row, Row]], column: str) -> Found:
    """The first run of each pair less the second, where both have one seed; several experiments may have that seed.

    The error is the largest of three: that of the mean over pairs, that of the mean over seeds, which have questions of
    their own, and that of the evaluations.

    Example:
        >>> run = lambda seed, right: {"seed": seed, "right": right}
        >>> pairs = [(run("0", "0.5"), run("0", "0.3")), (run("1", "0.9"), run("1", "0.5"))]
        >>> {name: round(x, 3) for name, x in paired_difference(pairs, "right").items()}
        {'difference': 0.3, 'error': 0.1, 'seeds': 2}
    """
    gaps = []
    for one, other in pairs:
        error = math.hypot(*(float(row.get(f"{column}_se") or 0) for row in (one, other)))
        gaps.append({"seed": one["seed"], "gap": str(float(one[column]) - float(other[column])), "gap_se": str(error)})
    over_pairs = over_seeds(gaps, "gap")
    seeds = grouped(gaps, lambda gap: gap["seed"]).values()
    between = over_seeds([{"gap": str(over_seeds(group, "gap")["mean"])} for group in seeds], "gap")
    error = max(over_pairs["error"], between["error"])
    return {"difference": over_pairs["mean"], "error": error, "seeds": between["seeds"]}


def difference_if_run(higher: Found | None, lower: Found | None) -> Found | None:
    """`difference`; None if one of the two is missing."""
    return None if higher is None or lower is None else difference(higher, lower)


def counts(found: Found) -> bool:
    """Whether a difference is positive by the rule of these experiments."""
    return found["seeds"] >= ENOUGH_SEEDS and found["difference"] > ENOUGH_ERRORS * found["error"]


def exceeds_over_seeds(claim: str, found: Found) -> Check:
    """Check that a difference is positive; undecided if neither it nor its opposite counts.

    Example:
        >>> exceeds_over_seeds("it learns more", {"difference": 0.3, "error": 0.1, "seeds": 3})
        Check(claim='it learns more', measured='by 0.3 ± 0.1, 3.0 standard errors, 3 seeds', holds=True, decided=True)
    """
    errors = found["difference"] / found["error"] if found["error"] else float("inf") * found["difference"]
    by = f"by {found['difference']:.2g} ± {found['error']:.2g}"
    measured = f"{by}, {errors:.1f} standard errors, {found['seeds']:g} seed{'s' * (found['seeds'] != 1)}"
    return Check(claim, measured, counts(found), decided=counts({**found, "difference": abs(found["difference"])}))


def undecided_without_runs(claim: str) -> Check:
    """The sentence of a claim whose runs have not been made, or have not reached their last update."""
    return undecided_without("runs", claim)


def undecided_without(what: str, claim: str) -> Check:
    """The sentence of a claim for which runs or measurements are missing."""
    return Check(claim, f"no value: {what} {MISSING}", holds=False, decided=False)


def exceeds_if_run(claim: str, found: Found | None) -> Check:
    """Check that a difference is positive; undecided if runs are missing."""
    return undecided_without_runs(claim) if found is None else exceeds_over_seeds(claim, found)


def collapse_if_run(claim: str, found: Found | None, horizon: str) -> Check:
    """Check that a run ends below its start; a run that has not done so yet does not contradict it.

    Args:
        claim: the sentence.
        found: by how much the end is below the start.
        horizon: how long the runs are, and those of the paper.
    """
    judged = exceeds_if_run(claim, found)
    if judged.verdict != "contradicted":
        return judged
    return replace(judged, measured=f"{judged.measured}; {horizon}", decided=False)


def equal_over_seeds(claim: str, found: Found, margin: float) -> Check:
    """Check that a difference is within a margin, by two standard errors; undecided if that depends on them.

    Example:
        >>> equal_over_seeds("they agree", {"difference": 0.1, "error": 0.1, "seeds": 3}, margin=0.4)
        Check(claim='they agree', measured='0.1 ± 0.1, margin 0.4, 3 seeds', holds=True, decided=True)
    """
    return _below(claim, abs(found["difference"]), found, "margin", margin)


def below_if_run(claim: str, found: Found | None, limit: float) -> Check:
    """Check that a difference is below a limit, by two standard errors; else, or without runs, it is undecided.

    Example:
        >>> below_if_run("it costs little", {"difference": 0.1, "error": 0.1, "seeds": 3}, limit=0.4)
        Check(claim='it costs little', measured='0.1 ± 0.1, limit 0.4, 3 seeds', holds=True, decided=True)
    """
    return undecided_without_runs(claim) if found is None else _below(claim, found["difference"], found, "limit", limit)


def _below(claim: str, value: float, found: Found, word: str, limit: float) -> Check:
    error, enough = ENOUGH_ERRORS * found["error"], found["seeds"] >= ENOUGH_SEEDS
    below, above = enough and value + error < limit, enough and value - error > limit
    seeds = f"{found['seeds']:g} seed{'s' * (found['seeds'] != 1)}"
    measured = f"{found['difference']:.2g} ± {found['error']:.2g}, {word} {limit:.2g}, {seeds}"
    return Check(claim, measured, below, decided=below or above)


def at_update(rows: Iterable[Row], update: int) -> list[Row]:
    """The rows of one evaluation."""
    return [row for row in rows if int(row["update"]) == update]


def grouped(rows: Iterable[Row], name_of: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Rows by name, in their order."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[name_of(row)].append(row)
    return dict(found)


def by_setting(rows: Iterable[Row], name_of: Callable[[Row], str]) -> dict[str, list[Row]]:
    """The rows of one evaluation by setting.

    Raises:
        ExperimentError: a setting has two rows of one seed. Its mean would be one over runs that differ in something
            that its name does not have, such as the learning rate, and their number would be taken for one of seeds.
    """
    found = grouped(rows, name_of)
    for name, group in found.items():
        seed, number = Counter(row["seed"] for row in group).most_common(1)[0]
        if number > 1:
            raise ExperimentError(
                "one row for each setting, seed and update",
                f"{number} rows of the setting {name!r} with seed {seed}",
                "remove repeated runs from the file, or distinguish them in the study's name of a setting",
            )
    return found


def summaries(
    rows: Iterable[Row], columns: Sequence[str], name_of: Callable[[Row], str]
) -> dict[str, dict[str, Found]]:
    """`over_seeds` of several columns of one evaluation, by setting."""
    return {name: {c: over_seeds(group, c) for c in columns} for name, group in by_setting(rows, name_of).items()}


def paths(rows: Sequence[Row], column: str, name_of: Callable[[Row], str]) -> dict[str, dict[str, list[float]]]:
    """Mean and standard error of a column over updates, by setting."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"updates": [], "mean": [], "error": []})
    for update in sorted({int(row["update"]) for row in rows}):
        for name, group in by_setting(at_update(rows, update), name_of).items():
            here = over_seeds(group, column)
            found[name]["updates"].append(update)
            found[name]["mean"].append(here["mean"])
            found[name]["error"].append(here["error"])
    return dict(found)
