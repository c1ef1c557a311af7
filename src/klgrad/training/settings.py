"""Settings of a run: command line, file, preset and recorded run, checked; and how the run is launched."""

import argparse
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl.scripts.utils import TrlParser
from trl.trainer.model_config import ModelConfig

from ..errors import KlgradError, RunError, SettingError, UnknownNameError
from ..models import EMBEDDED as EMBEDDED_MODEL
from ..trl import KLConfig
from ..trl.config_checks import MeaningWarning
from .run_folder import recorded_settings

# Settings that make a run execute code. With `--resume` they have to be given again.
#
# A run folder may come from somebody else, so `run.json` alone must not cause the execution of a reward function or of
# code that comes with a model.


def executed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make a run execute code.

    Example:
        >>> executed({"reward": "mine.py:score", "kl_coef": 0.1, "attn_implementation": "owner/kernel"})
        {'reward': 'mine.py:score', 'attn_implementation': 'owner/kernel'}
    """
    return {name: value for name, value in settings.items() if _executes(name, value)}


def check_confirmed(recorded: Mapping[str, Any], given: Mapping[str, Any], folder: Path, command: str) -> None:
    """Refuse code that only `run.json` names.

    Args:
        recorded: the settings in `run.json`.
        given: settings from the command line and the file of `--config`.
        folder: of the run.
        command: `train` or `distill`.
    """
    missing = {name: value for name, value in executed(recorded).items() if name not in given}
    if missing:
        raise RunError(
            "code that is given again with --resume, because a run folder may come from somebody else",
            f"{folder}/run.json, which names {_listed(missing)}",
            f"if you trust it: {resume_command(command, folder, recorded)}",
        )


def resume_command(command: str, folder: Path, settings: Mapping[str, Any], *more: str) -> str:
    """The command line that resumes a run."""
    words = ["klgrad", command, "--output_dir", str(folder), "--resume", *more]
    for name, value in executed(settings).items():
        words += [f"--{name}", *_words(value)]
    return shlex.join(words)


KERNELS = ("attn_implementation", "experts_implementation", "kernel_config")
"""Settings that may name code on the hub."""


def _executes(name: str, value: Any) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("{"):  # as on a command line
        try:
            value = json.loads(value)
        except ValueError:
            return "trust_remote_code" in value
    if isinstance(value, dict):  # it may name a kernel for each part of a model
        return any(_executes(name if name in KERNELS else str(key), each) for key, each in value.items())
    if isinstance(value, list):
        return any(_executes(name, each) for each in value)
    if name in KERNELS:  # `owner/name` is a kernel that would be downloaded
        return isinstance(value, str) and "/" in value
    return name in ("reward", "trust_remote_code", "custom_generate", "use_kernels") and bool(value)


def _words(value: Any) -> list[str]:
    if value is True:
        return []
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(" ".join([f"--{name}", *_words(value)]) for name, value in settings.items())


# Default settings by command, model and machine, where they differ from TRL's.

DEFAULTS: dict[str, Any] = {
    "logging_steps": 1,
    "save_steps": 50,
    "save_total_limit": 2,
    "disable_tqdm": True,
    "disable_dropout": True,  # dropout in the policy alone would add to the KL to the reference
}
"""For every model."""

EMBEDDED: dict[str, Any] = {
    "max_steps": 60,
    "learning_rate": 5e-6,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_completion_length": 32,
    "gradient_checkpointing": False,
    "kl_coef": 0.02,
}
"""For the embedded model: 32 prompts with 8 completions each per update."""

QUICK: dict[str, Any] = {
    **EMBEDDED,
    "max_steps": 10,
    "learning_rate": 1e-5,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "max_completion_length": 10,
    "save_steps": 5,
    "save_total_limit": 1,
    "weights_only": True,  # one has three times the size of the model
    "eval_every": 5,
    "eval_size": 12,
}
"""About ten minutes on a CPU: 8 prompts with 4 completions each per update."""

DISTILL: dict[str, Any] = {
    "kl_coef": 1.0,
    "kl_estimator": "exact",
    "kl_discount": 0.0,  # with discount 1 and a high learning rate a student learns to end early
    "teacher": EMBEDDED_MODEL,
}
"""For `klgrad distill`, where the KL is the whole objective."""

BATCHES = 40
"""Of completions, which a student of the embedded model samples, however often each is used."""

STUDENT: dict[str, Any] = {"learning_rate": 3e-4, "max_steps": BATCHES}
"""A student with two thirds of the layers is far from its teacher, and needs a high learning rate."""

REUSED: dict[str, Any] = {
    "num_iterations": 8,
    "learning_rate": 6e-4,
    "lr_scheduler_type": "cosine",
}
"""The same number of completions, with eight updates each: the nearest of what docs/experiments/reuse.md compares.

