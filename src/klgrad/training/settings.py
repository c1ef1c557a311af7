"""Settings of a run: command line, file, preset and recorded run, checked; and the processes that it asks for."""

import argparse
import json
import os
import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl.scripts.utils import TrlParser
from trl.trainer.model_config import ModelConfig

from ..audit.subject import find
from ..core.term import KLTerm
from ..errors import KlgradError, RunError, SettingError, UnknownNameError
from ..models import EMBEDDED as EMBEDDED_MODEL
from ..support import Json
from ..trl import KLConfig
from ..trl.config import TERM_FIELDS, MeaningWarning, resolve_config, setting, teachers_of
from .run_folder import recorded_settings

# Settings that make a run execute code. With `--resume` they have to be given again.
#
# A run folder may come from somebody else, so `run.json` alone must not cause the execution of a reward function or of
# code that comes with a model.


def code_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings that make a run execute code.

    Example:
        >>> code_settings({"reward": "mine.py:score", "kl_coef": 0.1, "attn_implementation": "owner/kernel"})
        {'reward': 'mine.py:score', 'attn_implementation': 'owner/kernel'}
    """
    return {name: value for name, value in settings.items() if _executes(name, value)}


def check_confirmed(recorded: Mapping[str, object], given: Mapping[str, object], folder: Path, command: str) -> None:
    """Refuse code that only `run.json` names, and neither the command line nor the file of `--config`."""
    missing = {name: value for name, value in code_settings(recorded).items() if name not in given}
    if missing:
        flags = ", ".join(" ".join([f"--{name}", *_words(value)]) for name, value in missing.items())
        raise RunError(
            "code that is given again with --resume, because a run folder may come from somebody else",
            f"{folder}/run.json, which names {flags}",
            f"if you trust it: {resume_command(command, folder, recorded)}",
        )


def resume_command(command: str, folder: Path, settings: Mapping[str, object], *more: str) -> str:
    words = ["klgrad", command, "--output_dir", str(folder), "--resume", *more]
    for name, value in code_settings(settings).items():
        words += [f"--{name}", *_words(value)]
    return shlex.join(words)


CODE = ("trust_remote_code", "custom_generate", "use_kernels")
KERNELS = ("attn_implementation", "experts_implementation", "kernel_config")
"""Settings that may name a kernel on the hub, `owner/name`, which would be downloaded."""


def _executes(name: str, value: object) -> bool:
    if name in KERNELS:
        return "/" in str(value)
    if name in ("reward", "kl", *CODE):
        return bool(value)
    return any(word in str(value) for word in (*CODE, *KERNELS))  # inside `model_init_kwargs`, for example


def _words(value: object) -> list[str]:
    if value is True:
        return []
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


# Default settings by command, model and machine, where they differ from TRL's.

DEFAULTS: Json = {
    "logging_steps": 1,
    "save_steps": 50,
    "save_total_limit": 2,
    "disable_tqdm": True,
    "disable_dropout": True,  # dropout in the policy alone would add to the KL to the reference
}
"""For every model."""

EMBEDDED: Json = {
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

QUICK: Json = {
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

DISTILL: Json = {
    "kl_coef": 1.0,
    "kl_estimator": "exact",
    "kl_discount": 0.0,  # with discount 1 and a high learning rate a student learns to end early
    "teacher": EMBEDDED_MODEL,
}
"""For `klgrad distill`, where the KL is the whole objective."""

BATCHES = 40
"""Number of batches of completions that a student of the embedded model samples, however often each is used."""

STUDENT: Json = {"learning_rate": 3e-4, "max_steps": BATCHES}
"""A student with two thirds of the layers is far from its teacher, and needs a high learning rate."""

REUSED: Json = {"num_iterations": 8, "learning_rate": 6e-4, "lr_scheduler_type": "cosine"}
"""The same number of completions, with eight updates each: the nearest in docs/experiments/stale-distillation.md.

