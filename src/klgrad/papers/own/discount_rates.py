"""The sweep of learning rates of `discount`, with one seed: it chooses the rate at which each arm is judged."""

from collections.abc import Iterable

from ..distillation_runs import LAST, OWN, RIGHT, TEACHERS, nearest
from ..recorded_runs import Row, at_update
from ..study import Experiment, Numbers

SWEEP = Experiment("discount_sweep.csv", "exp_discount.py", ("sweep",))
SHOWN = (OWN, f"{OWN}_se", TEACHERS, RIGHT, "entropy_per_token", "distinct")


def at_all_rates(rows: Iterable[Row]) -> list[Numbers]:
    """Every run of the sweep after its last update."""
    last = at_update(rows, LAST)
    best = best_rates(last)
    return [_run(row, best.get(arm_of(row)) == rate_of(row)) for row in last]


def best_rates(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """The rate at which each size of a batch and arm ends nearest, by the KL on the student's completions."""
    return {name: rate_of(row) for name, row in nearest(at_update(rows, LAST), arm_of).items()}


def rate_of(row: Row) -> float:
    """The learning rate as a number: a file may have 0.0001 or 1e-4."""
    return float(row["learning_rate"])


def arm_of(row: Row) -> tuple[str, str]:
    """Size of the batch, and arm."""
    return row["completions"], row["arm"]


def _run(row: Row, best: bool) -> Numbers:
    """One run, and whether its rate is the best of its arm by the KL on the student's completions."""
    label = {name: row[name] for name in ("completions", "arm", "learning_rate")}
    return {**label, **{name: float(row[name]) for name in SHOWN}, "best": best}
