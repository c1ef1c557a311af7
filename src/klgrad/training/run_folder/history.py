"""`history.jsonl`: one line of JSON for each update and each evaluation."""

import json
from pathlib import Path
from typing import Any

from ...support.atomic_files import finite, write_whole
from ..training_errors import RunError

FILE = "history.jsonl"
EVALUATION = frozenset({"sets", "domains", "kl", "length"})
"""Keys of every evaluation."""


class History:
    """The history of a run. A row has a `step`, and either training metrics or an `evaluation`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._held: list[dict[str, Any]] | None = None

    def append(self, row: dict[str, Any]) -> None:
        """Write one row."""
        if self._held is not None:
            self._held.append(row)
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")

    def hold(self) -> None:
        """Keep new rows in memory until `release`: until its first update a run may still fail and leave no trace."""
        self._held = []

    def release(self, step: int) -> None:
        """Delete rows after `step`, which will be computed again, and write the rows held in memory."""
        held, self._held = self._held or [], None
        if self.path.is_file():
            kept = [row for row in self.rows() if row["step"] <= step]
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        for row in held:
            self.append(row)

    def rows(self) -> list[dict[str, Any]]:
        """All rows in the file. An incomplete last line, as after a kill, is ignored; any other damage is an error."""
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
    except ValueError:  # includes UnicodeDecodeError
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
        "remove that line, or move the file away: the run continues without its history, but its summary then lacks "
        "the lost rows",
    )


def training(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of updates."""
    return [row for row in rows if "evaluation" not in row]


def in_updates(count: int) -> str:
    """A number of updates in words, such as "1 update"."""
    return f"{count} update{'s' * (count != 1)}"


def evaluations(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of evaluations."""
    return [row for row in rows if "evaluation" in row]


def kl_of(row: dict[str, Any], unit: str = "per_sequence") -> float | None:
    """KL(π‖ref) of an update's completions: the exact value if it was logged, else k3."""
    names = [f"kl/reverse/{kind}/{unit}" for kind in ("exact", "k3")]
    if unit == "per_sequence":
        names.append("rewards/kl_to_reference/mean")  # with the KL in the reward only this is logged
    return next((row[name] for name in names if row.get(name) is not None), None)


def length_of(row: dict[str, Any]) -> float | None:
    """Mean tokens per completion of an update."""
    return row.get("length/mean", row.get("completions/mean_length"))
