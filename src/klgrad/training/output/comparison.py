"""Compare runs from their folders: a table and a figure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..run_folder import record
from ..run_folder.history import History
from ..training_errors import RunError
from .figures import Drawn, drawn
from .summary import estimate, score, summarise


@dataclass(frozen=True)
class Compared:
    """One run: its name, `run.json`, history and summary."""

    name: str
    run: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]


def load(folders: list[Path]) -> list[Compared]:
    """Read the runs, finished or not."""
    names = _names(folders)
    found = []
    for folder, name in zip(folders, names, strict=True):
        run, rows = record.read(folder, record.RUN), History(folder).rows()
        if not rows:
            raise RunError("a run with a history", f"{folder} without one", "train it for at least one update")
        found.append(Compared(name, run, rows, summarise(folder)))
    return found


def picture(runs: list[Compared], kind: str = "png") -> bytes:
    """One figure of all runs, as `png`, `svg` or `pdf`."""
    return drawn([Drawn(run.name, run.rows) for run in runs], kind)[0]


def table(runs: list[Compared]) -> Table:
    """A table with one row per run."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, title in enumerate(
        ("run", "maximises", "updates", "in-domain", "out-of-domain", "KL per completion", "length")
    ):
        found.add_column(title, justify="left" if i < 2 else "right", no_wrap=i > 1, overflow="fold")
    for run in runs:
        named = Text(run.name), Text(_objective(run.run))  # `Text`: [x] in a name is not markup
        found.add_row(*named, str(run.summary["updates"]), *_results(run.summary))
    return found


def _objective(run: dict[str, Any]) -> str:
    objective = run.get("objective")
    return str(objective.get("objective", "")) if isinstance(objective, dict) else ""


def _results(summary: dict[str, Any]) -> list[str]:
    """Rewards in and out of the domain, KL, length: before and after, or only after if the start is lost."""
    before, after = summary["before"], summary["after"]
    if after is None:
        return ["", "", f"{summary['last_updates']['kl_per_sequence'] or 0:.4g}", ""]
    first = before or {"domains": {}, "kl": None, "length": None}
    moved = [_moved(first["domains"].get(d), after["domains"].get(d)) for d in ("in", "out")]
    kl = "" if after["kl"] is None else estimate(after["kl"]["per_sequence"])
    if kl and first["kl"] is not None:
        kl = f"{first['kl']['per_sequence']['mean'] or 0:.3g} -> {kl}"
    length = f"{after['length']:.1f}"
    return [*moved, kl, length if first["length"] is None else f"{first['length']:.1f} -> {length}"]


def _moved(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    return score(after) if before is None else f"{before['reward']:.3f} -> {score(after)}"


def _names(folders: list[Path]) -> list[str]:
    """The folders' names, with as many parent folders as make them distinct."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise RunError("different runs", "the same folder twice", "name each folder once")
    depth = 1
    while len({p[-depth:] for p in parts}) < len(parts):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]
