"""The settings and code to write in each framework, for the HTML page of an audit."""

from collections.abc import Sequence

from ..adapters.own_code import HOMES, code
from ..adapters.recommendation import SETTINGS, TARGET_OF, Meaning, expresses
from ..audit import Subject
from ..audit.render.fixes import Fix, Fixes

MEANINGS: tuple[Meaning, ...] = (("reverse", "token"), ("reverse", "sequence"), ("forward", "token"))
"""The meanings with a panel on the page."""


def fixes_for(subjects: Sequence[Subject]) -> Fixes:
    """The settings and code for every framework among the subjects that there is advice for."""
    names = dict.fromkeys(subject.framework for subject in subjects)
    return {name: fixes_of(name) for name in names if name in SETTINGS}


def fixes_of(framework: str) -> list[Fix]:
    """A framework's settings by meaning; for the reverse KLs also code, if no setting is correct on all problems."""
    found = []
    for meaning in MEANINGS:
        setting, target = SETTINGS[framework].get(meaning), TARGET_OF[meaning]
        if setting is not None:
            found.append(Fix(target, setting.lines, *setting.descends, subject=setting.subject, note=setting.note))
        if meaning[0] == "reverse" and (setting is None or not expresses(setting, meaning, off_policy=False)):
            lines, place = code(framework, meaning, off_policy=False), HOMES[framework].place
            found.append(Fix(target, lines, target, "unknown", place=place))
    return found
