"""The versions of TRL that this package was written for, and the error for a TRL that differs."""

import trl
from packaging.version import Version

from ...errors import KlgradError

FIRST, END = (1, 16), (1, 17)
"""Tested from the first and below the second; `pyproject.toml` claims the same."""
WINDOW = f"trl>={FIRST[0]}.{FIRST[1]},<{END[0]}.{END[1]}"


class ContractError(KlgradError, RuntimeError):
    """The installed TRL is not one that the trainer can rely on: the KL might be left out or changed."""

    def __init__(self, expected: str, received: str, remedy: str | None = None) -> None:
        install = f"install the TRL that klgrad is tested with: pip install '{WINDOW}'"
        super().__init__(expected, received, remedy or install)


def check_version() -> None:
    """Refuse a version of TRL outside the window."""
    if not FIRST <= Version(trl.__version__).release[:2] < END:  # a pre-release counts as its release
        raise ContractError(f"TRL in the range {WINDOW}", f"TRL {trl.__version__}")