Summed over the vocabulary, the KL of a token needs no importance weights on completions of an earlier policy.
"""

QUICK_STUDENT: dict[str, Any] = {"learning_rate": 1e-4, "max_steps": 8, "save_steps": 4, "eval_every": 4}

QUICK_REUSED: dict[str, Any] = {
    "num_iterations": 2,
    "learning_rate": 2e-4,
    "max_steps": 12,
    "save_steps": 6,
    "eval_every": 6,
}
"""Few batches: eight updates with each would leave one or two."""

UNGROUPED: dict[str, Any] = {"num_generations": 2}
"""Without a reward nothing is compared within a group: use more prompts, with the fewest completions TRL allows."""


def preset_of(command: str, given: dict[str, Any]) -> dict[str, Any]:
    """The default settings of a command.

    Args:
        command: `train` or `distill`.
        given: settings from the command line and a file, which choose among the presets.

    Returns:
        Values by name; `given` takes precedence over them.

    Example:
        >>> preset_of("distill", {"quick": True})["max_steps"]
        12
    """
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
        found = _distilling({**found, **DISTILL}, given, embedded)
    if "num_train_epochs" in given:
        found.pop("max_steps", None)  # otherwise TRL would ignore the epochs
    return found


def _distilling(found: dict[str, Any], given: dict[str, Any], embedded: bool) -> dict[str, Any]:
    if given.get("kl_level") == "token":
        found.pop("kl_discount")  # at token level there is no future to discount
    if given.get("kl_cell"):
        found = {name: x for name, x in found.items() if name not in ("kl_discount", "kl_estimator")}
    if "reward" not in given and given.get("kl_baseline", "none") == "none":
        found |= UNGROUPED
    reused = embedded and _reusable({**found, **given})
    if given.get("quick"):
        return found | (QUICK_REUSED if reused else QUICK_STUDENT)
    return found | (_reused(given) if reused else STUDENT if embedded else {})


def _reused(given: dict[str, Any]) -> dict[str, Any]:
    """With updates for all batches. A number of uses that is not valid is reported later."""
    uses = given.get("num_iterations")
    return {**REUSED, "max_steps": BATCHES * (uses if isinstance(uses, int) else REUSED["num_iterations"])}


def _reusable(chosen: dict[str, Any]) -> bool:
    """Whether the exact reverse KL of each token is the whole objective. The values are not checked yet."""
    other = ("reward", "kl_cell", "kl_top_k", "rollout_lag")
    plain = {"kl_estimator": "exact", "kl_divergence": "reverse", "kl_placement": "loss", "kl_baseline": "none"}
    as_usual = all(chosen.get(name, value) == value for name, value in plain.items())
    tokens = chosen.get("kl_level") == "token" or chosen.get("kl_discount") == 0
    wanted = chosen.get("num_iterations") != 1
    return as_usual and tokens and wanted and not any(chosen.get(name) for name in other)


def machine_settings() -> dict[str, Any]:
    """Settings of this machine: TRL's default is bf16, which a CPU may not support."""
    import torch

    return {} if torch.cuda.is_available() else {"bf16": False, "use_cpu": True}


