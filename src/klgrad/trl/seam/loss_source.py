"""The source of TRL's loss, read for what the seam relies on: where the KL is added, and that nothing follows it."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

from .version import ContractError

ADDITION = "per_token_loss + self.beta * per_token_kl"
LOG_PROBS = "_get_per_token_logps_and_entropies"
USES = ["self.beta != 0.0", "self.beta != 0.0", "self.beta * per_token_kl", "self.beta != 0.0"]
"""Of `beta` in `_compute_loss`: TRL's KL is computed, added (a test and a product), and logged."""


def check_loss(method: Callable[..., Any]) -> None:
    """Refuse a `_compute_loss` in which the KL is not the last thing that is added to the loss of each token.

    TRL multiplies the policy loss by its off-policy mask, its entropy mask and vLLM's ratio, and then adds the KL. If
    the KL came first, these masks would drop it on some tokens.
    """
    tree = _parsed(method)
    found = uses_of_beta(method)
    if found != USES:
        raise ContractError(f"`beta` used in TRL's loss as {'; '.join(USES)}", "; ".join(found) or "not at all")
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == LOG_PROBS]
    if len(calls) != 1:
        raise ContractError(f"one call of {LOG_PROBS} in TRL's loss", f"{len(calls)}")
    assigned = [
        n for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "per_token_loss"
    ]
    last = max(assigned, key=lambda n: n.lineno, default=None)
    if last is None or ast.unparse(last.value) != ADDITION:
        raise ContractError(
            f"`per_token_loss = {ADDITION}` as the last change of the loss of each token",
            "no change of it" if last is None else f"`{ast.unparse(last)}` after it",
        )
    for use in _later_uses(tree, last.lineno):
        if use not in ("per_token_loss * mask", "per_token_loss.size"):
            raise ContractError("a loss of each token that is reduced over `mask` alone", f"`{use}`")


def uses_of_beta(method: Callable[..., Any]) -> list[str]:
    """The expressions of which an attribute `beta` is a direct part, in the order of the source."""
    found = [
        node
        for node in ast.walk(_parsed(method))
        if any(isinstance(child, ast.Attribute) and child.attr == "beta" for child in ast.iter_child_nodes(node))
    ]
    return [ast.unparse(node) for node in sorted(found, key=lambda node: getattr(node, "lineno", 0))]


def check_returned(method: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Refuse a method whose last `return` does not give variables of these names, in this order."""
    returns = [node for node in ast.walk(_parsed(method)) if isinstance(node, ast.Return)]
    value = max(returns, key=lambda node: node.lineno).value if returns else None
    found = [ast.unparse(each) for each in value.elts] if isinstance(value, ast.Tuple) else []
    if tuple(found) != names:
        raise ContractError(
            f"{method.__qualname__} that returns {', '.join(names)}", ", ".join(found) or "another value"
        )


def _later_uses(tree: ast.AST, line: int) -> list[str]:
    """The expressions that use `per_token_loss` after a line."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.Name) and child.id == "per_token_loss" and child.lineno > line
    ]


def _parsed(method: Callable[..., Any]) -> ast.AST:
    try:
        function = inspect.unwrap(method)
        return _tree(function, function.__code__)
    except (OSError, SyntaxError) as error:
        raise ContractError(
            f"the source of {method.__qualname__}", f"{error}", "install TRL with its .py files, which pip does"
        ) from error


@cache
def _tree(function: Callable[..., Any], _code: CodeType) -> ast.AST:
    """Kept, because every trainer that is built reads the same methods; not beyond a change of a function's code."""
    return ast.parse(textwrap.dedent(inspect.getsource(function)))
