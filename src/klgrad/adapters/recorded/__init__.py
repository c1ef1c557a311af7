"""Audits of the frameworks as they were when they were last made: one JSON file each, written by `make frameworks`."""

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class Recorded:
    """The audit of one framework.

    Attributes:
        framework: its name.
        version: the version that was audited.
        date: when, as YYYY-MM-DD.
        columns: the headings of the table.
        rows: the cells of each setting; the first is its name.

    Example:
        >>> from klgrad.adapters.recorded import recorded
        >>> recorded("trl").framework
        'trl'
    """

    framework: str
    version: str
    date: str
    columns: list[str]
    rows: list[list[str]]

    def write(self, folder: Path) -> None:
        """Write it as FRAMEWORK.json."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / f"{self.framework}.json").write_text(f"{text}\n", encoding="utf-8")


def recorded(framework: str) -> Recorded | None:
    """The recorded audit of a framework, or None if there is none."""
    file = files(__name__) / f"{framework}.json"
    return Recorded(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
