"""Audits of the frameworks as they were when they were last made: one JSON file each, written by `make frameworks`."""

import json
from dataclasses import asdict, dataclass, field
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
        rows: the cells of each setting, in words; the first is its name.
        verdicts: by name of the setting, its verdict on fresh and on stale samples, and where the first holds.
        policy_losses: the cells of each whole policy loss, as `klgrad audit NAME --whole` shows them.

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
    verdicts: dict[str, tuple[str, str, str | None]]
    policy_losses: list[list[str]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write it as FRAMEWORK.json."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / f"{self.framework}.json").write_text(f"{text}\n", encoding="utf-8")


def recorded(framework: str) -> Recorded | None:
    """The recorded audit of a framework, or None if there is none."""
    file = files(__name__) / f"{framework}.json"
    if not file.is_file():
        return None
    data = json.loads(file.read_text(encoding="utf-8"))
    return Recorded(**data | {"verdicts": {name: tuple(found) for name, found in data["verdicts"].items()}})
