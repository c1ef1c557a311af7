"""The settings of `klgrad train` and `klgrad distill` beside those of TRL."""

from dataclasses import dataclass, field
from typing import Any

from trl.trainer.model_config import ModelConfig

from ...trl import KLConfig


@dataclass
class RunConfig:
    """Data, evaluation, and how the command behaves."""

    task: str = field(
        default="arithmetic",
        metadata={
            "help": "What to train on: `arithmetic`, or some of its tasks, separated by commas (addition, subtraction, "
            "multiplication, maximum, word-problems); `reasoning-gym:NAME`; or a dataset with a `prompt` column (a "
            "JSON, JSONL or Parquet file, a folder, or a name on the hub)."
        },
    )
    eval_task: str | None = field(
        default=None,
        metadata={"help": "What to evaluate on. Default: held-out prompts; those of all tasks for built-in ones."},
    )
    reward: str | None = field(
        default=None,
        metadata={
            "help": "Reward functions as TRL calls them, separated by commas: package.module:function or "
            "path/file.py:function."
        },
    )
    digits: int = field(default=1, metadata={"help": "Digits of the numbers in the built-in tasks, 1 to 9."})
    train_size: int = field(default=2048, metadata={"help": "Number of training questions of a built-in task."})
    eval_size: int = field(default=64, metadata={"help": "Number of held-out prompts of each task."})
    eval_every: int = field(
        default=20, metadata={"help": "Updates between evaluations; 0 evaluates only before and after training."}
    )
    eval_greedy: bool = field(
        default=False, metadata={"help": "Evaluate with greedy decoding instead of sampling as in training."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a dataset on the hub."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset to train on."})
    dataset_eval_split: str | None = field(
        default=None, metadata={"help": "Split of the dataset to evaluate on. Default: `dataset_split`."}
    )
    student_layers: int | None = field(
        default=None, metadata={"help": "Number of layers of the model to keep, evenly spaced."}
    )
    quick: bool = field(default=False, metadata={"help": "Preset of a small run: about ten minutes on a CPU."})
    dry_run: bool = field(
        default=False, metadata={"help": "Print what would be trained and the memory it needs, and exit."}
    )
    resume: bool = field(
        default=False,
        metadata={"help": "Continue the run in `output_dir` from its last complete checkpoint, with its settings."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace the run in `output_dir`."})
    weights_only: bool = field(
        default=False,
        metadata={"help": "Remove the checkpoints of a finished run; --resume cannot make it longer then."},
    )
    num_processes: int = field(
        default=1, metadata={"help": "Number of processes; more than 1 are started by `accelerate launch`."}
    )
    accelerate_config: str | None = field(
        default=None,
        metadata={"help": "Configuration file of accelerate (FSDP, DeepSpeed, several nodes) to launch with."},
    )


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
