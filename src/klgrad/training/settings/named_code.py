"""Settings that make a run execute code. With `--resume` they have to be given again.

A run folder may come from somebody else, so `run.json` alone must not cause the execution of a reward function or of
code that comes with a model.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..training_errors import RunError


def executed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make a run execute code.

    Example:
        >>> executed({"reward": "mine.py:score", "kl_coef": 0.1, "attn_implementation": "owner/kernel"})
        {'reward': 'mine.py:score', 'attn_implementation': 'owner/kernel'}
    """
    return {name: value for name, value in settings.items() if _executes(name, value)}


def check_confirmed(recorded: Mapping[str, Any], given: Mapping[str, Any], folder: Path, command: str) -> None:
    """Refuse code that only `run.json` names.

    Args:
        recorded: the settings in `run.json`.
        given: settings from the command line and the file of `--config`.
        folder: of the run.
        command: `train` or `distill`.
    """
    missing = {name: value for name, value in executed(recorded).items() if name not in given}
    if missing:
        raise RunError(
            "code that is given again with --resume, because a run folder may come from somebody else",
            f"{folder}/run.json, which names {_listed(missing)}",
            f"if you trust it: {resume_command(command, folder, recorded)}",
        )


def resume_command(command: str, folder: Path, settings: Mapping[str, Any], *more: str) -> str:
    """The command line that resumes a run."""
    words = ["klgrad", command, "--output_dir", str(folder), "--resume", *more]
    for name, value in executed(settings).items():
        words += [f"--{name}", *_words(value)]
    return shlex.join(words)


KERNELS = ("attn_implementation", "experts_implementation", "kernel_config")
"""Settings that may name code on the hub."""


def _executes(name: str, value: Any) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("{"):  # as on a command line
        try:
            value = json.loads(value)
        except ValueError:
            return "trust_remote_code" in value
    if isinstance(value, dict):  # it may name a kernel for each part of a model
        return any(_executes(name if name in KERNELS else str(key), each) for key, each in value.items())
    if isinstance(value, list):
        return any(_executes(name, each) for each in value)
    if name in KERNELS:  # `owner/name` is a kernel that would be downloaded
        return isinstance(value, str) and "/" in value
    return name in ("reward", "trust_remote_code", "custom_generate", "use_kernels") and bool(value)


def _words(value: Any) -> list[str]:
    if value is True:
        return []
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(" ".join([f"--{name}", *_words(value)]) for name, value in settings.items())
