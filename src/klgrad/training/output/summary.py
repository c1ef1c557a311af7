"""The results of a run, as data and as a table."""

import math
from pathlib import Path
from typing import Any

from rich.table import Table

from ..run_folder.history import History, evaluations, kl_of, length_of, training


def summarise(folder: Path) -> dict[str, Any]:
    """Read the history: evaluations before and after, and means over the last tenth of the updates."""
    rows = History(folder).rows()
    trained, evaluated = training(rows), evaluations(rows)
    last = trained[-max(1, len(trained) // 10) :]
    first = evaluated[0] if evaluated and evaluated[0]["step"] == 0 else None  # its beginning may be lost
    return {
        "updates": max((row["step"] for row in rows), default=0),
        "before": first["evaluation"] if first else None,
        "after": evaluated[-1]["evaluation"] if evaluated else None,
        "after_updates": evaluated[-1]["step"] if evaluated else None,
        "last_updates": {
            "count": len(last),
            "task_reward": _mean([row.get("task_reward") for row in last]),
            "kl_per_sequence": _mean([kl_of(row) for row in last]),
            "kl_per_token": _mean([kl_of(row, "per_token") for row in last]),
            "length": _mean([length_of(row) for row in last]),
            "coefficient": _mean([row.get("kl/coef") for row in last]),
        },
    }


def table_of(summary: dict[str, Any]) -> Table:
    """Before and after, task by task; a column is empty if there was no evaluation then."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("held out")
    columns = [summary["before"], summary["after"]]
    for title in ("before", f"after {summary['after_updates']} updates"):
        table.add_column(title, justify="right")
    if summary["after"] is None:
        return table
    for name, row in summary["after"]["sets"].items():
        domain = "in-domain" if row["domain"] == "in" else "out-of-domain"
        scores = [score(each["sets"].get(name)) if each else "" for each in columns]
        table.add_row(f"{name} ({domain}, {row['count']})", *scores)
    for unit, title in (("per_token", "KL, nats per token"), ("per_sequence", "KL, nats per completion")):
        if all(each is None or each["kl"] is not None for each in columns):  # greedy completions have none
            table.add_row(title, *(estimate(each["kl"][unit]) if each else "" for each in columns))
    table.add_row("tokens per completion", *(f"{each['length']:.1f}" if each else "" for each in columns))
    return table


def score(row: dict[str, Any] | None) -> str:
    """A mean reward, with its standard error unless there was only one prompt."""
    if row is None:
        return ""
    error = row["standard_error"]
    return f"{row['reward']:.3f}" + ("" if error is None or math.isnan(error) else f" ± {error:.3f}")


def estimate(row: dict[str, Any]) -> str:
    """A KL with its standard error; the history has None for a number that was not finite."""
    if row["mean"] is None:
        return "not finite"
    error = row["standard_error"]
    return f"{row['mean']:.3g}" + ("" if error is None else f" ± {error:.2g}")


def _mean(values: list[float | None]) -> float | None:
    found = [x for x in values if x is not None]
    return sum(found) / len(found) if found else None
