"""What `klgrad train` and `klgrad distill` share: TRL's parser instead of typer's, and its exit status."""

import importlib.util
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import MissingExtraError
from .console import INTERRUPTED, stderr, stdout

SETTINGS: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For typer: every flag is left to the parser."""

USAGE = {
    "train": (
        "Train a model with rewards, under the KL that was meant, on TRL.",
        "klgrad train --quick",
        "klgrad train --model Qwen/Qwen2.5-7B-Instruct --task prompts.jsonl --reward my_rewards.py:correct",
    ),
    "distill": (
        "Bring a student near its teacher, on the student's own completions, on TRL.",
        "klgrad distill --quick",
        "klgrad distill --teacher Qwen/Qwen2.5-3B-Instruct --model Qwen/Qwen2.5-0.5B-Instruct --task prompts.jsonl",
    ),
}
OFTEN = (
    "output_dir", "max_steps", "num_train_epochs", "learning_rate", "per_device_train_batch_size",
    "gradient_accumulation_steps", "num_generations", "max_completion_length", "temperature", "loss_type",
    "num_iterations", "use_vllm", "report_to", "save_steps", "seed",
)  # fmt: skip
MODEL = ("model_name_or_path", "dtype", "attn_implementation", "use_peft", "lora_r")


def train_or_distill(command: str, arguments: list[str]) -> None:
    """Parse, launch if several processes are wanted, train, and exit with the run's status."""
    if importlib.util.find_spec("trl") is None:
        raise MissingExtraError("trl, to train", "no such package", "pip install 'klgrad[train]'")
    if "--help" in arguments or "-h" in arguments:
        stdout().print(_help(command, all_of_it=False))
        return
    if "--help_all" in arguments or "--help-all" in arguments:
        stdout().print(_help(command, all_of_it=True))
        return
    from ..training.launch import execute, is_needed, processes
    from ..training.run import run
    from ..training.settings.parse import read, settings_of

    asked = read(command, arguments)
    if is_needed(asked):
        execute(asked, arguments)
    settings = settings_of(asked, processes(asked) if asked.values["dry_run"] else None)
    try:
        status = run(settings, stdout(), stderr())
    except KeyboardInterrupt:  # before training began, when there is nothing to save
        status = INTERRUPTED
    if status:
        raise typer.Exit(status)


def _help(command: str, *, all_of_it: bool) -> RenderableType:
    from ..training.settings.parse import Parser
    from ..training.settings.run_config import RunConfig
    from ..trl import KLConfig

    parser = Parser(command)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    ours = list(RunConfig.__dataclass_fields__)
    declared = [name for name in KLConfig.__annotations__ if name in actions]
    sections = {"The run": ours, "The KL": declared, "The model": list(MODEL), "Of TRL's": list(OFTEN)}
    if all_of_it:
        told = {name for names in sections.values() for name in names}
        sections["All others, of TRL and transformers"] = sorted(set(actions) - told)
    text, *examples = USAGE[command]
    parts: list[RenderableType] = [
        Text(f"Usage: klgrad {command} [--config FILE.yaml] [--NAME VALUE]...\n", style="bold"),
        Text(text),
        *(Text(f"  {example}", style="dim") for example in examples),
    ]
    for title, names in sections.items():
        parts += ["", Text(title, style="bold"), _options([actions[name] for name in names])]
    return Group(*parts, "", Text("Every setting of TRL's GRPOConfig can be given: --help-all names them."))


def _options(actions: list[Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for action in actions:
        flag = min(action.option_strings, key=lambda s: ("-" in s.strip("-"), len(s)))
        choices = f" One of {', '.join(map(str, action.choices))}." if action.choices else ""
        default = "" if action.default in (None, False, "==SUPPRESS==") else f" [{action.default}]"
        table.add_row(Text(flag), Text(f"{' '.join((action.help or '').split())}{choices}{default}"))
    return table
