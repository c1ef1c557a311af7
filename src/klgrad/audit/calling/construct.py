"""Make an instance of a class that is a loss."""

import inspect
from typing import Any

from ...errors import LossCallError
from .settings import Settings


def constructed(cls: type, name: str, settings: Settings) -> tuple[Any, set[str]]:
    """Call a class with the settings that its constructor takes.

    Args:
        cls: its other parameters need defaults.
        name: for messages.
        settings: arguments of the constructor, and perhaps of the loss itself.

    Returns:
        The instance, and the names of the settings that it took.
    """
    try:
        parameters = inspect.signature(cls).parameters
    except (ValueError, TypeError) as error:
        raise LossCallError(f"{name} to have a constructor", str(error), "pass an instance") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = {n: x for n, x in settings.items() if n in known or (takes_any and not hasattr(cls, "forward"))}
    lacking = [
        n
        for n, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and n not in given
    ]
    if lacking:
        raise LossCallError(
            f"a class {name} that can be made without arguments",
            f"a constructor that needs {', '.join(lacking)}",
            f"give them by --set {lacking[0]}=VALUE, or make an instance in the file and audit that",
        )
    try:
        return cls(**given), set(given)
    except Exception as error:
        raise LossCallError(
            f"{name}({', '.join(f'{n}={x!r}' for n, x in given.items())}) to make a loss",
            f"{type(error).__name__}: {error}",
            "make an instance in the file and audit that",
        ) from error
