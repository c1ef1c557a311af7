"""Whether the declared KL is active in this process, and in every worker of a run.

verl logs a plug-in that fails to load at debug level and goes on. A run that declares a KL has to stop instead.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from ..errors import ActivationError
from .declaration import Declaration
from .loss import KLLoss

PLUGIN = "klgrad.verl.plugin"
"""The module that only verl imports."""

Status = dict[str, Any]
"""What a worker reports of itself."""


def status(loss: object) -> Status:
    """What this process has: the version, whether verl loaded the plug-in, and the term in its loss.

    Args:
        loss: the loss function of the actor in this process.
    """
    return {
        "where": f"process {os.getpid()} on {socket.gethostname()}",
        "version": version("klgrad"),
        "plugin": PLUGIN in sys.modules,
        "declaration": identity(loss.declaration) if isinstance(loss, KLLoss) else None,
    }


def identity(declaration: Declaration) -> str:
    """All that is declared, as text that two processes can compare."""
    return f"{declaration.settings!r}, task_rewards={declaration.task_rewards}"


def expected(declaration: Declaration) -> Status:
    """What the driver expects of every worker."""
    return {"version": version("klgrad"), "plugin": True, "declaration": identity(declaration)}


def check_status(wanted: Mapping[str, Any], found: Sequence[Status]) -> None:
    """Raise `ActivationError` for the first process that does not have what is wanted.

    Args:
        wanted: from `expected`.
        found: from `status`, one per worker.
    """
    if not found:
        raise ActivationError("a report of every worker", "none", "look for the failure of the workers above")
    for each in found:
        for name, remedy in REMEDIES.items():
            if name in wanted and each.get(name) != wanted[name]:
                raise ActivationError(
                    f"klgrad active in every worker ({name}: {wanted[name]})",
                    f"{name}: {each.get(name)} in {each.get('where')}",
                    remedy,
                )


REMEDIES = {
    "version": "install the driver's version of klgrad on every node",
    "plugin": (
        "install klgrad with pip where this worker runs, and leave `klgrad` in VERL_USE_EXTERNAL_PLUGINS; "
        "VERL_LOGGING_LEVEL=DEBUG shows why a plug-in fails to load"
    ),
    "declaration": "do not set another loss function after the set-up of the workers",
}
"""What to do about each difference."""
