"""What the driver sends to the workers, inside verl's configuration of them."""

from dataclasses import asdict, replace
from typing import Any

from .active import Status, expected
from .declaration import Declaration, term_of

NODE_OF_WORKERS = "klgrad"
"""The key inside `actor_rollout_ref`, all of the configuration that verl's workers get."""


def sent(declaration: Declaration) -> dict[str, Any]:
    """The declaration and what the driver expects of a worker, as plain values."""
    return {
        "settings": asdict(declaration.settings),
        "task_rewards": declaration.task_rewards,
        "expected": expected(declaration),
    }


def received(node: Any) -> tuple[Declaration, Status]:
    """The inverse of `sent`."""
    declaration = replace(term_of(node["settings"]), task_rewards=bool(node["task_rewards"]))
    return declaration, dict(node["expected"])
