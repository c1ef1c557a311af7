"""What a module of a framework says: its losses, its defaults, its advice, how its runs are read; and its record.

Nothing here needs torch.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NotAuditableError
from .conversion import Pull
from .recommendation import Home, Meaning, SettingLines
from .run_settings import Reader

if TYPE_CHECKING:
    from ..audit import Subject


@dataclass(frozen=True)
class Source:
    """Where a formula was read.

    Attributes:
        repository: on GitHub.
        version: the release.
        files: the files of that release that have the formula and its defaults.
    """

    repository: str
    version: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Default:
    """The default settings of a framework, with a KL.

    Attributes:
        settings: the defaults in words.
        subject: the name of the audited loss that has these settings; its recorded audit says what it descends.
    """

    settings: str
    subject: str


@dataclass(frozen=True)
class Framework:
    """One framework; its module has it as `FRAMEWORK`.

    Attributes:
        name: its name on the command line.
        distribution: the name of its installed package, or the repository of its source.
        tested: the version that was audited.
        losses: makes every setting that affects the KL, as a loss to audit.
        default: its default settings.
        whole_losses: makes its policy losses; None if there are none yet.
        settings: the settings for each divergence and level, where one has that meaning; empty without advice.
        home: where a term of one's own goes; None without advice.
        reader: how the files of its runs are read; None if they are not.
        source: where the formulae were read, if they are transcribed and its own code is not audited.
        caveats: where its defaults do another thing than their names or its documentation say, a sentence each.
    """

    name: str
    distribution: str
    tested: str
    losses: "Callable[[], list[Subject]]"
    default: Default
    whole_losses: "Callable[[], list[Subject]] | None" = None
    settings: dict[Meaning, SettingLines] = field(default_factory=dict)
    home: Home | None = None
    reader: Reader | None = None
    source: Source | None = None
    caveats: tuple[str, ...] = ()

    @property
    def transcribed(self) -> bool:
        """Whether formulae written again from its source are audited, and not its own code."""
        return self.source is not None

    @property
    def version(self) -> str | None:
        """The version that an audit here is of: the transcribed one, or the installed one, or None."""
        return self.tested if self.transcribed else self.installed

    @property
    def title(self) -> str:
        """Its name and the version that an audit here is of, and whether that is its own code."""
        transcribed = f": formulae transcribed from {self.distribution}, not its own code"
        return f"{self.name} {self.version}{transcribed if self.transcribed else ''}"

    @property
    def installed(self) -> str | None:
        """The installed version, or None."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    @property
    def remark(self) -> str:
        """One line if the framework is missing or its version is not the tested one; empty otherwise."""
        if self.transcribed:
            return ""
        if self.installed is None:
            return f"{self.name} is not installed: pip install '{self.distribution}=={self.tested}'"
        if self.installed != self.tested:
            return f"{self.name} {self.installed} is not the tested version ({self.tested}); it is audited anyway"
        return ""

    def subjects(self) -> "list[Subject]":
        """Every setting that affects the KL, as losses to audit."""
        return self.losses() if self.transcribed else self._of_its_code(self.losses)

    def policy_losses(self) -> "list[Subject]":
        """The whole policy losses of the framework, as losses to audit with `--whole`."""
        if self.whole_losses is None:
            from . import FRAMEWORKS

            known = ", ".join(name for name, framework in FRAMEWORKS.items() if framework.whole_losses)
            raise NotAuditableError(
                "a framework whose policy losses can be audited", self.name, f"use one of: {known}; or a file:function"
            )
        return self._of_its_code(self.whole_losses)

    def _of_its_code(self, make: "Callable[[], list[Subject]]") -> "list[Subject]":
        if self.installed is None:
            raise NotAuditableError(
                f"{self.name} to be installed", self.remark, "install it in the environment of klgrad"
            )
        try:
            return make()
        except ImportError as error:
            raise NotAuditableError(
                f"{self.name} {self.installed} to import",
                f"{self.name} {self.installed} cannot be imported here: {error}",
                "install its missing dependency, or run the audit in an environment where it imports",
            ) from error


# Audits of the frameworks as they were when they were last made: one JSON file each, written by `make frameworks`.


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
