"""The settings that `klgrad train --help` and `klgrad distill --help` show, in one line of 80 columns each.

They are listed here and not read from TRL's parser, whose import takes seconds and needs TRL. A test compares names and
defaults with the parser. `--help-all` reads the parser.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Row(NamedTuple):
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


SECTIONS: dict[str, tuple[Row, ...]] = {
    "The command": (
        Row("output_dir", "Folder of the run", "runs/train", "runs/distill"),
        Row("quick", "Preset of a small run: about ten minutes on a CPU"),
        Row("dry_run", "Print what would be trained, and exit"),
        Row("resume", "Continue the run in output_dir"),
        Row("overwrite", "Replace the run in output_dir"),
        Row("weights_only", "Remove the checkpoints of a finished run"),
        Row("num_processes", "More than 1 are started by accelerate", "1"),
        Row("accelerate_config", "Configuration of accelerate to launch with"),
    ),
    "Data and evaluation": (
        Row("task", "Built-in task, or dataset with a `prompt` column", "arithmetic"),
        Row("reward", "Reward functions, package.module:function or file.py:function"),
        Row("eval_task", "What to evaluate on, if not held-out prompts"),
        Row("eval_size", "Held-out prompts of each task", "64"),
        Row("eval_every", "Updates between evaluations", "20"),
        Row("eval_greedy", "Evaluate with greedy decoding"),
        Row("dataset_split", "Split of the dataset to train on", "train"),
    ),
    "The model": (
        Row("model", "Hub name or folder; NAME:20 keeps 20 layers", "smollm2", "smollm2:20"),
        Row("teacher", "Distil from this model: it is the reference", "", "smollm2"),
        Row("student_layers", "Layers of the model to keep"),
        Row("dtype", "auto, bfloat16, float16 or float32", "float32"),
        Row("use_peft", "Train adapters (LoRA) instead of all weights"),
    ),
    "The KL": (
        Row("kl_coef", "β, the weight of the KL", "0.02", "1.0"),
        Row("kl_placement", "loss, advantage or reward", "loss"),
        Row("kl_divergence", "reverse, KL(π‖ref), or forward, KL(ref‖π)", "reverse"),
        Row("kl_level", "sequence, or token with the prefixes held fixed", "sequence"),
        Row("kl_estimator", "k1, k1_k3, k3 (forward), or exact", "k1", "exact"),
        Row("kl_discount", "Weight of later tokens, 0 to 1", "1.0", "0.0"),
        Row("kl_baseline", "none or leave_one_out", "none"),
        Row("kl_ratio", "Off-policy ratio: none, token, prefix or sequence", "none"),
        Row("kl_ratio_bound", "truncate:MAX, clip:LOW:HIGH, mask:LOW:HIGH, none", "truncate:2"),
        Row("kl_reduction", "policy: as loss_type; sequence: summed", "policy"),
        Row("kl_top_k", "With exact: the reference's likeliest entries only"),
        Row("kl_target", "Adapt β so that the KL stays near this value"),
        Row("kl_cell", "A loss of klgrad.zoo instead of a declared KL"),
        Row("rollout_lag", "Train on completions this many updates old", "0"),
    ),
    "Training (settings of TRL)": (
        Row("max_steps", "Updates; takes precedence over the epochs", "60", "320"),
        Row("num_train_epochs", "Passes over the prompts", "3.0"),
        Row("learning_rate", "Initial learning rate", "5e-06", "0.0006"),
        Row("per_device_train_batch_size", "Completions in one forward pass", "64"),
        Row("gradient_accumulation_steps", "Forward passes per update", "4"),
        Row("num_generations", "Completions per prompt", "8", "2"),
        Row("max_completion_length", "Longest completion, in tokens", "32"),
        Row("temperature", "Of sampling", "1.0"),
        Row("loss_type", "How the policy loss is averaged", "dapo"),
        Row("num_iterations", "Updates on each batch of completions", "1", "8"),
        Row("use_vllm", "Generate with vLLM"),
        Row("report_to", "all, none, or names such as wandb", "none"),
        Row("save_steps", "Updates between checkpoints", "50"),
        Row("seed", "Of every random number", "42"),
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
