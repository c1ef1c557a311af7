"""`klgrad train`, `klgrad distill` and `klgrad compare`."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import MissingExtraError
from ..support import Json, text_table
from .console import INTERRUPTED, argument, beside, deliver, stderr, stdout

# The settings that `klgrad train --help` and `klgrad distill --help` show, in one line of 80 columns each.
#
# They are listed here and not read from TRL's parser, whose import takes seconds and needs TRL. A test compares names
# and defaults with the parser. `--help-all` reads the parser.


class HelpRow(NamedTuple):
    """One setting.

    Attributes:
        flag: without the dashes.
        text: what it does.
        default: with the embedded model, as text; empty for none.
        in_distill: the default of `klgrad distill`, where that is another one.
    """

    flag: str
    text: str
    default: str = ""
    in_distill: str = ""


SECTIONS: dict[str, tuple[HelpRow, ...]] = {
    "The command": (
        HelpRow("output_dir", "Folder of the run", "runs/train", "runs/distill"),
        HelpRow("quick", "Preset of a small run: about ten minutes on a CPU"),
        HelpRow("dry_run", "Print what would be trained, and exit"),
        HelpRow("resume", "Continue the run in output_dir"),
        HelpRow("overwrite", "Replace the run in output_dir"),
        HelpRow("weights_only", "Remove the checkpoints of a finished run"),
        HelpRow("num_processes", "More than 1 are started by accelerate", "1"),
        HelpRow("accelerate_config", "Configuration of accelerate to launch with"),
    ),
    "Data and evaluation": (
        HelpRow("task", "Built-in task, or dataset with a `prompt` column", "arithmetic"),
        HelpRow("reward", "Reward functions, package.module:function or file.py:function"),
        HelpRow("eval_task", "What to evaluate on, if not held-out prompts"),
        HelpRow("eval_size", "Held-out prompts of each task", "64"),
        HelpRow("eval_every", "Updates between evaluations", "20"),
        HelpRow("eval_greedy", "Evaluate with greedy decoding too"),
        HelpRow("dataset_split", "Split of the dataset to train on", "train"),
    ),
    "The model": (
        HelpRow("model", "Hub name or folder; NAME:20 keeps 20 layers", "smollm2", "smollm2:20"),
        HelpRow("teacher", "Distil from this model, or several: A,B", "", "smollm2"),
        HelpRow("teacher_weights", "Weight of each teacher's divergence"),
        HelpRow("teacher_column", "Column that names each prompt's teacher"),
        HelpRow("teacher_prompt", "Column with the prompt that the teacher sees"),
        HelpRow("dtype", "auto, bfloat16, float16 or float32", "float32"),
        HelpRow("use_peft", "Train adapters (LoRA) instead of all weights"),
    ),
    "The KL": (
        HelpRow("kl_coef", "β, the weight of the KL", "0.02", "1.0"),
        HelpRow("kl_placement", "loss, advantage or reward", "loss"),
        HelpRow("kl_divergence", "reverse, forward, jensen-shannon(BETA), ...", "reverse"),
        HelpRow("kl_level", "sequence, future, or token: prefixes held fixed", "sequence"),
        HelpRow("kl_estimator", "k1, k1_k3, k3 (forward), sampled, or exact", "k1", "exact"),
        HelpRow("kl_discount", "Weight of later tokens, 0 to 1", "1.0", "0.0"),
        HelpRow("kl_baseline", "none, leave_one_out or token_kl", "none"),
        HelpRow("kl_ratio", "Off-policy ratio: none, token, prefix or sequence", "none"),
        HelpRow("kl_ratio_bound", "truncate:MAX, clip:LOW:HIGH, mask:LOW:HIGH, none", "truncate:2"),
        HelpRow("kl_reduction", "policy: as loss_type; sequence: summed", "policy"),
        HelpRow("kl_top_k", "With exact: the likeliest entries only"),
        HelpRow("kl_top_k_of", "Whose entries: teacher or student", "teacher"),
        HelpRow("kl_tail", "Other entries: sampled, lump or none", "sampled"),
        HelpRow("kl", "A KLTerm of your own, file.py:name, for the settings above"),
        HelpRow("kl_target", "Adapt β so that the KL stays near this value"),
        HelpRow("kl_cell", "A loss of klgrad.zoo instead of a declared KL"),
        HelpRow("rollout_lag", "Train on completions this many updates old", "0"),
    ),
    "Training (settings of TRL)": (
        HelpRow("max_steps", "Updates; takes precedence over the epochs", "60", "320"),
        HelpRow("num_train_epochs", "Passes over the prompts", "3.0"),
        HelpRow("learning_rate", "Initial learning rate", "5e-06", "0.0006"),
        HelpRow("per_device_train_batch_size", "Completions in one forward pass", "64"),
        HelpRow("gradient_accumulation_steps", "Forward passes per update", "4"),
        HelpRow("num_generations", "Completions per prompt", "8", "2"),
        HelpRow("max_completion_length", "Longest completion, in tokens", "32"),
        HelpRow("temperature", "Of sampling", "1.0"),
        HelpRow("loss_type", "How the policy loss is averaged", "dapo"),
        HelpRow("num_iterations", "Updates on each batch of completions", "1", "8"),
        HelpRow("use_vllm", "Generate with vLLM"),
        HelpRow("report_to", "all, none, or names such as wandb", "none"),
        HelpRow("save_steps", "Updates between checkpoints", "50"),
        HelpRow("seed", "Of every random number", "42"),
    ),
}


def rows(command: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The sections of a command's help: title, and flag and text of each setting."""
    for title, settings in SECTIONS.items():
        shown = []
        for row in settings:
            default = row.in_distill or row.default if command == "distill" else row.default
            shown.append((f"--{row.flag}", f"{row.text} [{default}]" if default else row.text))
        yield title, shown


