"""Read a configuration file into names and values: YAML or JSON, or the shell or Python script that starts the run.

Nested names are joined by dots, so that `actor_rollout_ref: {actor: {use_kl_loss: true}}` in a file and
`actor_rollout_ref.actor.use_kl_loss=true` in a script are the same.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import RunFileError
from .python_script import of_python
from .shell_script import Word, commands_of

OVERRIDE = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
"""`name=value` as Hydra takes it, perhaps with + before it; `~name` removes a setting."""

DATA = (".yaml", ".yml", ".json")
MOST = 100_000
"""Values in a YAML file, with its aliases written out."""

SHORT = {"-cn": "config_name", "-cp": "config_path", "-cd": "config_dir"}
"""Hydra's short flags."""

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start another one."""

OTHER_COMMANDS = (
    "echo", "printf", "cat", "cp", "mv", "rm", "ls", "cd", "mkdir", "chmod", "sed", "grep", "git", "pip", "curl",
)  # fmt: skip
"""Commands whose words may be those of a run, and start none."""


@dataclass(frozen=True)
class Read:
    """What a file says.

    Attributes:
        settings: values by dotted name.
        trainer: TRL's trainer, where the script names it.
        not_literal: what a Python script has in place of a value, by name, where it is known only when it runs.
        program: the module, the file or the command that a shell script starts.
        environment: variables of the environment whose defaults were taken, by name of the setting.
        unread: words of a command that may have settings.
        notes: what was read in addition.
    """

    settings: dict[str, Any]
    trainer: str | None = None
    not_literal: dict[str, str] = field(default_factory=dict)
    program: str = ""
    environment: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_settings(path: Path) -> list[Read]:
    """The settings in a file, by dotted name.

    Args:
        path: `.yaml`, `.yml`, `.json` or `.py`; any other file is read as a shell script.

    Returns:
        What each command of a shell script says that starts a program of Python, or the one thing that another file
        says. Values of a shell script are strings, and a flag without a value is `True`.
    """
    text = _text(path)
    if path.suffix.lower() in DATA:
        return [Read(dict(_flat(loaded(text, path))))]
    if path.suffix.lower() == ".py":
        literals, trainer, others, notes = of_python(text, path)
        return [Read(literals, trainer, others, notes=notes)]
    found = [_started(words) for words in commands_of(text, path)]
    return [read for read in found if read is not None]


def read_data(path: Path) -> dict[str, Any]:
    """The settings in a YAML or JSON file, by dotted name."""
    return dict(_flat(loaded(_text(path), path)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise RunFileError("a configuration file", f"{path}: {reason}", "give the path of the file") from error


def _started(words: list[Word]) -> Read | None:
    """The settings of a command that starts a program of Python."""
    found = None if words[0] in OTHER_COMMANDS else _program(words)
    if found is None:
        return None
    program, arguments = found
    settings: dict[str, Any] = {}
    environment: dict[str, tuple[str, ...]] = {}
    unread: list[str] = []
    i = 0
    while i < len(arguments):
        word, i = arguments[i], i + 1
        is_flag = word.startswith("--") and len(word) > 2
        if is_flag or word in SHORT:
            name, has_value, value = word[2:].partition("=") if is_flag else (SHORT[word], "", "")
            name, used = name.replace("-", "_"), word.environment
            if not has_value:
                value = arguments[i] if i < len(arguments) and not arguments[i].startswith("--") else True
                used += arguments[i].environment if value is not True else ()
                i += value is not True
        elif override := OVERRIDE.fullmatch(word):
            name, value, used = override[1], override[2], word.environment
            if value is None and not word.startswith("~"):
                continue  # a value of the flag before it
            value = value and _unquoted(value)
        elif word.startswith("$") or ("$" in word.partition("=")[0] and "=" in word):
            unread.append(word)
            continue
        else:
            continue
        if "$" in name:
            unread.append(word)
            continue
        settings.pop(name, None)
        settings[name] = value
        environment[name] = used
    return Read(settings, program=program, environment=environment, unread=tuple(unread))


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _program(words: list[Word]) -> tuple[str, list[Word]] | None:
    """The program that a command starts, and its arguments: those before it are the launcher's."""
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if word in ("-m", "--module") and following and following not in LAUNCHERS:
            return following, words[i + 2 :]
        if word.endswith(".py") or word in ("main_ppo", "train_ppo_ray"):
            return word, words[i + 1 :]
        if word.split("/")[-1] in ("trl", "klgrad") and following and (i == 0 or not words[i - 1].startswith("-")):
            return f"{word.split('/')[-1]} {following}", words[i + 2 :]
    return None


def loaded(text: str, path: Path) -> dict[Any, Any]:
    """The content of a YAML or JSON file.

    Args:
        text: the content.
        path: the file.
    """
    import yaml

    try:
        if path.suffix.lower() == ".json":
            found = json.loads(text)
        else:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if node is not None and _size(node, {}) > MOST:
                remedy = "write the values without aliases"
                raise RunFileError(f"at most {MOST} values", f"{path} with aliases of more", remedy)
            found = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise RunFileError(f"{path} as YAML", " ".join(str(error).split()), "correct the file") from error
    except ValueError as error:
        if isinstance(error, RunFileError):
            raise
        raise RunFileError(f"{path} as JSON", str(error), "correct the file") from error
    if not isinstance(found, dict):
        raise RunFileError("names and values", f"{path} with {type(found).__name__}", "write `name: value` lines")
    return found


def _size(node: Any, known: dict[int, float]) -> float:
    """The number of values below a node of YAML, with aliases written out; infinite for one that contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        inner = node.value if isinstance(node.value, list) else []
        parts = [part for x in inner for part in (x if isinstance(x, tuple) else (x,))]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _flat(nested: dict[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
