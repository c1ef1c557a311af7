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
    "output_dir", "quick", "dry_run", "resume", "overwrite", "num_processes", "accelerate_config",
)  # fmt: skip
MODEL = ("model_name_or_path", "teacher", "student_layers", "dtype", "attn_implementation", "use_peft", "lora_r")
TRAINING = (
    "max_steps", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps",
    "num_generations", "max_completion_length", "temperature", "loss_type", "num_iterations", "use_vllm", "report_to",
    "save_steps", "seed",
)  # fmt: skip
SHORT = {
    "output_dir": "Folder for checkpoints, history, figure and model.",
    "dtype": "Type in which the weights are loaded.",
    "attn_implementation": "Attention implementation, for example flash_attention_2.",
    "use_peft": "Train adapters (LoRA) instead of all weights.",
    "lora_r": "Rank of the adapters.",
    "max_steps": "Number of updates; takes precedence over `num_train_epochs`.",
    "num_train_epochs": "Number of passes over the prompts.",
    "learning_rate": "Initial learning rate.",
    "per_device_train_batch_size": "Completions per process in one forward pass.",
    "gradient_accumulation_steps": "Forward passes per update.",
    "num_generations": "Completions per prompt.",
    "max_completion_length": "Longest completion, in tokens.",
    "temperature": "Temperature of sampling.",
    "loss_type": "How the policy loss is computed and averaged; `dapo` divides by all tokens of an update.",
    "num_iterations": "Updates on each batch of completions.",
    "use_vllm": "Generate with vLLM, which has to be installed.",
    "report_to": "Where to send the logs: `all`, `none`, or names such as `wandb`.",
    "save_steps": "Updates between checkpoints.",
    "seed": "Seed of every random number.",
}
"""Settings of TRL and transformers in one sentence; `--help-all` has their own texts."""


def train_or_distill(command: str, arguments: list[str]) -> None:
    """Parse, launch if several processes are requested, train, and exit with the status of the run."""
    if importlib.util.find_spec("trl") is None:
        raise MissingExtraError("trl, to train", "no such package", "pip install 'klgrad[train]'")
    if "--help" in arguments or "-h" in arguments:
        stdout().print(_help(command, everything=False))
        return
    if "--help_all" in arguments or "--help-all" in arguments:
        stdout().print(_help(command, everything=True))
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


def _help(command: str, *, everything: bool) -> RenderableType:
    from ..training.model.embedded import EMBEDDED
    from ..training.settings.presets import preset_of
    from ..training.settings.setting_parser import Parser

    actions = {action.dest: action for action in Parser(command)._actions if action.dest != "help"}
    model = EMBEDDED if command == "train" else "the teacher with two thirds of its layers"
    defaults = {"output_dir": f"runs/{command}", "model_name_or_path": model, **preset_of(command, {})}
    text, *examples = USAGE[command]
    parts: list[RenderableType] = [
        Text(f"Usage: klgrad {command} [--config FILE.yaml] [--NAME VALUE]...\n", style="bold"),
        Text(text),
        *(Text(f"  {example}", style="dim") for example in examples),
    ]
    for title, names in _sections(list(actions), everything=everything).items():
        rows = [_row(actions[name], defaults, in_full=everything) for name in names]
        parts += ["", Text(title, style="bold"), _table(rows)]
    notes = (
        "Defaults in brackets are those for the embedded model; --dry-run describes the run that your settings give."
    )
    if not everything:
        notes += "\nEvery setting of TRL's GRPOConfig can be given: --help-all lists all, with their full texts."
    return Group(*parts, "", Text(notes))


def _sections(known: list[str], *, everything: bool) -> dict[str, list[str]]:
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
    if everything:
        shown = {name for names in found.values() for name in names}
        found["All other settings of TRL and transformers"] = sorted(set(known) - shown)
    return found


def _row(action: Any, defaults: dict[str, Any], *, in_full: bool) -> tuple[str, str]:
    """A setting's flag, and its text with choices and default."""
    flag = min(action.option_strings, key=lambda s: ("-" in s.strip("-"), len(s)))
    text = " ".join((action.help or "").split())
    text = text if in_full else SHORT.get(action.dest, text)
    choices = f" One of {', '.join(map(str, action.choices))}." if action.choices else ""
    default = defaults.get(action.dest, action.default)
    shown = "" if default is None or default is False or default == argparse.SUPPRESS else f" [{default}]"
    return flag, f"{text}{choices}{shown}"


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for flag, text in rows:
        table.add_row(Text(flag), Text(text))
    return table
