"""Read settings from the command line, a YAML file and a preset. An unknown name is an error with similar names."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import KlgradError, UnknownNameError
from ...trl import KLConfig
from ...trl.meaning_notes import MeaningWarning
from ..run_folder.record import recorded_settings
from ..training_errors import SettingError
from .named_code import check_confirmed
from .presets import machine_settings, preset_of
from .run_config import ALIASES, Settings, planned
from .setting_parser import Parser

NOT_RECORDED = frozenset({"resume", "dry_run", "overwrite", "num_processes", "accelerate_config", "help", "output_dir"})
"""Settings of one call, which a resumed run does not inherit."""


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
    given = {**file, **parser.given_flags(arguments)}
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
