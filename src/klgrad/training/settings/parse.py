"""Read settings from the command line, a YAML file and a preset. An unknown name is an error with similar names."""

import argparse
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trl.scripts.utils import TrlParser
from trl.trainer.grpo_config import GRPOConfig

from ...errors import KlgradError, MeaningError, UnknownNameError
from ...trl import KLConfig
from ...trl.field_limits import complaint, has_choices
from ...trl.field_types import settings_of_class
from ...trl.meaning_notes import MeaningWarning
from ..run_folder.record import recorded_settings
from ..training_errors import SettingError
from .named_code import check_confirmed
from .presets import machine_settings, preset_of
from .run_config import ALIASES, PolicyConfig, RunConfig, Settings, planned

NOT_RECORDED = frozenset({"resume", "dry_run", "overwrite", "num_processes", "accelerate_config", "help", "output_dir"})
"""Settings of one call, which a resumed run does not inherit."""


class Parser(TrlParser):
    """TRL's parser, with errors of one line instead of a list of four hundred flags."""

    def __init__(self, command: str) -> None:
        kinds: Any = (RunConfig, KLConfig, PolicyConfig)
        super().__init__(kinds, prog=f"klgrad {command}", allow_abbrev=False)
        self.known = {action.dest for action in self._actions} - {"help"}
        self.pristine = {action.dest: action.default for action in self._actions}
        self.settings = {name: found for kind in kinds for name, found in settings_of_class(kind).items()}

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise SettingError("settings of the right kind", message, f"see {self.prog} --help")

    def checked(self, values: dict[Any, Any], where: str) -> dict[str, Any]:
        """Settings of a file, under their full names and with the declared types; text is read as on a command line."""
        found = {}
        for key, value in values.items():
            if not isinstance(key, str):
                received = f"the key {key!r} in {where}"
                raise SettingError("names of settings", received, f"see {self.prog} --help for the names")
            name = ALIASES.get(key, key)
            if name not in self.known:
                raise UnknownNameError(f"setting in {where}", name, {*self.known, *ALIASES})
            found[name] = self._value(name, value)
            wrong = None if has_choices(name) else self.settings[name].misfit(found[name])
            if wrong is not None:
                expected, received, remedy = wrong
                raise SettingError(expected, f"{received}, in {where}", remedy)
        return found

    def _value(self, name: str, value: Any) -> Any:
        """Convert text, as YAML reads 3e-5 as text, and a single value where a list is declared."""
        action = next(action for action in self._actions if action.dest == name)
        try:
            if isinstance(value, list):
                return [self._get_value(action, x) if isinstance(x, str) else x for x in value]
            value = self._get_value(action, value) if isinstance(value, str) else value
        except argparse.ArgumentError as error:
            self.error(str(error))
        return [value] if action.nargs == "+" and value is not None else value

    def adopt(self, values: dict[str, Any]) -> None:
        """Make these values the defaults."""
        self.set_defaults_with_config(**values)

    def check_values(self, values: dict[str, Any]) -> None:
        """Check types and ranges of all values, from every source, before any of them is used."""
        own = {name for name in KLConfig.__annotations__ if name not in GRPOConfig.__dataclass_fields__}
        for name, value in values.items():
            found = None if value == self.pristine[name] else complaint(self.settings[name], value)
            if found is not None:
                raise (MeaningError if name in own else SettingError)(*found)


@dataclass(frozen=True)
class Parsed:
    """Values by name, each of a known name and checked alone; whether they fit together is not checked yet."""

    command: str
    arguments: list[str]
    parser: Parser
    values: dict[str, Any]
    chosen: frozenset[str]
    """Names set on the command line, in a file, in `run.json` or by a preset."""


def parse(command: str, arguments: list[str]) -> Settings:
    """Parse a command line.

    Precedence: flags, then the file of `--config`, then a preset, then TRL's defaults.

    Args:
        command: `train` or `distill`.
        arguments: the command line after the command.

    Returns:
        The settings, checked one by one and together.

    Example:
        >>> parse("train", ["--quick", "--kl_coef", "0.1"]).training.kl_coef
        0.1
    """
    return settings_of(read(command, arguments))


def read(command: str, arguments: list[str]) -> Parsed:
    """Parse names and values. Checks of combinations depend on the number of processes, and follow in `settings_of`."""
    parser, (arguments, file) = Parser(command), _split_config(arguments)
    file = parser.checked(file, "the configuration file")
    given = {**file, **_flags(parser, arguments)}
    output = str(given.get("output_dir") or f"runs/{command}")
    preset, kept = preset_of(command, given), {}
    if given.get("resume"):  # `run.json` contains the preset of that time
        preset, kept = {}, parser.checked(recorded_settings(Path(output), command), f"{output}/run.json")
        check_confirmed(kept, given, Path(output), command)
        if "num_train_epochs" in given:
            kept.pop("max_steps", None)  # otherwise TRL would ignore the epochs
    preset |= machine_settings()
    parser.adopt({**preset, "output_dir": output, **kept, **file})
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [name for name in unknown if name.startswith("-")] or unknown
        raise UnknownNameError("setting", names[0].lstrip("-").split("=")[0], {*parser.known, *ALIASES})
    parser.check_values(vars(values))
    return Parsed(command, arguments, parser, vars(values), frozenset({*preset, *kept, *given}))


def settings_of(parsed: Parsed, processes: int | None = None) -> Settings:
    """Build the settings, with the checks of TRL and of this package.

    Args:
        parsed: from `read`.
        processes: the number of processes that a dry run describes; None for this process' own environment.
    """
    parser, pristine = parsed.parser, parsed.parser.pristine
    given = {
        name: value
        for name, value in parsed.values.items()
        if name not in NOT_RECORDED and (name in parsed.chosen or value != pristine.get(name))
    }
    if processes is not None:
        parser.dataclass_types = [planned(processes) if kind is KLConfig else kind for kind in parser.dataclass_types]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MeaningWarning)  # the start of a run and --dry-run print the same
            run, training, policy = parser.parse_args_into_dataclasses(parsed.arguments)
    except KlgradError:
        raise
    except Exception as error:  # the checks of TRL and transformers raise errors of any type
        raise _misfit(parser, error) from error
    return Settings(parsed.command, run, training, policy, given)


def _misfit(parser: Parser, error: Exception) -> SettingError:
    """Another library's error, with the settings that its text mentions."""
    text = str(error) or type(error).__name__
    words = re.findall(r"(--|`)?\b([a-z]\w+)\b", text)
    named = dict.fromkeys(word for mark, word in words if word in parser.known and (mark or not word.isalpha()))
    about = f": {', '.join(f'`{name}`' for name in named)}" if named else ""
    remedy = f"change {'one of them' if len(named) > 1 else 'it'}; see {parser.prog} --help-all"
    return SettingError(f"settings that fit together{about}", " ".join(text.split()), remedy)


def _split_config(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Remove `--config FILE` from the arguments, and read the file."""
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
        raise SettingError(
            "YAML", f"{path}: {' '.join(str(error).split())}", "correct the line that it names"
        ) from error
    if not isinstance(found, dict):
        raise SettingError(
            "names and values in YAML", f"{path}: {type(found).__name__}", "write one `name: value` per line"
        )
    return found


def _flags(parser: Parser, arguments: list[str]) -> dict[str, Any]:
    """Values of the command line itself, without defaults."""
    before = {action: action.default for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    try:
        return vars(parser.parse_known_args(arguments)[0])
    finally:
        for action, default in before.items():
            action.default = default
