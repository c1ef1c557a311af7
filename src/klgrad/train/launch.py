"""More than one process: the same command, again, through `accelerate launch`."""

import os
import sys
from pathlib import Path

from .errors import SettingError
from .settings import Settings

LAUNCHED = "KLGRAD_LAUNCHED"
OWN = ("num_processes", "accelerate_config")


def is_needed(settings: Settings) -> bool:
    """Whether this process should start others and do nothing else."""
    if LAUNCHED in os.environ or "LOCAL_RANK" in os.environ:
        return False
    if settings.run.num_processes < 1:
        raise SettingError("`num_processes` >= 1", str(settings.run.num_processes), "1 trains in this process")
    return settings.run.num_processes > 1 or settings.run.accelerate_config is not None


def command(settings: Settings, arguments: list[str]) -> list[str]:
    """What to execute; every process parses the same settings, without those that led here."""
    config = settings.run.accelerate_config
    if config is not None and not Path(config).is_file():
        raise SettingError(
            "a configuration of accelerate", f"{config}, no such file", "write one with `accelerate config`"
        )
    chosen = ["--config_file", config] if config is not None else []
    if settings.run.num_processes > 1:
        chosen += ["--num_processes", str(settings.run.num_processes)]
    if config is None:
        chosen += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        chosen += ["--multi_gpu"]  # also without: with --cpu accelerate starts one process, whatever it is asked for
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *chosen, "-m", "klgrad", settings.command]
    return [*launcher, *_without_own(arguments)]


def execute(settings: Settings, arguments: list[str]) -> None:
    """Become the launcher; this does not return."""
    found = command(settings, arguments)
    os.environ[LAUNCHED] = "1"
    os.execv(found[0], found)


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
