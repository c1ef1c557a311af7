"""What is audited: a loss of any make, brought to one shape."""

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..core.result import KLResult
from ..core.rollout import Rollout
from ..core.term import KLTerm
from ..errors import LossCallError, LossOutputError
from ..remedies import Remedy
from ..zoo import Cell
from .batch import Batch
from .cell_remedies import remedy_for
from .problems import group_sizes

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
"""Where a traceback is not the user's own."""

ARGUMENTS = tuple(f.name for f in fields(Batch))
"""What a user's loss may name in its signature."""


Kind = Literal["cell", "term", "function", "framework"]
"""`cell` of `klgrad.zoo`, `term` for a `KLTerm`, `function` of a user, or `framework` for a framework's own code."""


@dataclass(frozen=True)
class Subject:
    """A named loss over a `Batch`.

    Attributes:
        name: shown in reports.
        kind: `cell`, `term`, `function` or `framework`.
        loss: returns a scalar, or (B, T), which is then summed over live tokens and averaged over rows.
        stacks: many groups may be given in one call, for they do not influence each other and the loss
            is a mean over rows. Only known of this package's own; others are called group by group.
        exchangeable: the rows of a group may change places, so each group is called in one order only.
        instead: the sound alternative, for the advice.
        summary: one line.
    """

    name: str
    kind: Kind
    loss: Callable[[Batch], object]
    stacks: bool = False
    instead: Remedy | None = None
    summary: str = ""
    exchangeable: bool = False
    framework: str = ""

    def __call__(self, batch: Batch) -> Tensor:
        """The scalar loss of one batch."""
        with self.named_errors(batch):
            out = self.loss(batch)
        return _scalar(self.name, out, batch)

    @contextmanager
    def named_errors(self, batch: Batch) -> Iterator[None]:
        """Turn whatever the loss raises into an error that says where and with what."""
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [f for f in frames if not f.filename.startswith(LIBRARIES)] or frames
            raise LossCallError(
                f"{self.name} to return a differentiable loss",
                f"{type(error).__name__}: {error}",
                f"look at {own[-1].filename}, line {own[-1].lineno}; it was called with {batch.logp.dtype} tensors "
                f"of shape {tuple(batch.logp.shape)} and a bool mask; groups of {group_sizes()} rows are tried",
            ) from error


def as_subject(loss: object, name: str | None = None) -> Subject:
    """A `KLTerm`, a `Cell`, a `Subject`, or a function of the tensors it names."""
    if isinstance(loss, Subject):
        return loss
    if isinstance(loss, KLTerm):
        return of_rollout(name or loss.name, "term", lambda r: loss(r).loss, stacks=loss.reduction == "sequence")
    if isinstance(loss, Cell):
        summary = loss.summary
        stacks, instead = not loss.couples_groups, remedy_for(loss)
        return of_rollout(name or loss.name, "cell", loss, stacks=stacks, instead=instead, summary=summary)
    if callable(loss):
        return of_function(loss, name or getattr(loss, "__name__", repr(loss)))
    raise LossCallError("a function, a KLTerm or a Cell", type(loss).__name__, "pass the loss itself")


def of_rollout(
    name: str,
    kind: Literal["cell", "term"],
    loss: Callable[[Rollout], Tensor | KLResult],
    *,
    stacks: bool,
    instead: Remedy | None = None,
    summary: str = "",
) -> Subject:
    """A loss that takes a `Rollout`."""

    def call(batch: Batch) -> Tensor:
        out = loss(batch.rollout())
        return out.loss if isinstance(out, KLResult) else out

    # Losses of this package treat the rows of a group alike; it matters where groups are called one by one.
    return Subject(name, kind, call, stacks, instead, summary, exchangeable=not stacks)


def of_function(function: Callable[..., object], name: str) -> Subject:
    """A loss that receives by keyword the tensors it names in its signature."""
    wanted = _wanted(function, name)
    summary = (inspect.getdoc(function) or "").split("\n")[0]
    return Subject(name, "function", lambda batch: function(**{k: getattr(batch, k) for k in wanted}), summary=summary)


def _wanted(function: Callable[..., object], name: str) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise LossCallError(
            f"{name} to have a signature", str(error), "wrap it in a Python function that names its tensors"
        ) from error
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(ARGUMENTS)
    wanted = [p.name for p in parameters if p.name in ARGUMENTS]
    stray = [
        p.name
        for p in parameters
        if p.name not in ARGUMENTS and p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    ]
    if stray or not wanted:
        raise LossCallError(
            f"{name} to take some of: {', '.join(ARGUMENTS)}",
            f"parameters {', '.join(p.name for p in parameters) or '(none)'}",
            "wrap it in a function that takes these names, and give every other parameter a default",
        )
    return wanted


def _scalar(name: str, out: object, batch: Batch) -> Tensor:
    shape = tuple(batch.logp.shape)
    if not isinstance(out, Tensor):
        raise LossOutputError(
            f"{name} to return a scalar or a {shape} tensor",
            type(out).__name__,
            "return the loss tensor alone; of a (loss, metrics) pair, wrap it and return the first",
        )
    if out.shape == batch.logp.shape and out.numel() > 1:
        return torch.where(batch.mask, out, 0).sum() / len(out)
    if out.numel() == 1:
        return out.reshape(())
    raise LossOutputError(
        f"{name} to return a scalar or a {shape} tensor (B, T)",
        f"a tensor of shape {tuple(out.shape)}",
        "`.mean()` a value per row, or return one value per token",
    )
