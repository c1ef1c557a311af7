"""Losses of every kind behind one interface."""

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
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
from .problems import group_sizes

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
"""Frames of a traceback in these folders are not the user's code."""

ARGUMENTS = tuple(f.name for f in fields(Batch))
"""The arguments that a user's loss may take."""


Kind = Literal["cell", "term", "function", "framework"]
"""`cell` of `klgrad.zoo`, `term` for a `KLTerm`, `function` of a user, or `framework` for a framework's own code."""


@dataclass(frozen=True)
class Subject:
    """A named loss over a `Batch`.

    Attributes:
        name: its name in reports.
        kind: `cell`, `term`, `function` or `framework`.
        loss: returns a scalar, or (B, T), which is then summed over live tokens and averaged over rows.
        stacks: whether one call may have many groups: they do not influence each other, and the loss is a mean over
            rows. A user's function is called group by group.
        instead: what to use instead, for the advice; None if unknown or not needed.
        summary: one line about the loss.
        exchangeable: whether the order of the rows of a group does not matter; each group is then evaluated in one
            order only.
        framework: the framework whose code this is; empty for other losses.
        on_large_batch: the loss on one large batch, if a call with many groups is not that already: a loss that
            `stacks` is a mean over groups.

    Example:
        >>> from klgrad.audit import catalogue
        >>> subject = catalogue()["k3-loss"]
        >>> subject.name, subject.kind
        ('k3-loss', 'cell')
    """

    name: str
    kind: Kind
    loss: Callable[[Batch], object]
    stacks: bool = False
    instead: Remedy | None = None
    summary: str = ""
    exchangeable: bool = False
    framework: str = ""
    on_large_batch: Callable[[Batch], object] | None = None

    def large(self) -> "Subject":
        """The same loss for one large batch."""
        return self if self.on_large_batch is None else replace(self, loss=self.on_large_batch)

    def __call__(self, batch: Batch) -> Tensor:
        """Evaluate the loss on one batch, as a scalar."""
        with self.named_errors(batch):
            out = self.loss(batch)
        return _scalar(self.name, out, batch)

    @contextmanager
    def named_errors(self, batch: Batch) -> Iterator[None]:
        """Turn an exception of the loss into a `LossCallError` with the place in the user's code and the inputs."""
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
    """Wrap a `KLTerm`, a `Cell`, or a function of the tensors that its signature names; a `Subject` stays as it is."""
    if isinstance(loss, Subject):
        return loss
    if isinstance(loss, KLTerm):
        return of_rollout(name or loss.name, "term", lambda r: loss(r).loss, stacks=loss.reduction == "sequence")
    if isinstance(loss, Cell):
        summary = loss.summary
        stacks, instead = not loss.couples_groups, loss.instead
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
    """Wrap a loss that takes a `Rollout`."""

    def call(batch: Batch) -> Tensor:
        out = loss(batch.rollout())
        return out.loss if isinstance(out, KLResult) else out

    # In the losses of this package the order of rows does not matter. Only calls group by group use it.
    return Subject(name, kind, call, stacks, instead, summary, exchangeable=not stacks)


def of_function(function: Callable[..., object], name: str) -> Subject:
    """Wrap a function that receives as keyword arguments those tensors that its signature names."""
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
            "return only the loss tensor; wrap a function that returns (loss, metrics), and return the first",
        )
    if out.shape == batch.logp.shape and out.numel() > 1:
        return torch.where(batch.mask, out, 0).sum() / len(out)
    if out.numel() == 1:
        return out.reshape(())
    raise LossOutputError(
        f"{name} to return a scalar or a {shape} tensor (B, T)",
        f"a tensor of shape {tuple(out.shape)}",
        "average the values per row with `.mean()`, or return one value per token",
    )
