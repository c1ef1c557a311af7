"""The code shared by `klgrad train` and `klgrad distill`: parsing by TRL's parser, the help, and the exit status."""

import argparse
import importlib.util
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import MissingExtraError
from .console import INTERRUPTED, stderr, stdout
from .settings_help import rows

SETTINGS: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For typer: leave every flag to TRL's parser."""

USAGE = {
    "train": (
        "Train a model on rewards with a declared KL term, using TRL.",
        "klgrad train --quick",
        "klgrad train --model Qwen/Qwen2.5-7B-Instruct --task prompts.jsonl --reward my_rewards.py:correct",
    ),
    "distill": (
        "Train a student towards its teacher, on the student's own completions, using TRL.",
        "klgrad distill --quick",
        "klgrad distill --teacher Qwen/Qwen2.5-3B-Instruct --model Qwen/Qwen2.5-0.5B-Instruct --task prompts.jsonl",
    ),
}
COMMAND = (
    "output_dir", "quick", "dry_run", "resume", "overwrite", "weights_only", "num_processes", "accelerate_config",
)  # fmt: skip
MODEL = ("model_name_or_path", "teacher", "student_layers", "dtype", "attn_implementation", "use_peft", "lora_r")
TRAINING = (
    "max_steps", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps",
    "num_generations", "max_completion_length", "temperature", "loss_type", "num_iterations", "use_vllm", "report_to",
    "save_steps", "seed",
)  # fmt: skip


def train_or_distill(command: str, arguments: list[str]) -> None:
    """Parse, launch if several processes are requested, train, and exit with the status of the run."""
    if "--help" in arguments or "-h" in arguments:
        stdout().print(_help(command))
        return
    if importlib.util.find_spec("trl") is None:
        raise MissingExtraError("trl, to train", "no such package", "pip install 'klgrad[train]'")
    if "--help_all" in arguments or "--help-all" in arguments:
        stdout().print(_help_all(command))
        return
    from ..training.launch import execute, is_needed, processes
    from ..training.run import run
    from ..training.settings.parse import read, settings_of

    parsed = read(command, arguments)
    if is_needed(parsed):
        execute(parsed, arguments)
    settings = settings_of(parsed, processes(parsed) if parsed.values["dry_run"] else None)
    try:
        status = run(settings, stdout(), stderr())
    except KeyboardInterrupt:  # before training has begun, when there is nothing to save
        status = INTERRUPTED
    if status:
        raise typer.Exit(status)


def _help(command: str) -> RenderableType:
    """The settings that matter most. Needs neither TRL nor torch."""
    parts = [*_head(command), *(part for title, shown in rows(command) for part in _section(title, shown))]
    notes = (
        "Defaults in brackets: with the embedded model. --dry-run describes the run.\n"
        "Every setting of TRL's GRPOConfig can be given: --help-all lists all, in full."
    )
    missing = "" if importlib.util.find_spec("trl") else "\nTRL is not installed: pip install 'klgrad[train]'"
    return Group(*parts, "", Text(f"{notes}{missing}"))


def _help_all(command: str) -> RenderableType:
    """Every setting with its full text, as TRL's parser has them."""
    from ..models.embedded import EMBEDDED
    from ..training.settings.presets import preset_of
    from ..training.settings.setting_parser import Parser

    actions = {action.dest: action for action in Parser(command)._actions if action.dest != "help"}
    model = EMBEDDED if command == "train" else "the teacher with two thirds of its layers"
    defaults = {"output_dir": f"runs/{command}", "model_name_or_path": model, **preset_of(command, {})}
    parts = _head(command)
    for title, names in _sections(list(actions)).items():
        parts += _section(title, [_row(actions[name], defaults) for name in names])
    note = "Defaults in brackets are those for the embedded model; --dry-run describes the run that your settings give."
    return Group(*parts, "", Text(note))


def _head(command: str) -> list[RenderableType]:
    text, *examples = USAGE[command]
    return [
        Text(f"Usage: klgrad {command} [--config FILE.yaml] [--NAME VALUE]...\n", style="bold"),
        Text(text),
        *(Text(f"  {example}", style="dim") for example in examples),
    ]


def _section(title: str, shown: list[tuple[str, str]]) -> list[RenderableType]:
    return ["", Text(title, style="bold"), _table(shown)]


def _sections(known: list[str]) -> dict[str, list[str]]:
    from ..training.settings.run_config import RunConfig
    from ..trl import KLConfig

    placed = {*COMMAND, *MODEL, *TRAINING}
    found = {
        "The command": list(COMMAND),
        "Data and evaluation": [name for name in RunConfig.__dataclass_fields__ if name not in placed],
        "The model": list(MODEL),
        "The KL": [name for name in KLConfig.__annotations__ if name in known and name not in placed],
        "Training (settings of TRL)": list(TRAINING),
    }
    shown = {name for names in found.values() for name in names}
    return found | {"All other settings of TRL and transformers": sorted(set(known) - shown)}


def _row(action: Any, defaults: dict[str, Any]) -> tuple[str, str]:
    """A setting's flag, and its text with choices and default."""
    flag = min(action.option_strings, key=lambda s: ("-" in s.strip("-"), len(s)))
    text = " ".join((action.help or "").split())
    choices = f" One of {', '.join(map(str, action.choices))}." if action.choices else ""
    default = defaults.get(action.dest, action.default)
    shown = "" if default is None or default is False or default == argparse.SUPPRESS else f" [{default}]"
    return flag, f"{text}{choices}{shown}"


def _table(shown: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for flag, text in shown:
        table.add_row(Text(flag), Text(text))
    return table
