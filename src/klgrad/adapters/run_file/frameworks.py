"""Which framework a configuration file is of, and its reader."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import RunFileError, UnknownNameError
from .mistyped import mistyped
from .of_openrlhf import openrlhf_run
from .of_skyrl import skyrl_run
from .of_trl import GRPO, OWN_FIELDS, RLOO, trl_run
from .of_verl import verl_run
from .python_script import LOOKED_FOR
from .reading import Read, read_settings
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
        path: a YAML or JSON file as the framework takes it, or the shell or Python script that starts the run.
            A Python script is not run: its literals are read, as in `GRPOConfig(beta=0.04)` or `args.beta = 0.04`.
        framework: `trl`, `verl`, `openrlhf` or `skyrl`; None to tell by the names of the settings.
        trainer: for TRL, `grpo` or `rloo`; None to tell by the settings.

    Returns:
        The settings of its KL, and what to change for the reverse KL. Unknown settings are ignored, with a note
        for names that are close to one of these settings, and missing ones have the framework's defaults.

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
    read = read_settings(path)
    found = framework or _framework_of(read)
    is_python = path.suffix.lower() == ".py"
    if found is None or (is_python and read == Read({})):
        raise RunFileError(
            f"a configuration of {', '.join(known)}{f', {LOOKED_FOR}' if is_python else ''}",
            f"{path} with none of their settings of a KL",
            "give the run's settings as YAML" if is_python else "name the framework: klgrad advise trl --config FILE",
        )
    run = trl_run(read.settings, trainer or read.trainer) if found == "trl" else READERS[found](read.settings)
    near = mistyped((*read.settings, *read.not_literal), run.settings)
    return replace(run, notes=(*run.notes, *_not_literal(run, read), *near))


def _framework_of(read: Read) -> str | None:
    names = (*read.settings, *read.not_literal)
    for beginning, framework in BEGINNINGS.items():
        if any(name.startswith(beginning) for name in names):
            return framework
    return "trl" if read.trainer or any(name in names for name in (*GRPO, *RLOO, *OWN_FIELDS)) else None


def _not_literal(run: Run, read: Read) -> list[str]:
    return [
        f"`{name}` is no literal in the script and was not read: what follows is for its default."
        for name in read.not_literal
        if name in run.settings
    ]
