"""What `klgrad train` and `klgrad distill` can be told, beside everything that TRL can."""

from dataclasses import dataclass, field
from typing import Any

from trl.trainer.model_config import ModelConfig

from ..trl import KLConfig


@dataclass
class RunConfig:
    """What is trained on, how it is judged, and how the command behaves."""

    task: str = field(
        default="arithmetic",
        metadata={
            "help": "What to train on: `arithmetic`, or some of its tasks by commas (addition, subtraction, "
            "multiplication, maximum, word-problems); `reasoning-gym:NAME`; or a dataset with a `prompt` column (JSON, "
            "JSONL, Parquet, or of the hub)."
        },
    )
    eval_task: str | None = field(
        default=None,
        metadata={"help": "What to evaluate on; by default held-out questions of all tasks, or held-out rows."},
    )
    reward: str | None = field(
        default=None,
        metadata={
            "help": "Reward functions as TRL calls them, by commas: package.module:function or path/file.py:function."
        },
    )
    digits: int = field(default=1, metadata={"help": "Digits of the numbers in the built-in tasks."})
    train_size: int = field(default=2048, metadata={"help": "Questions of a built-in task."})
    eval_size: int = field(default=64, metadata={"help": "Held-out questions, of each task."})
    eval_every: int = field(default=20, metadata={"help": "Updates between evaluations; 0: only before and after."})
    eval_greedy: bool = field(
        default=False, metadata={"help": "Evaluate with the likeliest token instead of sampling as in training."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The configuration of a dataset of the hub."})
    dataset_split: str = field(default="train", metadata={"help": "The split of it that is trained on."})
    dataset_eval_split: str | None = field(
        default=None, metadata={"help": "The split of `eval_task`'s datasets; by default that of `dataset_split`."}
    )
    student_layers: int | None = field(
        default=None, metadata={"help": "Keep only so many of the model's layers, evenly spaced."}
    )
    quick: bool = field(default=False, metadata={"help": "A small run, for a CPU and ten minutes."})
    dry_run: bool = field(
        default=False, metadata={"help": "Say what would be trained and what memory it takes, and stop."}
    )
    resume: bool = field(
        default=False, metadata={"help": "Go on from the last sound checkpoint in `output_dir`, with its settings."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace a run that is in `output_dir`."})
    num_processes: int = field(default=1, metadata={"help": "More than 1: start them with `accelerate launch`."})
    accelerate_config: str | None = field(
        default=None, metadata={"help": "A configuration of accelerate (FSDP, DeepSpeed, nodes) to launch with."}
    )


@dataclass
class PolicyConfig(ModelConfig):
    """TRL's, with a short name for its first field."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "A model of the hub or of a folder; `smollm2`, embedded, needs neither; NAME:20 keeps 20 layers.",
            "aliases": ["--model"],
        },
    )


@dataclass
class Settings:
    """All of a command's, parsed. `given` is what was said, by whom ever, and what a preset chose, for `run.json`."""

    command: str
    run: RunConfig
    training: KLConfig
    policy: PolicyConfig
    given: dict[str, Any]


def planned(processes: int) -> type[KLConfig]:
    """A `KLConfig` for so many processes, of which none runs yet."""

    class Planned(KLConfig):
        @property
        def world_size(self) -> int:
            return processes

    return Planned


ALIASES = {"model": "model_name_or_path"}
"""Keys that a file may have, too."""

DEFAULTS: dict[str, Any] = {
    "logging_steps": 1,
    "save_steps": 50,
    "save_total_limit": 2,
    "disable_tqdm": True,
    "disable_dropout": True,  # noise in the policy alone would be a KL to the reference
}
"""Where a command differs from TRL, whatever is trained."""

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
"""For the embedded model: 32 prompts of 8 samples."""

QUICK: dict[str, Any] = {
    **EMBEDDED,
    "max_steps": 10,
    "learning_rate": 1e-5,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "max_completion_length": 10,
    "save_steps": 5,
    "eval_every": 5,
    "eval_size": 12,
}
"""For a CPU and ten minutes: 8 prompts of 4 samples."""

DISTILL: dict[str, Any] = {
    "kl_coef": 1.0,
    "kl_estimator": "exact",
    "kl_discount": 0.0,  # at discount 1 a high learning rate teaches a student to end early
    "teacher": "smollm2",
}
"""The KL is all there is."""

STUDENT: dict[str, Any] = {"learning_rate": 3e-4, "max_steps": 40}
"""One that misses a third of its layers is far from its teacher, and needs long steps."""

REUSED: dict[str, Any] = {"num_iterations": 2, "learning_rate": 6e-4, "max_steps": 80}
"""Over the vocabulary a token's KL needs no weights on completions that are an update old: as many, used twice."""

QUICK_STUDENT: dict[str, Any] = {"learning_rate": 1e-4, "max_steps": 8, "save_steps": 4, "eval_every": 4}

QUICK_REUSED: dict[str, Any] = {**REUSED, "learning_rate": 2e-4, "max_steps": 12, "save_steps": 6, "eval_every": 6}

UNGROUPED: dict[str, Any] = {"num_generations": 2}
"""Without a reward nothing is compared within a group: as many different prompts as TRL allows tell more."""
