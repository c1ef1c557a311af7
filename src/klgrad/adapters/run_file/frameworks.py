"""Which framework a configuration file is of, and its reader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import RunFileError, UnknownNameError
from .of_openrlhf import openrlhf_run
from .of_skyrl import skyrl_run
from .of_trl import GRPO, OWN_FIELDS, RLOO, trl_run
from .of_verl import verl_run
from .reading import read_settings
from .run import Run

READERS: dict[str, Callable[[dict[str, Any]], Run]] = {
    "verl": verl_run,
    "openrlhf": openrlhf_run,
    "skyrl": skyrl_run,
}
"""By framework, for those with one trainer."""

BEGINNINGS = {
    "actor_rollout_ref.": "verl",
    "algorithm.": "verl",
    "trainer.algorithm.": "skyrl",
    "algo.kl.": "openrlhf",
    "algo.advantage.": "openrlhf",
}
"""How the names of settings begin that only one framework has."""


def read_run(path: Path, framework: str | None = None, trainer: str | None = None) -> Run:
    """Read the configuration of a run.

    Args:
        path: a YAML or JSON file as the framework takes it, or the script that starts the run.
        framework: `trl`, `verl`, `openrlhf` or `skyrl`; None to tell by the names of the settings.
        trainer: for TRL, `grpo` or `rloo`; None to tell by the settings.

    Returns:
        The settings of its KL, and what to change for the reverse KL. Unknown settings are ignored, and missing ones
        have the framework's defaults.

    Raises:
        RunFileError: for a file that cannot be read, is of no known framework, or has a value that cannot be.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "run.json"
        >>> _ = path.write_text('{"beta": 0.04, "use_bias_correction_kl": false, "loss_type": "dr_grpo"}')
        >>> run = read_run(path)
        >>> run.framework, run.trainer, [(change.name, change.value) for change in run.changes]
        ('trl', 'GRPOTrainer', [('use_bias_correction_kl', True)])
    """
    known = ("trl", *READERS)
    if framework is not None and framework not in known:
        raise UnknownNameError("framework with a configuration that can be read", framework, known)
    given = read_settings(path)
    found = framework or _framework_of(given)
    if found is None:
        raise RunFileError(
            f"a configuration of {', '.join(known)}",
            f"{path} with none of their settings of a KL",
            "name the framework: klgrad advise trl --config FILE",
        )
    return trl_run(given, trainer) if found == "trl" else READERS[found](given)


def _framework_of(given: dict[str, Any]) -> str | None:
    for beginning, framework in BEGINNINGS.items():
        if any(name.startswith(beginning) for name in given):
            return framework
    return "trl" if any(name in given for name in (*GRPO, *RLOO, *OWN_FIELDS)) else None
