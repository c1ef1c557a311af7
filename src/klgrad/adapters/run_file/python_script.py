"""Read a Python script that starts a run, without running it: arguments of configurations, and assigned attributes."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import RunFileError

TRAINERS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo"}
"""TRL's trainers by the class of their settings."""

LOOKED_FOR = "written as in GRPOConfig(beta=0.04) or args.beta = 0.04"


def of_python(text: str, path: Path) -> tuple[dict[str, Any], str | None, tuple[str, ...]]:
    """The settings in a Python script.

    Args:
        text: the script.
        path: its file, for errors.

    Returns:
        The literals by name: keyword arguments of calls of names that end in `Config`, and attributes as in
        `args.beta = 0.04`; the trainer of TRL, by the class that is called; the names whose values are no literals.
    """
    try:
        with warnings.catch_warnings():  # of the script's own syntax
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError) as error:
        raise RunFileError("a Python script", f"{path}: {error}", "correct it, or give a YAML file") from error
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called(node).endswith("Config")]
    trainer = _trainer_call(calls, path)
    # Another class may have a field of the same name: DPOConfig has a beta too.
    arguments = [argument for call in ([trainer] if trainer else calls) for argument in call.keywords]
    written = [*((word.arg, word.value) for word in arguments if word.arg), *_assigned(nodes)]
    in_order = dict(sorted(written, key=lambda pair: (pair[1].lineno, pair[1].col_offset)))  # the last one holds
    literals = {name: ast.literal_eval(value) for name, value in in_order.items() if _is_literal(value)}
    others = tuple(name for name in in_order if name not in literals)
    return literals, TRAINERS[_called(trainer)] if trainer else None, others


def _called(call: ast.Call) -> str:
    """The last part of the name that is called, as `GRPOConfig` in `trl.GRPOConfig()`."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _trainer_call(calls: list[ast.Call], path: Path) -> ast.Call | None:
    if any(_called(call) == "KLConfig" for call in calls):
        remedy = "write its settings as YAML, and use klgrad train --config FILE --dry-run"
        raise RunFileError("TRL's own settings", f"{path} with a KLConfig", remedy)
    found = [call for call in calls if _called(call) in TRAINERS]
    if len(found) > 1:
        lines = " and ".join(f"{_called(call)} in line {call.lineno}" for call in found)
        raise RunFileError(f"one call of {' or '.join(TRAINERS)}", f"{path} with {lines}", "give one of them as YAML")
    return found[0] if found else None


def _assigned(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") != "self":  # no configuration
                yield target.attr, node.value


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True
