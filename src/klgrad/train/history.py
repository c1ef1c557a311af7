"""What happened at which step: one line of JSON each, appended as it happens."""

import json
from pathlib import Path
from typing import Any

from ..files import finite, write_whole

FILE = "history.jsonl"


class History:
    """A run's `history.jsonl`. Rows have a `step`, and either training metrics or an `evaluation`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def append(self, row: dict[str, Any]) -> None:
        """One line, whole even if the process is killed right after."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All lines; one that was cut off by a kill is left out."""
        if not self.path.is_file():
            return []
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                found.append(row)
        return found

    def cut(self, step: int) -> None:
        """Forget what came after a step, because it will happen again."""
        kept = [row for row in self.rows() if row["step"] <= step]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def clear(self) -> None:
        """Begin anew."""
        self.path.unlink(missing_ok=True)


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
