"""What came of a run, for programs and as a table."""

import math
from pathlib import Path
from typing import Any

from rich.table import Table

from .history import History, evaluations, kl_of, training


def summarise(folder: Path) -> dict[str, Any]:
    """From the history: before and after, and the last updates' means."""
    rows = History(folder).rows()
    trained, evaluated = training(rows), evaluations(rows)
    last = trained[-max(1, len(trained) // 10) :]
    return {
        "updates": trained[-1]["step"] if trained else 0,
        "before": evaluated[0]["evaluation"] if evaluated else None,
        "after": evaluated[-1]["evaluation"] if evaluated else None,
        "after_updates": evaluated[-1]["step"] if evaluated else None,
        "last_updates": {
            "count": len(last),
            "task_reward": _mean([row.get("task_reward") for row in last]),
            "kl_per_sequence": _mean([kl_of(row) for row in last]),
            "kl_per_token": _mean([kl_of(row, "per_token") for row in last]),
            "length": _mean([row.get("length/mean", row.get("completions/mean_length")) for row in last]),
            "coefficient": _mean([row.get("kl/coef") for row in last]),
        },
    }


def table_of(summary: dict[str, Any]) -> Table:
    """Before and after, task by task."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("held out")
    before, after = summary["before"], summary["after"]
    for title in ("before", f"after {summary['after_updates']} updates"):
        table.add_column(title, justify="right")
    if before is None:
        return table
    for name, row in before["sets"].items():
        domain = "in-domain" if row["domain"] == "in" else "out-of-domain"
        table.add_row(f"{name} ({domain}, {row['count']})", score(row), score(after["sets"].get(name)))
    for unit, spoken in (("per_token", "KL, nats per token"), ("per_sequence", "KL, nats per completion")):
        if before["kl"] is not None and after["kl"] is not None:  # there is none of greedy completions
            table.add_row(spoken, estimate(before["kl"][unit]), estimate(after["kl"][unit]))
    table.add_row("tokens per completion", f"{before['length']:.1f}", f"{after['length']:.1f}")
    return table


def score(row: dict[str, Any] | None) -> str:
    """A mean reward with its standard error, if it has one: the mean over one prompt does not."""
    if row is None:
        return ""
    error = row["standard_error"]
    return f"{row['reward']:.3f}" + ("" if error is None or math.isnan(error) else f" ± {error:.3f}")


def estimate(row: dict[str, Any]) -> str:
    """A KL with its standard error; None is a number that was not finite."""
    if row["mean"] is None:
        return "not finite"
    error = row["standard_error"]
    return f"{row['mean']:.3g}" + ("" if error is None else f" ± {error:.2g}")


def _mean(values: list[float | None]) -> float | None:
    found = [x for x in values if x is not None]
    return sum(found) / len(found) if found else None
