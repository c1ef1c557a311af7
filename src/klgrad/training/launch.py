"""More than one process: the same command, again, through `accelerate launch`."""

import os
import sys
from pathlib import Path

import yaml

from .parse import Asked
from .training_errors import SettingError

LAUNCHED = "KLGRAD_LAUNCHED"
OWN = ("num_processes", "accelerate_config")


def is_needed(asked: Asked) -> bool:
    """Whether this process should start others and do nothing else."""
    count = asked.values["num_processes"]
    if not isinstance(count, int) or count < 1:
        raise SettingError("`num_processes` >= 1", str(count), "1 trains in this process")
    if LAUNCHED in os.environ or "LOCAL_RANK" in os.environ or asked.values["dry_run"]:
        return False
    return count > 1 or asked.values["accelerate_config"] is not None


def processes(asked: Asked) -> int:
    """How many would train."""
    count, config = asked.values["num_processes"], _config(asked)
    if count > 1 or config is None:
        return count
    found = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    return int(found.get("num_processes", 1)) if isinstance(found, dict) else 1


def command(asked: Asked, arguments: list[str]) -> list[str]:
    """What to execute; every process parses the same settings, without those that led here."""
    config, count = _config(asked), asked.values["num_processes"]
    chosen = ["--config_file", config] if config is not None else []
    if count > 1:
        chosen += ["--num_processes", str(count)]
    if config is None:
        chosen += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        chosen += ["--multi_gpu"]  # also without: with --cpu accelerate starts one process, whatever it is asked for
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *chosen, "-m", "klgrad", asked.command]
    return [*launcher, *_without_own(arguments)]


def execute(asked: Asked, arguments: list[str]) -> None:
    """Become the launcher; this does not return."""
    found = command(asked, arguments)
    os.environ[LAUNCHED] = "1"
    os.execv(found[0], found)


def _config(asked: Asked) -> str | None:
    config = asked.values["accelerate_config"]
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
