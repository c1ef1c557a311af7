"""Read a configuration file into names and values: YAML or JSON, or the shell or Python script that starts the run.

Nested names are joined by dots, so that `actor_rollout_ref: {actor: {use_kl_loss: true}}` in a file and
`actor_rollout_ref.actor.use_kl_loss=true` in a script are the same.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError, RunFileError
from .python_script import of_python

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
"""`name=value` as Hydra takes it, perhaps with + before it."""


@dataclass(frozen=True)
class Read:
    """What a file says.

    Attributes:
        settings: values by dotted name.
        trainer: TRL's trainer, where a Python script calls the class of its settings.
        not_literal: names that a Python script gives a value which is known only when it runs.
    """

    settings: dict[str, Any]
    trainer: str | None = None
    not_literal: tuple[str, ...] = ()


def read_settings(path: Path) -> Read:
    """The settings in a file, by dotted name.

    Args:
        path: `.yaml`, `.yml`, `.json` or `.py`; any other file is read as a shell script.

    Returns:
        Values by name: of a shell script all are strings, and a flag without a value is `True`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise RunFileError("a configuration file", f"{path}: {reason}", "give the path of the file") from error
    if path.suffix.lower() == ".py":
        return Read(*of_python(text, path))
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        return Read(of_script(text, path))
    found = _loaded(text, path)
    if not isinstance(found, dict):
        raise RunFileError("names and values", f"{path} with {type(found).__name__}", "write `name: value` lines")
    return Read(dict(_flat(found)))


def of_script(text: str, path: Path) -> dict[str, Any]:
    """The settings on the command lines of a script: `name=value`, `--name value`, `--name=value` and `--flag`."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise RunFileError("a shell script", f"{path}: {error}", "close its quotes, or give a YAML file") from error
    found: dict[str, Any] = {}
    for i, word in enumerate(words):
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            following = words[i + 1] if i + 1 < len(words) else "--"
            found[name] = value if has_value else True if following.startswith("--") else following
        elif override := OVERRIDE.fullmatch(word):
            found[override[1]] = override[2]
    return found


def _loaded(text: str, path: Path) -> Any:
    if path.suffix.lower() == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise RunFileError(f"{path} as JSON", str(error), "correct the file") from error
    try:
        import yaml
    except ImportError as error:
        remedy = "pip install pyyaml, or write the settings as JSON"
        raise MissingExtraError("pyyaml, to read YAML", "no such package", remedy) from error
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise RunFileError(f"{path} as YAML", " ".join(str(error).split()), "correct the file") from error


def _flat(nested: dict[Any, Any], before: str = "") -> Any:
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
