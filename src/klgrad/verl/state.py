"""β in verl's checkpoints: a file `klgrad.json` in the folder of each step."""

import json
from pathlib import Path
from typing import Any

from ..trainer_parts.adaptive_beta import AdaptiveCoefficient

FILE = "klgrad.json"


def step_folder(config: Any, step: int) -> Path:
    """The folder of a step's checkpoint, as verl names it."""
    given = config["trainer"]
    if given["resume_mode"] == "resume_path":
        return Path(given["resume_from_path"])
    return Path(given["default_local_dir"]) / f"global_step_{step}"


def save(beta: AdaptiveCoefficient, folder: Path) -> None:
    """Write the present β."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(beta.state_dict()))


def load(beta: AdaptiveCoefficient, folder: Path) -> bool:
    """Continue with the β of a checkpoint; False if it has none, as that of a run without klgrad."""
    if not (folder / FILE).is_file():
        return False
    beta.load_state_dict(json.loads((folder / FILE).read_text()))
    return True
