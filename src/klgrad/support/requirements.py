"""What this package needs, by its own metadata, and what is installed.

`packaging`, which reads requirements in full, is not a dependency; those of this package are of the form
`name>=1.2,<2; extra == "x"`.
"""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from operator import ge, lt

LINE = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,]*\])?(?P<range>[^;]*)(?:;\s*extra\s*==\s*['\"](?P<extra>[\w-]+)['\"])?")
BOUND = re.compile(r"(>=|<)\s*([\d.]+)")
COMPARE = {">=": ge, "<": lt}


@dataclass(frozen=True)
class Requirement:
    """One package that is needed.

    Attributes:
        name: of the package.
        range: the versions that will do, such as `>=1.16,<1.17`; empty for any.
        extra: the extra that needs it; empty if every installation does.

    Example:
        >>> from klgrad.support.requirements import parse
        >>> needed = parse("trl<1.17,>=1.16; extra == 'train'")
        >>> needed.name, needed.extra, needed.allows("1.16.2"), needed.allows("1.17.0")
        ('trl', 'train', True, False)
    """

    name: str
    range: str = ""
    extra: str = ""

    @property
    def installed(self) -> str | None:
        """The installed version, or None."""
        try:
            return version(self.name)
        except PackageNotFoundError:
            return None

    @property
    def is_met(self) -> bool:
        """Whether a version that will do is installed."""
        return self.installed is not None and self.allows(self.installed)

    def allows(self, found: str) -> bool:
        """Whether a version will do; a pre-release or a local version such as `2.6.0+cpu` counts as its release."""
        return all(COMPARE[sign](_release(found), _release(bound)) for sign, bound in BOUND.findall(self.range))


def _release(text: str) -> tuple[int, ...]:
    numbers = [int(n) for n in re.sub(r"[^\d.].*", "", text).split(".") if n]
    return (*numbers, *(0,) * (4 - len(numbers)))


def parse(line: str) -> Requirement:
    """Read a line of the metadata."""
    found = LINE.match(line)
    assert found is not None, line
    return Requirement(found["name"], found["range"].strip(), found["extra"] or "")


def requirements() -> list[Requirement]:
    """What this package needs, without the extra for its development; empty if it is not installed."""
    try:
        lines = requires("klgrad") or []
    except PackageNotFoundError:  # run from a checkout that is only on the path
        return []
    return [needed for needed in map(parse, lines) if needed.extra != "dev"]