Summed over the vocabulary, the KL of a token needs no importance weights on completions of an earlier policy.
"""

QUICK_STUDENT: Json = {"learning_rate": 1e-4, "max_steps": 8, "save_steps": 4, "eval_every": 4}

QUICK_REUSED: Json = {"num_iterations": 2, "learning_rate": 2e-4, "max_steps": 12, "save_steps": 6, "eval_every": 6}
"""Few batches: eight updates with each would leave one or two."""

UNGROUPED: Json = {"num_generations": 2}
"""Without a reward nothing is compared within a group: use more prompts, with the fewest completions TRL allows."""

REUSABLE: Json = {
    "kl_estimator": "exact", "kl_divergence": "reverse", "kl_placement": "loss", "kl_baseline": "none",
    "kl_discount": 0, "kl": None, "kl_cell": None, "kl_top_k": None, "reward": None, "rollout_lag": 0,
    "teacher_weights": None, "teacher_column": None, "teacher_prompt": None,
}  # fmt: skip
"""With these values the exact reverse KL of each token is the whole objective: old samples need no weights."""


def preset_of(command: str, given: Json) -> Json:
    """The default settings of `train` or `distill`. `given` chooses among the presets, and takes precedence over them.

    Example:
        >>> preset_of("distill", {"quick": True})["max_steps"]
        12
    """
    name = "teacher" if command == "distill" else "model_name_or_path"
    first = next(iter(teachers_of(given.get(name, EMBEDDED_MODEL)).values()), "")
    embedded = first.partition(":")[0] == EMBEDDED_MODEL
    preset = {**DEFAULTS, **(EMBEDDED if embedded else {}), **(QUICK if given.get("quick") else {})}
    if command == "distill":
        preset |= _distillation_preset(given, embedded)
    if "num_train_epochs" in given:
        preset.pop("max_steps", None)  # otherwise TRL would ignore the epochs
    return preset


def _distillation_preset(given: Json, embedded: bool) -> Json:
    preset, whole = dict(DISTILL), given.get("kl_cell") or given.get("kl")
    if given.get("kl_level") == "token" or whole:
        preset.pop("kl_discount")  # at token level there is no future to discount, and a cell has its own
    if whole:
        preset.pop("kl_estimator")
    if "reward" not in given and given.get("kl_baseline", "none") == "none":
        preset |= UNGROUPED
    chosen = preset | given
    plain = all(chosen.get(name, value) == value for name, value in REUSABLE.items())
    reused = embedded and plain and given.get("num_iterations") != 1
    if given.get("quick"):
        return preset | (QUICK_REUSED if reused else QUICK_STUDENT)
    if reused:  # with updates for all batches
        uses = given.get("num_iterations", REUSED["num_iterations"])
        return preset | REUSED | {"max_steps": BATCHES * uses}
    return preset | (STUDENT if embedded else {})


def machine_settings() -> Json:
    """Settings of this machine: TRL's default is bf16, which a CPU may not support."""
    import torch

    return {} if torch.cuda.is_available() else {"bf16": False, "use_cpu": True}


# The settings of `klgrad train` and `klgrad distill` beside those of TRL.


@dataclass
class RunConfig:
    """Data, evaluation, and how the command behaves."""

    task: str = setting(
        "arithmetic",
        "What to train on: `arithmetic`, or some of its tasks, separated by commas (addition, subtraction, "
        "multiplication, maximum, word-problems); `reasoning-gym:NAME`; or a dataset with a `prompt` column (a "
        "JSON, JSONL or Parquet file, a folder, or a name on the hub).",
    )
    eval_task: str | None = setting(
        None, "What to evaluate on. Default: held-out prompts; those of all tasks for built-in ones."
    )
    reward: str | None = setting(
        None,
        "Reward functions as TRL calls them, separated by commas: package.module:function or path/file.py:function.",
    )
    kl: str | None = setting(
        None,
        "A `KLTerm` of yours in place of the settings that declare one: path/file.py:name or package.module:name.",
    )
    digits: int = setting(1, "Digits of the numbers in the built-in tasks, 1 to 9.")
    train_size: int = setting(2048, "Number of training questions of a built-in task.")
    eval_size: int = setting(64, "Number of held-out prompts of each task.")
    eval_every: int = setting(20, "Updates between evaluations; 0 evaluates only before and after training.")
    eval_greedy: bool = setting(False, "Evaluate with greedy decoding too, beside sampling as in training.")
    dataset_config: str | None = setting(None, "Configuration of a dataset on the hub.")
    dataset_split: str = setting("train", "Split of the dataset to train on.")
    dataset_eval_split: str | None = setting(None, "Split of the dataset to evaluate on. Default: `dataset_split`.")
    quick: bool = setting(False, "Preset of a small run: about ten minutes on a CPU.")
    dry_run: bool = setting(False, "Print what would be trained and the memory it needs, and exit.")
    resume: bool = setting(
        False, "Continue the run in `output_dir` from its last complete checkpoint, with its settings."
    )
    overwrite: bool = setting(False, "Replace the run in `output_dir`.")
    weights_only: bool = setting(
        False, "Remove the checkpoints of a finished run; --resume cannot make it longer then."
    )
    num_processes: int = setting(1, "Number of processes; more than 1 are started by `accelerate launch`.")
    accelerate_config: str | None = setting(
        None, "Configuration file of accelerate (FSDP, DeepSpeed, several nodes) to launch with."
    )

    def __post_init__(self) -> None:
        least = {"digits": 1, "train_size": 1, "eval_size": 0, "eval_every": 0, "num_processes": 1}
        for name, bound in least.items():
            if (value := getattr(self, name)) < bound:
                raise SettingError(f"`{name}` >= {bound}", f"{value}", f"see klgrad train --help-all for `{name}`")


