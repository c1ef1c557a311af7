"""What the driver tells its workers and they answer, so that a declared KL is active in all; and the saved β."""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from ..errors import ActivationError
from ..integrations import AdaptiveCoefficient
from ..support import Json
from .declaration import Config, VerlObjective, term_of
from .loss import KLLoss

# Whether the declared KL is active in this process, and in every worker of a run.
#
# verl logs a plug-in that fails to load at debug level and goes on. A run that declares a KL has to stop instead.

PLUGIN = "klgrad.verl.plugin"
"""The module that only verl imports."""

Status = Json
"""What a worker reports of itself."""


def worker_status(loss: object) -> Status:
    """What this process has: the version, whether verl loaded the plug-in, and the term in its actor's loss."""
    return {
        "where": f"process {os.getpid()} on {socket.gethostname()}",
        "version": version("klgrad"),
        "plugin": PLUGIN in sys.modules,
        "declaration": repr(loss.declaration) if isinstance(loss, KLLoss) else None,
    }


def expected_status(declaration: VerlObjective) -> Status:
    return {"version": version("klgrad"), "plugin": True, "declaration": repr(declaration)}


def check_status(wanted: Mapping[str, object], reports: Sequence[Status]) -> None:
    """Raise `ActivationError` for the first worker whose `worker_status` is not the `expected_status`."""
    if not reports:
        raise ActivationError("a report of every worker", "none", "look for the failure of the workers above")
    for each in reports:
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


# What the driver sends to the workers, inside verl's configuration of them.

NODE_OF_WORKERS = "klgrad"
"""The key inside `actor_rollout_ref`, all of the configuration that verl's workers get."""


def to_worker_node(declaration: VerlObjective) -> Json:
    """The declaration and what the driver expects of a worker, as plain values."""
    settings = asdict(declaration)
    return {
        "task_rewards": settings.pop("task_rewards"),
        "settings": settings,
        "expected": expected_status(declaration),
    }


def from_worker_node(node: Config) -> tuple[VerlObjective, Status]:
    """The inverse of `to_worker_node`."""
    declaration = replace(term_of(node["settings"]), task_rewards=bool(node["task_rewards"]))
    return declaration, dict(node["expected"])


# β in verl's checkpoints: a file `klgrad.json` in the folder of each step.

STATE_FILE = "klgrad.json"


def step_folder(config: Config, step: int) -> Path:
    """The folder of a step's checkpoint, as verl names it."""
    trainer = config["trainer"]
    if trainer["resume_mode"] == "resume_path":
        return Path(trainer["resume_from_path"])
    return Path(trainer["default_local_dir"]) / f"global_step_{step}"


def save_beta(beta: AdaptiveCoefficient, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE_FILE).write_text(json.dumps(beta.state_dict()))


def load_beta(beta: AdaptiveCoefficient, folder: Path) -> bool:
    """Continue with the β of a checkpoint; False if it has none, as that of a run without klgrad."""
    if not (folder / STATE_FILE).is_file():
        return False
    beta.load_state_dict(json.loads((folder / STATE_FILE).read_text()))
    return True
