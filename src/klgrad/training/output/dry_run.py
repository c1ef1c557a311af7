"""`--dry-run`: the objective, what the trainer's loss descends, the settings, and the memory."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...trl.meaning_notes import notes
from ..build import Models
from ..settings.run_config import Settings
from .describe import formula, objective, reduction, scaling
from .memory import estimate, in_units
from .trained import trained_lines


def described(settings: Settings, models: Models) -> RenderableType:
    """What `--dry-run` prints."""
    parts: list[RenderableType] = [
        Text("Maximises", style="bold"),
        *(Text(f"  {line}") for line in objective_lines(settings)),
        "",
        Text(
            "What its KL descends, with the trainer's own loss summed over every outcome of small problems",
            style="bold",
        ),
        *(Text(f"  {line}") for line in trained_lines(settings.training)),
        "",
        _key_values(facts(settings, models)),
        "",
        Text(
            "Memory of all processes together, with each model counted once; activations are not included", style="bold"
        ),
        _memory(settings, models),
    ]
    return Group(*parts)


def objective_lines(settings: Settings) -> list[str]:
    """The objective, its gradient, what rescales it, and notes on settings that change its meaning."""
    lines = (objective(settings), formula(settings), scaling(settings))
    return [*(line for line in lines if line is not None), *(f"note: {note}" for note in notes(settings.training))]


def facts(settings: Settings, models: Models) -> dict[str, str]:
    """The main settings, by title."""
    training: Any = settings.training
    per_update = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    beta = f"{training.kl_coef:g}, constant"
    if training.kl_target is not None:
        beta = f"from {training.kl_coef:g}, adapted to {training.kl_target:g} nats per {training.kl_target_unit}"
    length = f"{training.max_steps} updates" if training.max_steps > 0 else f"{training.num_train_epochs:g} epochs"
    found = {
        "model": models.name,
        "reference": _reference(training, models),
        "placement": f"in the {training.kl_placement}; {reduction(settings)}",
        "β": beta,
        "trains": f"{length} of {per_update // training.num_generations} prompts x {training.num_generations} "
        f"completions of at most {training.max_completion_length} tokens{_uses(training.num_iterations)}"
        f"{_together(training.world_size)}",
        "learning rate": f"{training.learning_rate:g}, {_scheduler(training)}",
    }
    if training.rollout_lag:
        found["lag"] = f"{training.rollout_lag} updates, ratio {training.kl_ratio}"
    return found


def _reference(training: Any, models: Models) -> str:
    if training.teacher:
        return f"the teacher {models.reference_name}"
    follows = f", moved towards the policy every {training.ref_model_sync_steps} updates"
    return "the model as it starts" + (follows if training.sync_ref_model else "")


def _uses(count: int) -> str:
    return f", each of which is used for {count} updates" if count > 1 else ""


def _together(processes: int) -> str:
    return f", on {processes} processes" if processes > 1 else ""


def _scheduler(training: Any) -> str:
    return str(getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type))


def _key_values(values: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, value in values.items():
        table.add_row(name, Text(value))
    return table


def _memory(settings: Settings, models: Models) -> Table:
    items = estimate(settings, models)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for item in items:
        table.add_row(item.name, in_units(item.bytes), item.note)
    table.add_row("total", in_units(sum(item.bytes for item in items)), "")
    return table
