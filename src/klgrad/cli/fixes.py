"""A framework's advice as the page of an audit shows it."""

from collections.abc import Sequence

from ..adapters import FRAMEWORKS
from ..adapters.defaults import DEFAULTS
from ..adapters.recommendation import SETTINGS, WHERE, Meaning, code, expresses
from ..audit import Subject
from ..audit.render.remedy import Fix, Fixes

MEANINGS: tuple[Meaning, ...] = (("reverse", "token"), ("reverse", "sequence"), ("forward", "token"))

TAGS = {default.subject: "default" for default in DEFAULTS.values()}
"""Settings that are what a framework does as it stands."""


def fixes_for(subjects: Sequence[Subject]) -> Fixes:
    """Of every framework among them."""
    names = dict.fromkeys(s.name.split(" ")[0] for s in subjects if s.kind == "framework")
    return {name: fixes_of(name) for name in names if name in FRAMEWORKS}


def fixes_of(framework: str) -> list[Fix]:
    """Its settings; for the reverse KLs, the code where no setting says it on all problems."""
    found = []
    for meaning in MEANINGS:
        setting = SETTINGS[framework].get(meaning)
        target = "-kl-".join(meaning)
        if setting is not None:
            lines, descends = setting.lines, setting.descends
            found.append(Fix(target, lines, *descends, subject=setting.subject, note=setting.note))
        if meaning[0] == "reverse" and (setting is None or not expresses(setting, meaning, off_policy=False)):
            found.append(Fix(target, code(meaning, off_policy=False), target, "unknown", place=WHERE[framework]))
    return found
