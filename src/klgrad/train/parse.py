"""From the command line, a YAML file and a preset to settings; what cannot be understood is named with its nearest."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trl.scripts.utils import TrlParser

from ..errors import KlgradError, UnknownNameError
from ..trl import KLConfig
from .errors import SettingError
from .named_code import check_confirmed
from .preset import here, preset_of
from .record import recorded_settings
from .settings import ALIASES, PolicyConfig, RunConfig, Settings, planned

PASSING = frozenset({"resume", "dry_run", "overwrite", "num_processes", "accelerate_config", "help", "output_dir"})
"""Not what belongs to one call: a run that is gone on with is not a dry run."""


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
    said = {**{ALIASES.get(k, k): v for k, v in file.items()}, **_flags(parser, arguments)}
    output = str(said.get("output_dir") or f"runs/{command}")
    preset, kept = preset_of(command, said), {}
    if said.get("resume"):  # the preset is in `run.json`, as it was then
        preset, kept = {}, recorded_settings(Path(output), command)
        check_confirmed(kept, said, Path(output), command)
        if "num_train_epochs" in said:
            kept.pop("max_steps", None)  # which would win over it
    preset |= here()
    parser.adopt({**preset, "output_dir": output}, "the preset")
    parser.adopt(kept, f"{output}/run.json")
    parser.adopt(file, "the configuration file")
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [name for name in unknown if name.startswith("-")] or unknown
        raise UnknownNameError("setting", names[0].lstrip("-").split("=")[0], {*parser.known, *ALIASES})
    return Asked(command, arguments, parser, vars(values), frozenset({*preset, *kept, *said}))


def settings_of(asked: Asked, processes: int | None = None) -> Settings:
    """Build them, with TRL's and our checks; `processes` is how many a dry run is of."""
    parser, pristine = asked.parser, asked.parser.pristine
    given = {
        name: value
        for name, value in asked.values.items()
        if name not in PASSING and (name in asked.chosen or value != pristine.get(name))
    }
    if (asked.values["num_generations"] or 0) < 2:  # TRL's word on it names no remedy
        remedy = "a group of one has no peers to compare with; 8, say"
        raise SettingError("`num_generations` >= 2", str(asked.values["num_generations"]), remedy)
    if processes is not None:
        parser.dataclass_types = [planned(processes) if kind is KLConfig else kind for kind in parser.dataclass_types]
    try:
        run, training, policy = parser.parse_args_into_dataclasses(asked.arguments)
    except KlgradError:
        raise
    except (ValueError, TypeError, ImportError) as error:  # TRL's and transformers' own checks
        raise SettingError("settings that fit together", str(error), f"see {parser.prog} --help") from error
    return Settings(asked.command, run, training, policy, given)


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