# The settings of `klgrad train` and `klgrad distill` beside those of TRL.


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class RunConfig:
    """Data, evaluation, and how the command behaves."""

    task: str = _setting(
        "arithmetic",
        "What to train on: `arithmetic`, or some of its tasks, separated by commas (addition, subtraction, "
        "multiplication, maximum, word-problems); `reasoning-gym:NAME`; or a dataset with a `prompt` column (a "
        "JSON, JSONL or Parquet file, a folder, or a name on the hub).",
    )
    eval_task: str | None = _setting(
        None, "What to evaluate on. Default: held-out prompts; those of all tasks for built-in ones."
    )
    reward: str | None = _setting(
        None,
        "Reward functions as TRL calls them, separated by commas: package.module:function or path/file.py:function.",
    )
    digits: int = _setting(1, "Digits of the numbers in the built-in tasks, 1 to 9.")
    train_size: int = _setting(2048, "Number of training questions of a built-in task.")
    eval_size: int = _setting(64, "Number of held-out prompts of each task.")
    eval_every: int = _setting(20, "Updates between evaluations; 0 evaluates only before and after training.")
    eval_greedy: bool = _setting(False, "Evaluate with greedy decoding instead of sampling as in training.")
    dataset_config: str | None = _setting(None, "Configuration of a dataset on the hub.")
    dataset_split: str = _setting("train", "Split of the dataset to train on.")
    dataset_eval_split: str | None = _setting(None, "Split of the dataset to evaluate on. Default: `dataset_split`.")
    student_layers: int | None = _setting(None, "Number of layers of the model to keep, evenly spaced.")
    quick: bool = _setting(False, "Preset of a small run: about ten minutes on a CPU.")
    dry_run: bool = _setting(False, "Print what would be trained and the memory it needs, and exit.")
    resume: bool = _setting(
        False, "Continue the run in `output_dir` from its last complete checkpoint, with its settings."
    )
    overwrite: bool = _setting(False, "Replace the run in `output_dir`.")
    weights_only: bool = _setting(
        False, "Remove the checkpoints of a finished run; --resume cannot make it longer then."
    )
    num_processes: int = _setting(1, "Number of processes; more than 1 are started by `accelerate launch`.")
    accelerate_config: str | None = _setting(
        None, "Configuration file of accelerate (FSDP, DeepSpeed, several nodes) to launch with."
    )

    def __post_init__(self) -> None:
        """Check ranges; that of `digits` is checked where a task has digits."""
        least = {"train_size": 1, "eval_size": 0, "eval_every": 0, "student_layers": 1, "num_processes": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise SettingError(f"`{name}` >= {bound}", str(value), f"see klgrad train --help-all for `{name}`")


@dataclass
class PolicyConfig(ModelConfig):
    """TRL's `ModelConfig`, with `--model` as a short name for its first field."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "A name on the hub, or a folder; `smollm2` is embedded, without network; NAME:20 keeps 20 layers.",
            "aliases": ["--model"],
        },
    )


@dataclass
class Settings:
    """All settings of a command.

    Attributes:
        command: `train` or `distill`.
        run: settings of this package.
        training: settings of the trainer, TRL's included.
        policy: settings of the model.
        given: values from the command line, a file or a preset, by name, for `run.json`.
    """

    command: str
    run: RunConfig
    training: KLConfig
    policy: PolicyConfig
    given: dict[str, Any]

    @property
    def rewarded(self) -> bool:
        """Whether the run is trained on a reward; a distillation is only if `reward` is given."""
        return self.command == "train" or self.run.reward is not None


def planned(processes: int) -> type[KLConfig]:
    """A `KLConfig` that assumes this number of processes before they are started, for `--dry-run`."""

    class Planned(KLConfig):
        @property
        def world_size(self) -> int:
            return processes

    return Planned


ALIASES = {"model": "model_name_or_path"}
"""Short names that a file of settings may use."""


# TRL's parser, with errors of one line. Values of files are read as on a command line, so argparse checks their types.


class Parser(TrlParser):
    """TRL's parser, with errors of one line instead of a list of four hundred flags."""

    def __init__(self, command: str) -> None:
        kinds: Any = (RunConfig, KLConfig, PolicyConfig)
        super().__init__(kinds, prog=f"klgrad {command}", allow_abbrev=False)
        self.actions = {action.dest: action for action in self._actions if action.dest != "help"}
        self.pristine = {name: action.default for name, action in self.actions.items()}

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise SettingError("settings of the right kind", message, f"see {self.prog} --help")

    def named(self, values: dict[Any, Any], where: str) -> dict[str, Any]:
        """Settings of a file, under their full names."""
        found = {str(ALIASES.get(key, key)): value for key, value in values.items()}
        for name in found:
            if name not in self.actions:
                raise UnknownNameError(f"setting in {where}", name, {*self.actions, *ALIASES})
        return found

    def flags(self, values: dict[str, Any]) -> list[str]:
        """Settings as on a command line; None stands for the default. A list that a flag cannot give becomes one."""
        words: list[str] = []
        for name, value in values.items():
            if isinstance(value, list) and self.actions[name].nargs == "+":
                words += [f"--{name}", *map(str, value)]
            elif isinstance(value, list) and name in RunConfig.__dataclass_fields__:
                words.append(f"--{name}={','.join(map(str, value))}")
            elif isinstance(value, list):
                self.set_defaults(**{name: value})
            elif value is not None:
                words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
        return words

    def given(self, arguments: list[str]) -> dict[str, Any]:
        """Values of these arguments, without defaults."""
        before = {action: action.default for action in self._actions}
        for action in self._actions:
            action.default = argparse.SUPPRESS
        try:
            return vars(self.parse_known_args(arguments)[0])
        finally:
            for action, default in before.items():
                action.default = default


# Read settings from the command line, a YAML file and a preset. An unknown name is an error with similar names.

NOT_RECORDED = frozenset({"resume", "dry_run", "overwrite", "num_processes", "accelerate_config", "help", "output_dir"})
"""Settings of one call, which a resumed run does not inherit."""


@dataclass(frozen=True)
class Parsed:
    """Values by name, each of a known name; whether they fit together is not checked yet."""

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
        The settings, checked by argparse, by TRL and by this package.

    Example:
        >>> parse("train", ["--quick", "--kl_coef", "0.1"]).training.kl_coef
        0.1
    """
    return settings_of(read(command, arguments))


def read(command: str, arguments: list[str]) -> Parsed:
    """Parse names and values. Checks of combinations depend on the number of processes, and follow in `settings_of`."""
    parser, file, (files, arguments) = Parser(command), {}, _take(arguments, "config")
    if files["config"] is not None:
        file = parser.named(_read_settings(files["config"]), "the configuration file")
        arguments = [*parser.flags(file), *arguments]
    given = parser.given(arguments)
    output = str(given.get("output_dir") or f"runs/{command}")
    preset, recorded = preset_of(command, given), {}
    if given.get("resume"):  # `run.json` contains the preset of that time
        preset, recorded = {}, parser.named(recorded_settings(Path(output), command), f"{output}/run.json")
        check_confirmed(recorded, given, Path(output), command)
        if "num_train_epochs" in given:
            recorded.pop("max_steps", None)  # otherwise TRL would ignore the epochs
    preset |= machine_settings()
    parser.set_defaults(**{**preset, "output_dir": output})
    arguments = [*parser.flags({name: x for name, x in recorded.items() if name not in file}), *arguments]
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [name for name in unknown if name.startswith("-")] or unknown
        raise UnknownNameError("setting", names[0].lstrip("-").split("=")[0], {*parser.actions, *ALIASES})
    return Parsed(command, arguments, parser, vars(values), frozenset({*preset, *recorded, *given}))


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
    named = dict.fromkeys(word for mark, word in words if word in parser.actions and (mark or not word.isalpha()))
    about = f": {', '.join(f'`{name}`' for name in named)}" if named else ""
    remedy = f"change {'one of them' if len(named) > 1 else 'it'}; see {parser.prog} --help-all"
    return SettingError(f"settings that fit together{about}", " ".join(text.split()), remedy)


def _take(arguments: list[str], *names: str) -> tuple[dict[str, str | None], list[str]]:
    """The values of these flags, None for those that are not given, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?", const="")
    values, rest = parser.parse_known_args(arguments)
    return vars(values), rest


def _read_settings(path: str) -> dict[Any, Any]:
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise SettingError("a YAML file of settings", f"{path!r}: {text}", "--config FILE names a YAML file") from error
    if not isinstance(found, dict):
        received = f"{path}: {type(found).__name__}"
        raise SettingError("names and values in YAML", received, "write one `name: value` per line")
    return found


# Start the same command again in several processes, by `accelerate launch`.

LAUNCHED = "KLGRAD_LAUNCHED"


def needs_launch(parsed: Parsed) -> bool:
    """Whether this process should only start others."""
    if LAUNCHED in os.environ or "LOCAL_RANK" in os.environ or parsed.values["dry_run"]:
        return False
    return parsed.values["num_processes"] > 1 or parsed.values["accelerate_config"] is not None


def processes(parsed: Parsed) -> int:
    """The number of processes that would train."""
    count, config = parsed.values["num_processes"], _accelerate_config(parsed)
    if count > 1 or config is None:
        return count
    found = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    return int(found.get("num_processes", 1)) if isinstance(found, dict) else 1


def command(parsed: Parsed, arguments: list[str]) -> list[str]:
    """The command line to execute; it has the same settings, except those that choose the processes."""
    config, count = _accelerate_config(parsed), parsed.values["num_processes"]
    chosen = [] if config is None else ["--config_file", config]
    if count > 1:
        chosen += ["--num_processes", str(count)]
    if config is None:
        chosen += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        chosen += ["--multi_gpu"]  # on a CPU too: with --cpu accelerate starts one process only
    _, others = _take(arguments, "num_processes", "accelerate_config")
    return [sys.executable, "-m", "accelerate.commands.launch", *chosen, "-m", "klgrad", parsed.command, *others]


def execute(parsed: Parsed, arguments: list[str]) -> None:
    """Replace this process by the launcher; does not return."""
    found = command(parsed, arguments)
    os.environ[LAUNCHED] = "1"
    os.execv(found[0], found)


def _accelerate_config(parsed: Parsed) -> str | None:
    config = parsed.values["accelerate_config"]
    if config is not None and not Path(config).is_file():
        received = f"{config}, no such file"
        raise SettingError("a configuration of accelerate", received, "write one with `accelerate config`")
    return config
