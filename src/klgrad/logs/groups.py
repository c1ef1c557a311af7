"""Prompt identifiers of any kind, numbered in the order they are met."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Groups:
    """Numbers identifiers; what it holds grows with the prompts, not with the tokens."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}

    def number(self, identifiers: Iterable[object]) -> Tensor:
        """(B,) numbers from 0."""
        known = self._known
        return torch.tensor([known.setdefault(x, len(known)) for x in identifiers], dtype=torch.int64)
