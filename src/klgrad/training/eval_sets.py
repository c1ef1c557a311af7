"""Prompts to evaluate on, and what a kind of task makes of its names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EvaluationSet:
    """Rows with a `prompt`, and whether they are of the domain that is trained."""

    name: str
    domain: str
    rows: list[dict[str, Any]]


Made = tuple[list[dict[str, Any]], list[EvaluationSet], list[Callable[..., Any]]]
"""Rows to train on, sets to evaluate on, and the rewards that judge both."""
