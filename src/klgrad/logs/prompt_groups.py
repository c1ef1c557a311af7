"""Prompt identifiers of any kind, numbered in the order they are met."""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from .log_errors import LogError

LONGEST = 64
"""Characters of an identifier that is kept as it is; of a longer one, such as a whole prompt, a digest is kept."""


class Groups:
    """Numbers identifiers; what it holds grows with the prompts, not with the tokens."""

    def __init__(self, name: str, unit: str) -> None:
        self._name, self._unit = name, unit
        self._known: dict[object, int] = {}

    def number(self, identifiers: Iterable[object], rows: Tensor) -> Tensor:
        """(B,) numbers from 0; `rows` are those that an error names."""
        given = list(identifiers)
        seen: dict[int, int] = {}  # a long prompt that is one object for many rows is digested once
        for i, x in enumerate(given):
            if id(x) not in seen:
                seen[id(x)] = self._known.setdefault(self._checked(x, int(rows[i])), len(self._known))
        return torch.tensor([seen[id(x)] for x in given], dtype=torch.int64)

    def _checked(self, x: object, row: int) -> object:
        """The key of an identifier that is one."""
        if x is None or x != x:
            raise LogError(
                f"the completion's prompt in `{self._name}` in every row",
                f"{'null' if x is None else 'NaN'} in {self._unit} {row}",
                "log it for every completion, or leave the column out",
            )
        try:
            return _key(x)
        except (ValueError, RecursionError) as error:
            raise LogError(
                f"a prompt in `{self._name}` that can be written as JSON",
                f"{error} in {self._unit} {row}",
                "log a number or a hash of the prompt, or leave the column out with --column group=",
            ) from error


def _key(x: object) -> object:
    """Something small that can be compared: messages and dictionaries are their JSON."""
    if not isinstance(x, str | int | float):
        x = json.dumps(x, sort_keys=True, default=str)
    if isinstance(x, str) and len(x) > LONGEST:
        return hashlib.blake2b(x.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return x
