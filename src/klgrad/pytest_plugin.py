"""The plug-in of pytest, which finds it by the entry point `klgrad`; `-p no:klgrad` turns it off.

pytest imports it in every session of an environment that has klgrad, so it imports nothing but pytest: a fixture
imports torch when a test asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from .audit import AuditResult


@pytest.fixture(scope="session")
def assert_descends() -> Callable[..., AuditResult]:
    """Fail if a loss does not descend the target that it should: `assert_descends(loss, "reverse-kl-token")`."""
    from .testing import assert_descends

    return assert_descends
