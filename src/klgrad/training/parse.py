"""From the command line, a YAML file and a preset to settings; what cannot be understood is named with its nearest."""

import argparse
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trl.scripts.utils import TrlParser
from trl.trainer.grpo_config import GRPOConfig

from ..errors import KlgradError, MeaningError, UnknownNameError
from ..trl import KLConfig
from ..trl.field_limits import complaint, has_choices
from ..trl.field_types import settings_of_class
from ..trl.meaning_notes import MeaningWarning
from .named_code import check_confirmed
from .preset import here, preset_of
from .run_folder import recorded_settings
from .settings import ALIASES, PolicyConfig, RunConfig, Settings, planned
from .training_errors import SettingError

PASSING = frozenset({"resume", "dry_run", "overwrite", "num_processes", "accelerate_config", "help", "output_dir"})
"""Not what belongs to one call: a run that is gone on with is not a dry run."""


class Parser(TrlParser):
    """TRL's, whose complaints are ours: one line, and no list of four hundred flags."""

    def __init__(self, command: str) -> None:
        kinds: Any = (RunConfig, KLConfig, PolicyConfig)
        super().__init__(kinds, prog=f"klgrad {command}", allow_abbrev=False)
        self.known = {action.dest for action in self._actions} - {"help"}
        self.pristine = {action.dest: action.default for action in self._actions}
        self.settings = {name: found for kind in kinds for name, found in settings_of_class(kind).items()}

    def error(self, message: str) -> NoReturn:
        """Instead of usage and exit."""
        raise SettingError("settings of the right kind", message, f"see {self.prog} --help")

    def understood(self, values: dict[Any, Any], where: str) -> dict[str, Any]:
        """What a file says, by its full names and of the declared types; text is read as on the command line."""
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
        """YAML reads 3e-5 as text; and one value may stand for a list of one."""
        action = next(action for action in self._actions if action.dest == name)
        try:
            if isinstance(value, list):
                return [self._get_value(action, x) if isinstance(x, str) else x for x in value]
            value = self._get_value(action, value) if isinstance(value, str) else value
        except argparse.ArgumentError as error:
            self.error(str(error))
        return [value] if action.nargs == "+" and value is not None else value

    def adopt(self, values: dict[str, Any]) -> None:
        """Make them the defaults."""
        self.set_defaults_with_config(**values)

    def check(self, values: dict[str, Any]) -> None:
        """Types and ranges of all values, wherever they come from, before any of them is used."""
        own = {name for name in KLConfig.__annotations__ if name not in GRPOConfig.__dataclass_fields__}
        for name, value in values.items():
            found = None if value == self.pristine[name] else complaint(self.settings[name], value)
            if found is not None:
                raise (MeaningError if name in own else SettingError)(*found)


@dataclass(frozen=True)
class Asked:
    """Values by name, all of them known; whether they fit together is not looked at yet."""

    command: str
    arguments: list[str]
    parser: Parser
    values: dict[str, Any]
    chosen: frozenset[str]
    """Names that somebody or a preset decided on."""


def parse(command: str, arguments: list[str]) -> Settings:
    """`command` is train or distill. Flags win over a file, a file over a preset, a preset over TRL's defaults."""
    return settings_of(read(command, arguments))


def read(command: str, arguments: list[str]) -> Asked:
    """Names and values; what they are together depends on the processes, and may be for others to look at."""
    parser, (arguments, file) = Parser(command), _split_config(arguments)
    file = parser.understood(file, "the configuration file")
    said = {**file, **_flags(parser, arguments)}
    output = str(said.get("output_dir") or f"runs/{command}")
    preset, kept = preset_of(command, said), {}
    if said.get("resume"):  # the preset is in `run.json`, as it was then
        preset, kept = {}, parser.understood(recorded_settings(Path(output), command), f"{output}/run.json")
        check_confirmed(kept, said, Path(output), command)
        if "num_train_epochs" in said:
            kept.pop("max_steps", None)  # which would win over it
    preset |= here()
    parser.adopt({**preset, "output_dir": output, **kept, **file})
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [name for name in unknown if name.startswith("-")] or unknown
        raise UnknownNameError("setting", names[0].lstrip("-").split("=")[0], {*parser.known, *ALIASES})
    parser.check(vars(values))
    return Asked(command, arguments, parser, vars(values), frozenset({*preset, *kept, *said}))


def settings_of(asked: Asked, processes: int | None = None) -> Settings:
    """Build them, with TRL's and our checks; `processes` is how many a dry run is of."""
    parser, pristine = asked.parser, asked.parser.pristine
    given = {
        name: value
        for name, value in asked.values.items()
        if name not in PASSING and (name in asked.chosen or value != pristine.get(name))
    }
    if processes is not None:
        parser.dataclass_types = [planned(processes) if kind is KLConfig else kind for kind in parser.dataclass_types]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MeaningWarning)  # the announcement and --dry-run say the same
            run, training, policy = parser.parse_args_into_dataclasses(asked.arguments)
    except KlgradError:
        raise
    except Exception as error:  # TRL's and transformers' own checks, which raise whatever comes first
        raise _misfit(parser, error) from error
    return Settings(asked.command, run, training, policy, given)


def _misfit(parser: Parser, error: Exception) -> SettingError:
    """Another library's complaint, with the settings that it is about."""
    text = str(error) or type(error).__name__
    words = re.findall(r"(--|`)?\b([a-z]\w+)\b", text)
    named = dict.fromkeys(word for mark, word in words if word in parser.known and (mark or not word.isalpha()))
    about = f": {', '.join(f'`{name}`' for name in named)}" if named else ""
    remedy = f"change {'one of them' if len(named) > 1 else 'it'}; see {parser.prog} --help-all"
    return SettingError(f"settings that fit together{about}", " ".join(text.split()), remedy)


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
    before = {action: action.default for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    try:
        return vars(parser.parse_known_args(arguments)[0])
    finally:
        for action, default in before.items():
            action.default = default
