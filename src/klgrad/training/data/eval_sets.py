"""Prompts to evaluate on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EvaluationSet:
    """Rows with a `prompt`. `domain` is `in` for the tasks that are trained on and `out` for others."""

    name: str
    domain: str
    rows: list[dict[str, Any]]


Made = tuple[list[dict[str, Any]], list[EvaluationSet], list[Callable[..., Any]]]
"""Rows to train on, sets to evaluate on, and the rewards that judge both."""
