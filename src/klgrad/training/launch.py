"""Start the same command again in several processes, by `accelerate launch`."""

import os
import sys
from pathlib import Path

import yaml

from .settings.parse import Parsed
from .training_errors import SettingError

LAUNCHED = "KLGRAD_LAUNCHED"
OWN = ("num_processes", "accelerate_config")


def is_needed(parsed: Parsed) -> bool:
    """Whether this process should only start others."""
    count = parsed.values["num_processes"]
    if not isinstance(count, int) or count < 1:
        raise SettingError("`num_processes` >= 1", str(count), "use 1 to train in this process")
    if LAUNCHED in os.environ or "LOCAL_RANK" in os.environ or parsed.values["dry_run"]:
        return False
    return count > 1 or parsed.values["accelerate_config"] is not None


def processes(parsed: Parsed) -> int:
    """The number of processes that would train."""
    count, config = parsed.values["num_processes"], _config(parsed)
    if count > 1 or config is None:
        return count
    found = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    return int(found.get("num_processes", 1)) if isinstance(found, dict) else 1


def command(parsed: Parsed, arguments: list[str]) -> list[str]:
    """The command line to execute; it has the same settings, except those that choose the processes."""
    config, count = _config(parsed), parsed.values["num_processes"]
    chosen = ["--config_file", config] if config is not None else []
    if count > 1:
        chosen += ["--num_processes", str(count)]
    if config is None:
        chosen += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        chosen += ["--multi_gpu"]  # on a CPU too: with --cpu accelerate starts one process only
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *chosen, "-m", "klgrad", parsed.command]
    return [*launcher, *_without_own(arguments)]


def execute(parsed: Parsed, arguments: list[str]) -> None:
    """Replace this process by the launcher; does not return."""
    found = command(parsed, arguments)
    os.environ[LAUNCHED] = "1"
    os.execv(found[0], found)


def _config(parsed: Parsed) -> str | None:
    config = parsed.values["accelerate_config"]
    if config is not None and not Path(config).is_file():
        raise SettingError(
            "a configuration of accelerate", f"{config}, no such file", "write one with `accelerate config`"
        )
    return config


def _without_own(arguments: list[str]) -> list[str]:
    rest, given = [], iter(arguments)
    for argument in given:
        name, equals, _ = argument.lstrip("-").partition("=")
        if argument.startswith("--") and name.replace("-", "_") in OWN:
            if not equals:
                next(given, None)
        else:
            rest.append(argument)
    return rest
