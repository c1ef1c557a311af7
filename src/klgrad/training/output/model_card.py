"""The model card of a run: its base model, its KL, and its results."""

from pathlib import Path
from typing import Any

from ...models.embedded import EMBEDDED, SOURCE
from ..build import Models
from ..run_folder.record import versions
from ..settings.run_config import Settings
from .describe import formula, objective, scaling
from .summary import estimate, score

FILE = "README.md"


def model_card(settings: Settings, models: Models, summary: dict[str, Any] | None = None) -> str:
    """Describe a run in Markdown, with the metadata that the hub reads.

    Args:
        settings: of the run.
        models: the policy and the reference.
        summary: the results, if the run is finished.

    Returns:
        The text of `README.md`.
    """
    command = settings.command
    parts = [
        _metadata(models),
        f"# {Path(str(settings.training.output_dir)).name}\n",
        f"Trained by `klgrad {command}`, on TRL's GRPOTrainer.\n",
        f"- base model: {_named(models.name)}",
        f"- reference of the KL: {_named(models.reference_name)}",
        f"- maximises: {objective(settings)}",
        f"- gradient of the KL: {formula(settings)}",
        *([f"- {text}"] if (text := scaling(settings)) else []),
        f"- trained on: {settings.run.task}{f', reward {settings.run.reward}' if settings.run.reward else ''}",
    ]
    if summary is not None:
        parts += _results(summary)
    parts.append(f"\nVersions: {', '.join(f'{name} {version}' for name, version in versions().items())}.\n")
    return "\n".join(parts)


def _metadata(models: Models) -> str:
    base = _on_hub(models.name)
    lines = ["library_name: transformers", *([f"base_model: {base}"] if base else []), "tags: [klgrad, trl, grpo]"]
    return "\n".join(["---", *lines, "---\n"])


def _on_hub(name: str) -> str | None:
    """The name on the hub of a model, without what was done to its layers; None for a folder."""
    base = name.partition(" with ")[0].partition(":")[0]
    if base == EMBEDDED:
        return SOURCE
    return None if Path(base).exists() or base.count("/") != 1 else base


def _named(name: str) -> str:
    return f"{name} ({SOURCE})" if name.partition(":")[0].partition(" ")[0] == EMBEDDED else name


def _results(summary: dict[str, Any]) -> list[str]:
    """Held-out rewards and the KL, before and after."""
    before, after = summary["before"], summary["after"]
    lines = [f"- updates: {summary['updates']}"]
    if after is None:
        return lines
    lines += ["\n| held out | before | after |", "|---|---|---|"]
    for name, row in after["sets"].items():
        lines.append(f"| reward, {name} | {score(before['sets'].get(name)) if before else ''} | {score(row)} |")
    if after["kl"] is not None:
        first = estimate(before["kl"]["per_sequence"]) if before and before["kl"] else ""
        lines.append(f"| KL(π‖ref), nats per completion | {first} | {estimate(after['kl']['per_sequence'])} |")
    return [*lines, "\nA number after ± is one standard error."]
