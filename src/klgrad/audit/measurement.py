"""The gradient of a loss on one case."""

from typing import NamedTuple

from .gradient import Gradient
from .problems import Case

Shape = tuple[int, int, bool, int | None]
"""(rows, columns, whether lengths vary, parts of a large batch)."""


class Measurement(NamedTuple):
    """The exact gradient of a loss on one case."""

    case: Case
    gradient: Gradient
