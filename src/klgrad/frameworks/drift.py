"""What has changed since a framework was recorded: newer releases, and parts of its losses that differ.

The package index is asked by `pip index versions`, so that the user's own configuration of pip is used.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from packaging.version import Version

from ..errors import NotAuditableError

if TYPE_CHECKING:
    from .framework import Framework, Recorded


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
    installed = None if framework.transcribed else framework.installed
    # What is transcribed has the name of a repository in place of a package.
    newest = None if "/" in framework.distribution else newest_release(framework.distribution)
    recorded, date = (known.version, known.date) if known else (None, "")
    drift = VersionDrift(framework.name, recorded, date, newest, installed)
    if known is None or installed in (None, known.version):
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
    found = [PartChange(name, "setting", name, "") for name in was if name not in now]
    found += [PartChange(name, "setting", "", name) for name in now if name not in was]
    for name in was:
        cells = zip(known.columns[1:], was[name][1:], now.get(name, was[name])[1:], strict=True)
        found += [PartChange(name, part, old, new) for part, old, new in cells if old != new]
    return found
