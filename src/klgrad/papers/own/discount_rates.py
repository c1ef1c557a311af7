"""The sweep of learning rates behind `discount`: one seed, so that no sentence is judged by it."""

from collections.abc import Iterable

from ..distillation_runs import LAST, OWN, RIGHT, TEACHERS, finite_rows, nearest
from ..recorded_runs import Row, at_update
from ..study import Experiment, Numbers, Settings

SWEEP = Experiment("discount_sweep.csv", "exp_discount.py", ("sweep",))
SHOWN = (OWN, f"{OWN}_se", TEACHERS, RIGHT, "entropy_per_token", "distinct")


def rates_of(settings: Settings) -> tuple[list[Numbers], list[Row]]:
    """Every run of the sweep after its last update, and all its rows; both empty if the sweep has not been run."""
    try:
        rows = finite_rows(SWEEP, settings)
    except FileNotFoundError:
        return [], []
    best = best_rates(rows)
    return [_run(row, best[arm_of(row)] == row["learning_rate"]) for row in at_update(rows, LAST)], rows


def best_rates(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """The rate at which each size of a batch and arm ends nearest, by the KL on the student's completions."""
    return {name: row["learning_rate"] for name, row in nearest(at_update(rows, LAST), arm_of).items()}


def arm_of(row: Row) -> tuple[str, str]:
    """Size of the batch, and arm."""
    return row["completions"], row["arm"]


def _run(row: Row, best: bool) -> Numbers:
    """One run, and whether its rate is the best of its arm by the KL on the student's completions."""
    label = {name: row[name] for name in ("completions", "arm", "learning_rate")}
    return {**label, **{name: float(row[name]) for name in SHOWN}, "best": best}
