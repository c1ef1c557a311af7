"""The sweep of learning rates behind `discount`: one seed, so that no sentence is judged by it."""

from ..distillation_runs import LAST, OWN, RIGHT, TEACHERS, finite_rows
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
    last = at_update(rows, LAST)
    nearest = {id(min(group, key=_own)) for group in _by_arm(last)}
    return [_run(row, id(row) in nearest) for row in last], rows


def _by_arm(rows: list[Row]) -> list[list[Row]]:
    """The runs of each arm and size of a batch, which differ in their rates."""
    names = [(row["completions"], row["arm"]) for row in rows]
    return [[row for row, each in zip(rows, names, strict=True) if each == name] for name in dict.fromkeys(names)]


def _own(row: Row) -> float:
    return float(row[OWN])


def _run(row: Row, best: bool) -> Numbers:
    """One run, and whether its rate is the best of its arm by the KL on the student's completions."""
    label = {name: row[name] for name in ("completions", "arm", "learning_rate")}
    return {**label, **{name: float(row[name]) for name in SHOWN}, "best": best}