@dataclass
class PolicyConfig(ModelConfig):
    """TRL's `ModelConfig`, with `--model` as a short name for its first field."""

    model_name_or_path: str | None = setting(
        None,
        "A name on the hub, or a folder; `smollm2` is embedded, without network; NAME:20 keeps 20 layers.",
        aliases=["--model"],
    )


@dataclass
class RunSettings:
    """All settings of a command: of this package, of the trainer, of the model.

    `given` has the values from the command line, a file or a preset, by name, for `run.json`.
    """

    command: str
    run: RunConfig
    training: KLConfig
    policy: PolicyConfig
    given: Json

    @property
    def rewarded(self) -> bool:
        """Whether the run is trained on a reward; a distillation is only if `reward` is given."""
        return self.command == "train" or self.run.reward is not None


ALIASES = {"model": "model_name_or_path"}
"""Short names that a file of settings may use."""


# TRL's parser, with errors of one line. Json of files are read as on a command line, so argparse checks their types.

UNSET = object()


class Parser(TrlParser):
    """TRL's parser, with errors of one line instead of a list of four hundred flags."""

    def __init__(self, command: str) -> None:
        prog = f"klgrad {command}"
        usage = f"{prog} [--config FILE.yaml] [--NAME VALUE]..."
        super().__init__((RunConfig, KLConfig, PolicyConfig), prog=prog, usage=usage, allow_abbrev=False)  # pyright: ignore[reportArgumentType]
        self.add_argument("--config", help="A YAML file of settings.")
        self.actions = {action.dest: action for action in self._actions if action.dest != "help"}

    def error(self, message: str) -> NoReturn:
        raise SettingError("settings of the right kind", message, f"see {self.prog} --help")

    def read(self, arguments: list[str]) -> tuple[Json, list[str]]:
        """The settings of a command line, without defaults, and the words that are none."""
        unset = argparse.Namespace(**dict.fromkeys(self.actions, UNSET))
        values, unknown = self.parse_known_args(arguments, unset)
        return {name: x for name, x in vars(values).items() if x is not UNSET}, unknown

    def convert(self, values: Json) -> Json:
        """Settings of a file, as a command line would give them; None stands for the default."""
        words: list[str] = []
        lists: Json = {}  # that no flag can give
        for name, value in values.items():
            if isinstance(value, list) and self.actions[name].nargs == "+":
                words += [f"--{name}", *map(str, value)]
            elif isinstance(value, list) and name in RunConfig.__dataclass_fields__:
                words.append(f"--{name}={','.join(map(str, value))}")
            elif isinstance(value, list):
                lists[name] = value
            elif value is not None:
                words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
        return lists | self.read(words)[0]

    def name(self, values: Mapping[str, object] | dict[object, object], where: str) -> Json:
        """Settings of a file, under their full names."""
        named = {ALIASES.get(str(key), str(key)): value for key, value in values.items()}
        for name in named:
            if name not in self.actions or name == "config":
                raise UnknownNameError(f"setting in {where}", name, {*self.actions, *ALIASES})
        return named


# Read settings from the command line, a YAML file and a preset. An unknown name is an error with similar names.

NOT_RECORDED = frozenset({"resume", "dry_run", "overwrite", "output_dir", "num_processes", "accelerate_config"})
"""Settings of one call, which a resumed run does not inherit."""


