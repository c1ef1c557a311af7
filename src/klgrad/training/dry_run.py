"""`--dry-run`: what would be trained, in one formula, what that descends, and what memory it takes."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..audit import audit
from ..trl.meaning_notes import notes
from .build import Models
from .describe import formula, objective, reduction, scaling
from .memory import estimate, size
from .settings import Settings


def described(settings: Settings, models: Models) -> RenderableType:
    """The plan, for a person."""
    parts: list[RenderableType] = [
        Text("Maximises", style="bold"),
        *(Text(f"  {line}") for line in told(settings)),
        "",
        _facts(settings, models),
        "",
        Text("Memory of all processes, each model once, as if sharded; activations come on top", style="bold"),
        _memory(settings, models),
    ]
    return Group(*parts)


def told(settings: Settings) -> list[str]:
    """The objective line by line: what, by which gradient, what rescales it, and what changes its meaning."""
    lines = (objective(settings), formula(settings), scaling(settings))
    return [*(line for line in lines if line is not None), *(f"note: {note}" for note in notes(settings.training))]


def verdict(settings: Settings) -> str:
    """What the term descends, summed over every outcome."""
    o = settings.training.objective
    found = audit(o.term if o.term is not None else o.cell)
    return f"{found.verdict} on-policy, {found.verdict_off_policy} off-policy"


def facts(settings: Settings, models: Models) -> dict[str, str]:
    """What somebody would ask before starting it."""
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
        "the term descends": verdict(settings),
        "trains": f"{length} of {per_update // training.num_generations} prompts x {training.num_generations} "
        f"completions of at most {training.max_completion_length} tokens{_together(training.world_size)}",
        "learning rate": f"{training.learning_rate:g}, {_scheduler(training)}",
    }
    if training.rollout_lag:
        found["lag"] = f"{training.rollout_lag} generations, ratio {training.kl_ratio}"
    return found


def _reference(training: Any, models: Models) -> str:
    if training.teacher:
        return f"the teacher {models.reference_name}"
    follows = f", moved towards the policy every {training.ref_model_sync_steps} updates"
    return "the model as it starts" + (follows if training.sync_ref_model else "")


def _together(processes: int) -> str:
    return f", on {processes} processes" if processes > 1 else ""


def _scheduler(training: Any) -> str:
    return str(getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type))


def _facts(settings: Settings, models: Models) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, value in facts(settings, models).items():
        table.add_row(name, Text(value))
    return table


def _memory(settings: Settings, models: Models) -> Table:
    items = estimate(settings, models)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for item in items:
        table.add_row(item.name, size(item.bytes), item.note)
    table.add_row("in all", size(sum(item.bytes for item in items)), "")
    return table
