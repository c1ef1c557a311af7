"""Numbers prompt identifiers, and other values of rows, in the order of their first occurrence."""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from .columns import PER_ROW
from .log_errors import LogError

LONGEST = 64
"""Largest number of characters of a prompt's identifier that is stored unchanged; a longer one, such as a whole prompt,
is stored as a digest."""


Known = dict[str, dict[object, int]]
"""The numbers of identifiers, by role; several files of one run share them."""


class Groups:
    """Numbers identifiers. Its memory grows with the number of prompts, not with the number of tokens.

    Args:
        name: the column's name.
        unit: `row` or `line`, for errors.
        known: the numbers that were given already, to which new ones are added.
        what: what the column has, for errors.
        shown: whether the identifiers are shown, so that long ones are stored too.
    """

    def __init__(
        self, name: str, unit: str, known: dict[object, int], what: str = "prompt", *, shown: bool = False
    ) -> None:
        self._name, self._unit, self._known, self._what, self._shown = name, unit, known, what, shown

    def number(self, identifiers: Iterable[object], rows: Tensor) -> Tensor:
        """Number identifiers.

        Args:
            identifiers: one for each completion.
            rows: (B,) numbers of the rows, for errors.

        Returns:
            (B,) numbers from 0; equal identifiers have equal numbers, in this and all later calls.
        """
        given = list(identifiers)
        seen: dict[int, int] = {}  # digest a long prompt once if many rows share the object
        for i, x in enumerate(given):
            if id(x) not in seen:
                seen[id(x)] = self._known.setdefault(self._checked(x, int(rows[i])), len(self._known))
        return torch.tensor([seen[id(x)] for x in given], dtype=torch.int64)

    def _checked(self, x: object, row: int) -> object:
        """The key of an identifier, after checks."""
        if x is None or x != x:
            raise LogError(
                f"the completion's {self._what} in `{self._name}` in every row",
                f"{'null' if x is None else 'NaN'} in {self._unit} {row}",
                "log it for every completion, or leave the column out",
            )
        try:
            return _key(x, whole=self._shown)
        except (ValueError, RecursionError) as error:
            raise LogError(
                f"a {self._what} in `{self._name}` that can be written as JSON",
                f"{error} in {self._unit} {row}",
                "log a number or a hash of the prompt, or leave the column out with --column group=",
            ) from error


def _key(x: object, *, whole: bool) -> object:
    """A hashable key, small unless it has to be `whole`. Messages and dictionaries are compared as JSON."""
    if not isinstance(x, str | int | float):
        x = json.dumps(x, sort_keys=True, default=str)
    if isinstance(x, str) and len(x) > LONGEST and not whole:
        return hashlib.blake2b(x.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return x


def per_row(names: dict[str, str], unit: str, known: Known) -> dict[str, Groups]:
    """What numbers the values of each column that has one per completion, by role."""
    what = {"group": "prompt", "by": "value"}
    found = [role for role in PER_ROW if role in names]
    return {
        role: Groups(names[role], unit, known.setdefault(role, {}), what[role], shown=role == "by") for role in found
    }