def parse(command: str, arguments: list[str]) -> RunSettings:
    """The checked settings of a command line.

    Precedence: flags, then the file of `--config`, then a preset, then TRL's defaults.

    Example:
        >>> parse("train", ["--quick", "--kl_coef", "0.1"]).training.kl_coef
        0.1
    """
    parser, values = read(command, arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MeaningWarning)  # the start of a run and --dry-run print the same
            run, training, policy = parser.parse_dict(values)
            if values.get("kl") is not None:
                training = resolve_config(training, term_of(values))  # pyright: ignore[reportArgumentType]
    except KlgradError:
        raise
    except Exception as error:  # the checks of TRL and transformers raise errors of any type
        text = " ".join(str(error).split()) or type(error).__name__
        raise SettingError("settings that fit together", text, f"see {parser.prog} --help-all") from error
    recorded = {name: value for name, value in values.items() if name not in NOT_RECORDED}
    return RunSettings(command, run, training, policy, recorded)  # pyright: ignore[reportArgumentType]


def read(command: str, arguments: list[str]) -> tuple[Parser, Json]:
    """Values by name, not yet checked together: from the command line, a file, `run.json` or a preset."""
    parser = Parser(command)
    file: Json = {}
    given, unknown = parser.read(arguments)
    if "config" in given:
        file = parser.name(_read_file(given.pop("config")), "the configuration file")
        given = parser.convert(file) | given
    output = str(given.get("output_dir") or f"runs/{command}")
    base = preset_of(command, given) | machine_settings() | {"output_dir": output}
    if given.get("resume"):  # `run.json` contains the preset of that time
        recorded = parser.name(recorded_settings(Path(output), command), f"{output}/run.json")
        check_confirmed(recorded, given, Path(output), command)
        recorded = {name: x for name, x in recorded.items() if name not in file}
        if "num_train_epochs" in given:
            recorded.pop("max_steps", None)  # otherwise TRL would ignore the epochs
        base = machine_settings() | {"output_dir": output} | parser.convert(recorded)
    if unknown:
        names = [name for name in unknown if name.startswith("-")] or unknown
        raise UnknownNameError("setting", names[0].lstrip("-").split("=")[0], {*parser.actions, *ALIASES})
    return parser, base | given


def _read_file(path: str) -> dict[object, object]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise SettingError("a YAML file of settings", f"{path!r}: {text}", "--config FILE names a YAML file") from error
    if not isinstance(content, dict):
        received = f"{path}: {type(content).__name__}"
        raise SettingError("names and values in YAML", received, "write one `name: value` per line")
    return content


def term_of(values: Json) -> KLTerm:
    """A user's term, which takes the place of the settings that declare one."""
    spec = str(values["kl"])
    if beside := [name for name in (*TERM_FIELDS, "kl_ratio_bound", "kl_cell") if name in values]:
        raise SettingError("no setting of the term beside `kl`", ", ".join(beside), f"write it in the term of {spec}")
    term = find(spec)
    if not isinstance(term, KLTerm):
        raise SettingError(
            "`kl` as the name of a KLTerm", f"{spec}, a {type(term).__name__}", "write KLTerm(...) there"
        )
    return term


# Several processes, by `accelerate launch`. Each parses for itself, since checks depend on the number of processes.

LAUNCHED = "KLGRAD_LAUNCHED"
"""Set in the environment of processes that were launched."""


def described_processes(command: str, arguments: list[str]) -> int | None:
    """How many processes a dry run describes, which starts none; None if it does not say."""
    _, values = read(command, arguments)
    of_file: Any = _read_file(values["accelerate_config"]) if "accelerate_config" in values else {}
    asked = values.get("num_processes") or of_file.get("num_processes")
    return asked if values.get("dry_run") else None


def launch_command(command: str, arguments: list[str]) -> list[str] | None:
    """The command with `accelerate launch` before it; None if this process is to train, or only to describe."""
    _, values = read(command, arguments)
    config, number = values.get("accelerate_config"), values.get("num_processes", 1)
    if values.get("dry_run") or not (config or number > 1) or {LAUNCHED, "LOCAL_RANK"} & set(os.environ):
        return None
    # --multi_gpu on a CPU too: with --cpu accelerate starts one process only.
    options = ["--multi_gpu", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    options = ["--config_file", config] if config else options
    options += [f"--num_processes={number}"] if number > 1 else []
    return [sys.executable, "-m", "accelerate.commands.launch", *options, "-m", "klgrad", command, *arguments]
