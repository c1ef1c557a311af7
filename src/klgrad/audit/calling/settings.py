"""A loss's own arguments, such as its coefficient, as given by `--set NAME=VALUE`."""

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import LossCallError
from .tensors import argument_role

TENSORS = ("logp", "ref_logp", "old_logp", "behavior_logp", "logits", "ref_logits", "mask", "advantages")
"""Roles whose names are no values of a setting; `group` or `tokens` may be one."""

Settings = Mapping[str, Any]
"""Arguments of a loss by name."""


def parse_settings(choices: Iterable[str]) -> dict[str, Any]:
    """Read settings from text.

    Args:
        choices: `NAME=VALUE`, with a Python literal as the value. Any other text is a string; `true`, `false` and
            `none` may be written small.

    Returns:
        The values by name.

    Raises:
        LossCallError: a choice has no name or no `=`, or its value is the name of a tensor, which would be text.

    Example:
        >>> from klgrad.audit.calling import parse_settings
        >>> parse_settings(["beta=0.04", "estimator=k3", "clip=none"])
        {'beta': 0.04, 'estimator': 'k3', 'clip': None}
    """
    found = {}
    for choice in choices:
        name, equals, value = choice.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise LossCallError("NAME=VALUE", repr(choice), "write for example --set beta=0.04")
        found[name] = _value(value.strip())
        if found[name] == value.strip() and argument_role(value.strip()) in TENSORS:
            raise LossCallError(
                f"a value for {name}",
                f"{choice}, the name of a tensor, which the loss would get as text",
                f"name the parameter {value.strip()} in your code, or wrap the loss in a function that does",
            )
    return found


def _value(text: str) -> object:
    small = {"true": True, "false": False, "none": None}
    if text.lower() in small:
        return small[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
