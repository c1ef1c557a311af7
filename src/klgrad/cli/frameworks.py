"""The frameworks in `klgrad audit`: settings by name, and recorded tables of those that are not installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..adapters import FRAMEWORKS
from ..adapters.defaults import DEFAULTS
from ..adapters.recorded import Recorded, recorded
from ..errors import NotAuditableError, UnknownNameError

if TYPE_CHECKING:
    from ..audit import Subject

HIDDEN = ("scale", "variance", "near ref")
"""Columns of a recorded table that a terminal has no room for; `docs/frameworks` has them."""


def framework_of(name: str) -> str:
    """The framework that a name is of: `trl`, or `trl rloo normalize_advantages=True`. Empty for other names."""
    first = name.split(" ")[0]
    return first if first in FRAMEWORKS else ""


def titles() -> dict[str, str]:
    """The heading of each framework's table, with the version that is audited."""
    return {name: framework.title for name, framework in FRAMEWORKS.items() if framework.version is not None}


def tags() -> dict[str, str]:
    """Words to show beside settings, by name: `default` beside the default of each framework."""
    return {default.subject: "default" for default in DEFAULTS.values()}


def settings_of(console: Console, names: Iterable[str], *, wanted: bool) -> list[Subject]:
    """The settings that these names mean: all those of a framework, or those with all words of the name.

    Args:
        console: where remarks on versions are printed.
        names: names of frameworks or of settings.
        wanted: whether a framework that cannot be audited is an error; it is a remark otherwise.

    Returns:
        The losses to audit.
    """
    found: list[Subject] = []
    for name in names:
        framework = FRAMEWORKS[framework_of(name)]
        try:
            every = {subject.name: subject for subject in framework.subjects()}
        except NotAuditableError as error:
            if wanted:
                raise
            console.print(str(error.received), style="yellow")
            continue
        if framework.remark:
            console.print(framework.remark, style="yellow")
        found += [every[each] for each in matching(name, list(every))]
    return found


def matching(name: str, settings: list[str]) -> list[str]:
    """The settings that a name means: the one of that name, or else all those that have all of its words."""
    name = " ".join(name.split())
    if name in settings:
        return [name]
    found = [each for each in settings if set(name.split(" ")) <= set(each.split(" "))]
    if not found:
        raise UnknownNameError(f"setting of {framework_of(name)}", name, settings)
    return found


def recorded_table(name: str) -> Group | None:
    """What the recorded audit says of a framework or setting; None if it can be audited here, or for other names."""
    known = _recorded(name)
    if known is None:
        return None
    return _dated(known, _table(known, matching(name, [row[0] for row in known.rows])))


def recorded_policy_losses(name: str) -> Group | None:
    """The same for the whole policy losses."""
    known = _recorded(name)
    if known is None or not known.policy_losses:
        return None
    from ..audit.whole.render import table_of

    shown = matching(name, [row[0] for row in known.policy_losses])
    return _dated(known, table_of([row for row in known.policy_losses if row[0] in shown]))


def _recorded(name: str) -> Recorded | None:
    framework = FRAMEWORKS.get(framework_of(name))
    return recorded(framework.name) if framework is not None and framework.version is None else None


def _dated(known: Recorded, table: RenderableType) -> Group:
    head = f"{known.framework} is not installed here: audited on {known.date} with version {known.version}."
    remedy = f"Install it to audit your own version: pip install {FRAMEWORKS[known.framework].distribution}"
    return Group(Text(head, style="bold"), table, "", Text(remedy, style="yellow"))


def _table(known: Recorded, shown: list[str]) -> Table:
    kept = [i for i, column in enumerate(known.columns) if column not in HIDDEN]
    table = Table(*(known.columns[i] for i in kept), box=None, padding=(0, 1), pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in known.rows:
        if row[0] in shown:
            tag = tags().get(row[0])
            table.add_row(f"{row[0]} ({tag})" if tag else row[0], *(row[i] for i in kept[1:]))
    return table
