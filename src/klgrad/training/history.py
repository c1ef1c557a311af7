"""What happened at which step: one line of JSON each, appended as it happens."""

import json
from pathlib import Path
from typing import Any

from ..support.atomic_files import finite, write_whole
from .training_errors import RunError

FILE = "history.jsonl"
EVALUATION = frozenset({"sets", "domains", "kl", "length"})
"""What every evaluation has."""


class History:
    """A run's `history.jsonl`. Rows have a `step`, and either training metrics or an `evaluation`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._held: list[dict[str, Any]] | None = None

    def append(self, row: dict[str, Any]) -> None:
        """One line, whole even if the process is killed right after."""
        if self._held is not None:
            self._held.append(row)
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")

    def hold(self) -> None:
        """Keep new rows in memory until `release`: before its first update a run may still prove impossible."""
        self._held = []

    def release(self, step: int) -> None:
        """Forget what came after a step, because it happens again, and write the rows that were held."""
        held, self._held = self._held or [], None
        if self.path.is_file():
            kept = [row for row in self.rows() if row["step"] <= step]
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        for row in held:
            self.append(row)

    def rows(self) -> list[dict[str, Any]]:
        """All lines in the file. A last one that was cut off by a kill is left out; damage before it is an error."""
        if not self.path.is_file():
            return []
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError as error:
            raise _damaged(self.path, str(error.strerror)) from error
        found = []
        for number, line in enumerate(lines, 1):
            row = _row(line)
            if row is not None:
                found.append(row)
            elif number < len(lines) and line.strip():
                raise _damaged(self.path, f"line {number} is not a row of a history in JSON and UTF-8")
        return found


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError:  # of which UnicodeDecodeError is one
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    evaluation = row.get("evaluation", {})
    known = "evaluation" not in row or (isinstance(evaluation, dict) and evaluation.keys() >= EVALUATION)
    return row if known else None


def _damaged(path: Path, what: str) -> RunError:
    return RunError(
        "a history that can be read",
        f"{path}: {what}",
        "remove that line, or move the file away: a run goes on without its history, but its summary then lacks what "
        "the lost rows said",
    )


def training(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of updates."""
    return [row for row in rows if "evaluation" not in row]


def evaluations(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of evaluations."""
    return [row for row in rows if "evaluation" in row]


KL_UNITS = ("per_sequence", "per_token")


def kl_of(row: dict[str, Any], unit: str = "per_sequence") -> float | None:
    """KL(π‖ref) of an update's completions, by the best estimator that was logged."""
    names = [f"kl/reverse/{kind}/{unit}" for kind in ("exact", "k3")]
    if unit == "per_sequence":
        names.append("rewards/kl_to_reference/mean")  # all that is logged of a KL in the reward
    return next((row[name] for name in names if row.get(name) is not None), None)
