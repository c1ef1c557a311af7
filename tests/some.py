"""Cases of which `make test` runs some; the others are marked `many`, and run by `make test-many` and CI."""

from collections.abc import Container, Iterable

import pytest


def first(cases: Iterable, kept: int | Container) -> list:
    """The cases as parameters; all but the first `kept`, or but those in `kept`, are marked `many`."""
    cases = list(cases)
    kept = cases[:kept] if isinstance(kept, int) else kept
    return [case if case in kept else pytest.param(case, marks=pytest.mark.many) for case in cases]