# The code shared by `klgrad train` and `klgrad distill`: parsing by TRL's parser, the help, and the exit status.

SETTINGS: Json = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
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


def train_or_distill(command: str, arguments: list[str]) -> None:
    """Parse, launch if several processes are asked for, train, and exit with the status of the run."""
    if "--help" in arguments or "-h" in arguments:
        stdout().print(_help(command))
        return
    if importlib.util.find_spec("trl") is None:
        raise MissingExtraError("trl, to train", "no such package", "pip install 'klgrad[train]'")
    if "--help_all" in arguments or "--help-all" in arguments:
        from ..training.settings import Parser

        stdout().print(Text(Parser(command).format_help()))
        return
    from ..integrations import lend
    from ..training.run import run
    from ..training.settings import LAUNCHED, described_processes, launch_command, parse
    from ..trl import KLConfig

    if words := launch_command(command, arguments):
        os.environ[LAUNCHED] = "1"
        os.execv(words[0], words)
    planned = described_processes(command, arguments)
    try:
        with lend(KLConfig, world_size=planned) if planned else nullcontext():
            status = run(parse(command, arguments), stdout(), stderr())
    except KeyboardInterrupt:  # before training has begun, when there is nothing to save
        status = INTERRUPTED
    if status:
        raise typer.Exit(status)


def _help(command: str) -> RenderableType:
    """The settings that matter most. Needs neither TRL nor torch."""
    text, *examples = USAGE[command]
    parts: list[RenderableType] = [
        Text(f"Usage: klgrad {command} [--config FILE.yaml] [--NAME VALUE]...\n", style="bold"),
        Text(text),
        *(Text(f"  {example}", style="dim") for example in examples),
    ]
    for title, shown in rows(command):
        parts += ["", Text(title, style="bold"), text_table(shown)]
    notes = (
        "Defaults in brackets: with the embedded model. --dry-run describes the run.\n"
        "Every setting of TRL's GRPOConfig can be given: --help-all lists all, in full."
    )
    missing = "" if importlib.util.find_spec("trl") else "\nTRL is not installed: pip install 'klgrad[train]'"
    return Group(*parts, "", Text(f"{notes}{missing}"))


def command(context: typer.Context) -> None:
    """Train a model on rewards with a declared KL term, using TRL."""
    train_or_distill("train", context.args)


def distill_command(context: typer.Context) -> None:
    """Train a student towards its teacher, on the student's own completions, using TRL."""
    train_or_distill("distill", context.args)


def compare_command(
    runs: Annotated[list[Path], argument("Output folders of runs.", metavar="RUN")],
    out: Annotated[
        Path, typer.Option(help="File for the figure: .png, .svg or .pdf; `-` is standard output, as PNG.")
    ] = Path("compared.png"),
) -> None:
    """Compare runs of `klgrad train` and `klgrad distill`: a table, and a figure of rewards, KLs and lengths."""
    from ..training.figures import load, render_figure, table

    console, compared = beside(out), load(runs)
    kind = out.suffix.removeprefix(".").lower()
    kind = kind if kind in ("svg", "pdf") else "png"
    deliver(console, table(compared), (out, lambda: render_figure(compared, kind)[0]))
