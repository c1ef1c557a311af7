"""From the command line, a YAML file and a preset to settings; what cannot be understood is named with its nearest."""

from pathlib import Path
from typing import Any, NoReturn

from trl.scripts.utils import TrlParser

from ..errors import KlgradError, UnknownNameError
from ..trl import KLConfig
from .errors import SettingError
from .model import EMBEDDED as EMBEDDED_MODEL
from .record import recorded_settings
from .settings import (
    ALIASES,
    DEFAULTS,
    DISTILL,
    EMBEDDED,
    QUICK,
    QUICK_STUDENT,
    STUDENT,
    PolicyConfig,
    RunConfig,
    Settings,
)


class Parser(TrlParser):
    """TRL's, whose complaints are ours: one line, and no list of four hundred flags."""

    def __init__(self, command: str) -> None:
        kinds: Any = (RunConfig, KLConfig, PolicyConfig)
        super().__init__(kinds, prog=f"klgrad {command}", allow_abbrev=False)
        self.known = {action.dest for action in self._actions} - {"help"}
        self.pristine = {action.dest: action.default for action in self._actions}

    def error(self, message: str) -> NoReturn:
        """Instead of usage and exit."""
        raise SettingError("settings of the right kind", message, f"see {self.prog} --help")

    def adopt(self, values: dict[str, Any], where: str) -> None:
        """Make them the defaults."""
        named = {ALIASES.get(name, name): value for name, value in values.items()}
        for name in named:
            if name not in self.known:
                raise UnknownNameError(f"setting in {where}", name, {*self.known, *ALIASES})
        self.set_defaults_with_config(**named)


def parse(command: str, arguments: list[str]) -> Settings:
    """`command` is train or distill. Flags win over a file, a file over a preset, a preset over TRL's defaults."""
    parser, (arguments, file) = Parser(command), _split_config(arguments)
    said = {**{ALIASES.get(k, k): v for k, v in file.items()}, **_flags(parser, arguments)}
    output = str(said.get("output_dir") or f"runs/{command}")
    kept = recorded_settings(Path(output)) if said.get("resume") else {}
    parser.adopt({**_preset(command, {**kept, **said}), "output_dir": output}, "the preset")
    parser.adopt(kept, f"{output}/run.json")
    parser.adopt(file, "the configuration file")
    return _settings(command, parser, arguments)


def _settings(command: str, parser: Parser, arguments: list[str]) -> Settings:
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [name for name in unknown if name.startswith("-")] or unknown
        raise UnknownNameError("setting", names[0].lstrip("-").split("=")[0], {*parser.known, *ALIASES})
    # Not what belongs to this one call: a run that is gone on with is not a dry run.
    passing = {"resume", "dry_run", "overwrite", "num_processes", "accelerate_config", "help", "output_dir"}
    given = {k: v for k, v in vars(values).items() if k not in passing and v != parser.pristine.get(k)}
    try:
        run, training, policy = parser.parse_args_into_dataclasses(arguments)
    except KlgradError:
        raise
    except (ValueError, TypeError, ImportError) as error:  # TRL's and transformers' own checks
        raise SettingError("settings that fit together", str(error), f"see {parser.prog} --help") from error
    return Settings(command, run, training, policy, given)


def _preset(command: str, given: dict[str, Any]) -> dict[str, Any]:
    import torch

    model = (
        given.get("teacher", EMBEDDED_MODEL)
        if command == "distill"
        else given.get("model_name_or_path", EMBEDDED_MODEL)
    )
    embedded = str(model).partition(":")[0] == EMBEDDED_MODEL
    found = {**DEFAULTS, **(EMBEDDED if embedded else {})}
    if given.get("quick"):
        found |= QUICK
    if command == "distill":
        found |= DISTILL
        found |= QUICK_STUDENT if given.get("quick") else STUDENT if embedded else {}
        if given.get("kl_level") == "token":
            found.pop("kl_discount")  # there is no future to discount
    if "num_train_epochs" in given:
        found.pop("max_steps", None)  # which would win over it
    if not torch.cuda.is_available():
        found |= {"bf16": False, "use_cpu": True}  # TRL's default is bf16, which a CPU may not have
    return found


def _split_config(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Take `--config FILE` out, and read it."""
    rest, path = [], None
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.partition("=")
        if name == "--config":
            path = value if equals else next(given, None)
            if not path or path.startswith("--"):
                raise SettingError("--config FILE", "no file", "name a YAML file")
        else:
            rest.append(argument)
    return rest, _read(Path(path)) if path else {}


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise SettingError("a YAML file that can be read", f"{path}: {reason}", "check the path") from error
    except yaml.YAMLError as error:
        raise SettingError("YAML", f"{path}: {' '.join(str(error).split())}", "mend the line that it names") from error
    if not isinstance(found, dict):
        raise SettingError(
            "names and values in YAML", f"{path}: {type(found).__name__}", "write `name: value`, line by line"
        )
    return found


def _flags(parser: Parser, arguments: list[str]) -> dict[str, Any]:
    """What the command line itself says, without defaults."""
    import argparse

    before = {action: action.default for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    try:
        return vars(parser.parse_known_args(arguments)[0])
    finally:
        for action, default in before.items():
            action.default = default
