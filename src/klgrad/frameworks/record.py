"""What is on record of the frameworks: their audits, what has changed since, and what is to be reported to them.

The audits are one JSON file each in `records`, written by `make frameworks`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ..errors import NotAuditableError

if TYPE_CHECKING:
    from .framework import Framework

LOG_RATIOS = (-4.0, -2.0, -1.0, 1.0, 2.0, 4.0)
"""Where the pulls of two losses are compared."""


@dataclass(frozen=True)
class Pull:
    """How hard a loss pulls: what of its anatomy a conversion of β needs.

    Attributes:
        scale: the factor by which it multiplies β near ref, in its unit.
        unit: what it divides by, as `Unit.name`.
        mean_over_rows: whether it is a mean over the completions of the batch, and no sum.
        baseline: as `Baseline.name`.
        coefficients: what it puts on a token's score at `LOG_RATIOS`; None where that is not finite.
        cells: its divergence, horizon, samples and unit in words.
        refusal: why no β can be converted; empty if one can.
    """

    scale: float
    unit: str
    mean_over_rows: bool
    baseline: str
    coefficients: tuple[float | None, ...]
    cells: tuple[str, ...]
    refusal: str = ""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Pull:
        """The inverse of `asdict`, of data that were JSON."""
        tuples: dict[str, Any] = {name: tuple(data[name]) for name in ("coefficients", "cells")}
        return cls(**data | tuples)


SHOWN = ("looks ahead", "samples", "unit")
"""Parts that are told beside the divergence, in a line."""


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
        words: by name of the setting, what it descends on fresh and on stale samples.
        policy_losses: the cells of each whole policy loss, as `klgrad audit NAME --whole` shows them.
        pulls: by name of the setting, what `klgrad convert` needs of it.
        history: the version, the date and the cells of the default settings of each earlier version, oldest first.

    Example:
        >>> from klgrad.frameworks import recorded
        >>> recorded("trl").framework
        'trl'
    """

    framework: str
    version: str
    date: str
    columns: list[str]
    rows: list[list[str]]
    verdicts: dict[str, tuple[str, str, str | None]]
    words: dict[str, tuple[str, str]]
    policy_losses: list[list[str]] = field(default_factory=list)
    pulls: dict[str, Pull] = field(default_factory=dict)
    history: list[tuple[str, str, list[str]]] = field(default_factory=list)

    def row_of(self, setting: str) -> list[str] | None:
        """The cells of a setting, or None."""
        return next((row for row in self.rows if row[0] == setting), None)

    def parts_of(self, setting: str) -> str:
        """What a setting descends, in one line: the divergence, and the parts that a user chooses."""
        row = self.row_of(setting)
        assert row, f"{setting} is not in the record of {self.framework}"
        parts = dict(zip(self.columns, row, strict=True))
        return "; ".join([parts["divergence"], *(f"{part}: {parts[part]}" for part in SHOWN)])

    def history_before(self, version: str) -> list[tuple[str, str, list[str]]]:
        """The history of a record of another version, which this one then belongs to."""
        from . import DEFAULTS

        row = self.row_of(DEFAULTS[self.framework].subject)
        earlier = [(self.version, self.date, row)] if self.version != version and row else []
        return [entry for entry in self.history if entry[0] != version] + earlier

    def write(self, folder: Path) -> None:
        """Write it as FRAMEWORK.json."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / f"{self.framework}.json").write_text(f"{text}\n", encoding="utf-8")


def recorded(framework: str) -> Recorded | None:
    """The recorded audit of a framework, or None if there is none."""
    file = files("klgrad.frameworks") / "records" / f"{framework}.json"
    if not file.is_file():
        return None
    data = json.loads(file.read_text(encoding="utf-8"))
    for field_name in ("verdicts", "words"):
        data[field_name] = {name: tuple(values) for name, values in data[field_name].items()}
    data["pulls"] = {name: Pull.from_dict(pull) for name, pull in data["pulls"].items()}
    data["history"] = [tuple(entry) for entry in data["history"]]
    return Recorded(**data)


# What has changed since a framework was recorded: newer releases, and parts of its losses that differ.
#
# The package index is asked by `pip index versions`, so that the user's own configuration of pip is used.


@dataclass(frozen=True)
class PartChange:
    """One part of one setting that is not as it was recorded.

    Attributes:
        setting: its name.
        part: the heading of the column; `setting` where the setting itself is new or gone.
        was: the recorded cell; empty for a new setting.
        now: the cell of this audit; empty for one that is gone.
    """

    setting: str
    part: str
    was: str
    now: str


@dataclass(frozen=True)
class VersionDrift:
    """One framework against its record.

    Attributes:
        framework: its name.
        recorded: the version of the record, or None without one.
        date: when it was recorded.
        newest: the newest release on the package index, of any version of Python; None if it is on none.
        installed: the version that is installed here, or None.
        audited: whether the installed code was audited and compared.
        differences: what that showed.
        failure: why it could not be audited; empty if it could, or was not.
    """

    framework: str
    recorded: str | None
    date: str
    newest: str | None
    installed: str | None
    audited: bool = False
    differences: list[PartChange] = field(default_factory=list)
    failure: str = ""

    @classmethod
    def of(cls, framework: Framework, known: Recorded | None) -> VersionDrift:
        """The versions alone, without asking the index."""
        recorded, date = (known.version, known.date) if known else (None, "")
        return cls(framework.name, recorded, date, None, None if framework.transcribed else framework.installed)

    @property
    def has_newer(self) -> bool:
        """Whether the index has a later release than the record."""
        return None not in (self.newest, self.recorded) and Version(self.newest or "") > Version(self.recorded or "")

    @property
    def has_changed(self) -> bool:
        """Whether anything calls for a look."""
        return self.has_newer or bool(self.differences or self.failure)


def newest_release(distribution: str) -> str | None:
    """The newest release of a package on the index, of any version of Python; None if there is none."""
    call = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "--ignore-requires-python"]
    done = subprocess.run([*call, distribution], capture_output=True, text=True, check=False)
    first = re.match(r"\S+ \((\S+)\)", done.stdout)
    return first[1] if first else None


def check(framework: Framework, known: Recorded | None) -> VersionDrift:
    """Ask the index, and audit what is installed here in another version than the recorded one."""
    # What is transcribed has the name of a repository in place of a package.
    newest = None if "/" in framework.distribution else newest_release(framework.distribution)
    drift = replace(VersionDrift.of(framework, known), newest=newest)
    if known is None or drift.installed in (None, known.version):
        return drift
    return audit_again(framework, known, drift)


def audit_again(framework: Framework, known: Recorded, drift: VersionDrift) -> VersionDrift:
    """Audit the installed code, and compare it with the record by part."""
    from ..audit import audit
    from ..audit.terminal import cells_of

    try:
        rows = [list(cells_of(audit(subject))) for subject in framework.subjects()]
    except NotAuditableError as error:
        return replace(drift, failure=str(error.received))
    except Exception as error:  # a release may have renamed anything that our module calls
        return replace(drift, failure=f"{type(error).__name__}: {error}")
    return replace(drift, audited=True, differences=compare(known, rows))


def compare(known: Recorded, rows: list[list[str]]) -> list[PartChange]:
    """The cells in which an audit differs from the recorded one."""
    was, now = ({row[0]: row for row in each} for each in (known.rows, rows))
    changes = [PartChange(name, "setting", name, "") for name in was if name not in now]
    changes += [PartChange(name, "setting", "", name) for name in now if name not in was]
    for name in was:
        cells = zip(known.columns[1:], was[name][1:], now.get(name, was[name])[1:], strict=True)
        changes += [PartChange(name, part, old, new) for part, old, new in cells if old != new]
    return changes


# What was found in other projects, as texts for their issue trackers: one Markdown file each in `findings`, whose name
# is FRAMEWORK.FINDING.md.
#
# A text says what is declared, what happens, and why, with the smallest patch. Its first block is a program that needs
# the project alone and runs the project's own functions, and its second block what the program prints.


@dataclass(frozen=True)
class FrameworkReport:
    """One text.

    Attributes:
        framework: the project.
        name: of the finding, in one or two words.
        text: the Markdown.
    """

    framework: str
    name: str
    text: str

    @property
    def title(self) -> str:
        """The heading, without its mark."""
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def program(self) -> str:
        """The reproduction."""
        return self._block("python")

    @property
    def printed(self) -> str:
        """What the reproduction prints."""
        return self._block("text")

    def _block(self, language: str) -> str:
        block = re.search(rf"^```{language}\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)
        return block[1] if block else ""


def findings() -> list[FrameworkReport]:
    """All of them, by framework and name."""
    texts = [file for file in (files("klgrad.frameworks") / "findings").iterdir() if file.name.endswith(".md")]
    reports = []
    for file in sorted(texts, key=lambda file: file.name):
        framework, name, _ = file.name.split(".")
        reports.append(FrameworkReport(framework, name, file.read_text(encoding="utf-8")))
    return reports
