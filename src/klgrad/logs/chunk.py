"""A bounded number of rows of a log: ragged, and as padded blocks for the formulas of this package."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.rollout import ROUNDING_STEPS, Rollout, invalid_log_probs, what_is_wrong
from ..errors import RolloutError
from .columns import PER_TOKEN
from .log_errors import LogError

BLOCK_CELLS = 2**17
"""Cells of a padded block, including padding. A block fits into the cache of a core, so memory is not the limit."""


@dataclass(frozen=True)
class Ragged:
    """The concatenated values of all rows, and the number of values of each row."""

    values: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows of a log without their dead tokens. No statistic depends on dead tokens.

    Attributes:
        rows: (B,) numbers of the rows in the file.
        unit: the name of a row in messages: `row` (counted from 0) or `line` (from 1).
        lengths: (B,) numbers of live tokens.
        columns: role to flat log-probs of the live tokens.
        per_row: (B,) numbers of the completion's values by role: of its prompt (`group`), of its part (`by`).
        mask: whether each token is live, before dead tokens were removed, or None.
        names: role to the column's name in the file.
        done: the position in the file where the chunk ends, in a unit of the reader.
    """

    rows: Tensor
    unit: str
    lengths: Tensor
    columns: dict[str, Tensor]
    per_row: dict[str, Tensor]
    mask: Ragged | None
    names: dict[str, str]
    done: int

    @property
    def starts(self) -> Tensor:
        """(B,) index of the first value of each row."""
        return self.lengths.cumsum(0) - self.lengths

    def place(self, row: int, token: int) -> str:
        """The place of a live token in the file, for messages."""
        if self.mask is not None:
            start = int(self.mask.lengths[:row].sum())
            live = self.mask.values[start : start + int(self.mask.lengths[row])]
            token = int(torch.nonzero(live)[token])
        return f"{self.unit} {int(self.rows[row])}, token {token}"


def build(
    rows: Tensor, unit: str, given: dict[str, Ragged], per_row: dict[str, Tensor], done: int, names: dict[str, str]
) -> Chunk:
    """Check that all columns of a row have the same length, and remove the dead tokens.

    Args:
        rows: (B,) numbers of the rows in the file.
        unit: `row` or `line`.
        given: role to values.
        per_row: role to (B,) numbers of the completions' values.
        done: the position in the file where these rows end.
        names: role to the column's name in the file.

    Returns:
        The chunk.
    """
    lengths = given["logp"].lengths
    for role, column in given.items():
        if not torch.equal(column.lengths, lengths):
            i = int(torch.nonzero(column.lengths != lengths)[0])
            raise LogError(
                f"the same number of entries in `{names[role]}` and `{names['logp']}` in every row",
                f"{int(column.lengths[i])} and {int(lengths[i])} in {unit} {int(rows[i])}",
                f"align `{names[role]}` with the sampled tokens: one entry per token, no prompt, no shift",
            )
    columns = {role: _at_most_0(column.values) for role, column in given.items() if role in PER_TOKEN}
    mask = given.get("mask")
    if mask is not None:
        live = _as_bool(mask, rows, unit, names["mask"])
        mask = Ragged(live, lengths)
        columns = {role: x[live] for role, x in columns.items()}
        counted = torch.cat([torch.zeros(1, dtype=torch.int64), live.cumsum(0)])
        ends = lengths.cumsum(0)
        lengths = counted[ends] - counted[ends - lengths]
    return Chunk(rows, unit, lengths, columns, per_row, mask, names, done)


def _at_most_0(x: Tensor) -> Tensor:
    """Set float64 values above 0 to 0 if the rounding of float32, in which a trainer computes, can explain them."""
    if x.dtype != torch.float64:
        return x
    return torch.where((x > 0) & (x <= ROUNDING_STEPS * torch.finfo(torch.float32).eps), 0.0, x)


def _as_bool(mask: Ragged, rows: Tensor, unit: str, name: str) -> Tensor:
    if mask.values.dtype == torch.bool:
        return mask.values
    live = mask.values != 0
    stray = live & (mask.values != 1)
    if bool(stray.any()):
        at = int(torch.nonzero(stray)[0])
        row = int(torch.searchsorted(mask.lengths.cumsum(0), at, right=True))
        raise LogError(
            f"a mask of 0 and 1 in `{name}`",
            f"{mask.values[at].item():g} in {unit} {int(rows[row])}",
            "log the completion mask; weights belong to the loss, not to the mask",
        )
    return live


@dataclass(frozen=True)
class Block:
    """Rows of similar length as one padded batch.

    Attributes:
        rollout: π and ref, with the sampler of the file, or else its old policy, as μ.
        trainer: the trainer's policy at the time of sampling, with μ both as reference and as sampler; None without
            `behavior_logp`.
        group: (B,) index of the completion's prompt, or None.
        by: (B,) index of the part of the log that the completion belongs to, or None.
    """

    rollout: Rollout
    trainer: Rollout | None
    group: Tensor | None
    by: Tensor | None


def blocks(chunk: Chunk) -> Iterator[Block]:
    """Cut a chunk into padded blocks. Rows are sorted by length, so that there is little padding."""
    order = torch.argsort(chunk.lengths, stable=True)
    starts = chunk.starts
    for index in _cut(order, chunk.lengths):
        try:
            yield _pad(chunk, index, starts)
        except RolloutError:
            _name_the_row(chunk)
            raise


def _cut(order: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """Runs of rows whose padded size is within `BLOCK_CELLS`, or single rows."""
    width = lengths[order].clamp(min=1).tolist()
    begin = 0
    for i, longest in enumerate(width):
        if i > begin and (i - begin + 1) * longest > BLOCK_CELLS:
            yield order[begin:i]
            begin = i
    yield order[begin:]


def _pad(chunk: Chunk, index: Tensor, starts: Tensor) -> Block:
    lengths = chunk.lengths[index]
    steps = torch.arange(max(1, int(lengths.max())))
    mask = steps < lengths[:, None]
    at = torch.where(mask, starts[index][:, None] + steps, 0)
    padded = {role: _take(x, at) for role, x in chunk.columns.items()}
    logp = padded["logp"].requires_grad_()  # the coefficients of a cell are gradients
    behavior, old = padded.get("behavior_logp"), padded.get("old_logp")
    sampler = old if behavior is None else behavior
    rollout = Rollout(logp, padded["ref_logp"], mask, behavior_logp=sampler)
    trainer = None
    if behavior is not None:
        trainer = Rollout((logp if old is None else old).detach(), behavior, mask, behavior_logp=behavior)
    group, by = (chunk.per_row[role][index] if role in chunk.per_row else None for role in ("group", "by"))
    return Block(rollout, trainer, group, by)


def _take(x: Tensor, at: Tensor) -> Tensor:
    return x[at] if len(x) else torch.zeros(at.shape, dtype=x.dtype)


def _name_the_row(chunk: Chunk) -> None:
    """Raise an error for the first invalid value in the order of the file, with its row and column name there."""
    found: list[tuple[int, str]] = []
    for role, x in chunk.columns.items():
        invalid = torch.nonzero(invalid_log_probs(x))
        found += [(int(invalid[0]), role)] if len(invalid) else []
    if found:
        at, role = min(found)
        row = int(torch.searchsorted(chunk.lengths.cumsum(0), at, right=True))
        place = chunk.place(row, at - int(chunk.starts[row]))
        raise LogError(*what_is_wrong(float(chunk.columns[role][at]), chunk.names[role], place))
