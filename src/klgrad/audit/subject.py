"""Losses of every kind behind one interface."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.result import KLResult
from ..core.rollout import Rollout
from ..core.term import KLTerm
from ..errors import LossCallError
from ..remedies import Remedy
from ..zoo import Cell
from .batch import Batch
from .calling import OwnLoss, Settings, constructed, name_of, own_loss, scalar, summary_of
from .problems import group_sizes

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
"""Frames of a traceback in these folders are not the user's code."""

LARGEST_VOCABULARY = 4
"""Tokens in the largest vocabulary of the problems that are summed over."""

Kind = Literal["cell", "term", "function", "framework"]
"""`cell` of `klgrad.zoo`, `term` for a `KLTerm`, `function` of a user, or `framework` for a framework's own code."""


@dataclass(frozen=True)
class Subject:
    """A named loss over a `Batch`.

    Attributes:
        name: its name in reports.
        kind: `cell`, `term`, `function` or `framework`.
        loss: returns a scalar; (B,), which is then averaged; or (B, T), which is summed over live tokens and averaged
            over rows.
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
        return scalar(self.name, out, batch)

    @contextmanager
    def named_errors(self, batch: Batch) -> Iterator[None]:
        """Turn an exception of the loss into a `LossCallError` with the place in the user's code and the inputs."""
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            places = [(f.filename, f"{f.filename}, line {f.lineno}") for f in frames]
            own = [at for file, at in places if not file.startswith(LIBRARIES) and "site-packages" not in file]
            torch_alone = (
                "use PyTorch, since the tensors are; " if any("jax" in Path(f).parts for f, _ in places) else ""
            )
            # An error in the call itself has no frame in the user's code: then it is the place of the definition.
            defined = self.loss.place if isinstance(self.loss, OwnLoss) else ""
            where = own[-1] if own else defined or f"{frames[-1].filename}, line {frames[-1].lineno}"
            raise LossCallError(
                f"{self.name} to return a differentiable loss",
                f"{type(error).__name__}: {error}",
                f"{torch_alone}look at {where}; it was called with {batch.logp.dtype} tensors "
                f"of shape {tuple(batch.logp.shape)} and a bool mask; groups of {group_sizes()} rows are tried"
                + self._on_vocabulary(batch),
            ) from error

    def _on_vocabulary(self, batch: Batch) -> str:
        """For a loss of logits, their shape; and which of its numbers are larger than the vocabularies of the audit."""
        if not isinstance(self.loss, OwnLoss) or not self.loss.filled.uses("logits"):
            return ""
        large = [f"--set {name}=2" for name, x in self.loss.numbers.items() if x > LARGEST_VOCABULARY]
        hint = (
            f"; the audit's vocabularies have 2 to {LARGEST_VOCABULARY} tokens: try {' '.join(large)}" if large else ""
        )
        return f"; logits of shape {tuple(batch.logits.shape)}{hint}"


def as_subject(loss: object, name: str | None = None, settings: Settings | None = None) -> Subject:
    """Wrap a loss.

    Args:
        loss: a `KLTerm`, a `Cell`, a function or module of the tensors that its signature names, or a class of one of
            these that needs no arguments; a `Subject` stays as it is.
        name: in reports; by default that of the loss.
        settings: values of the loss's own parameters.

    Returns:
        The loss as a subject.

    Example:
        >>> from klgrad.audit.subject import as_subject
        >>> def penalty(log_prob, ref_log_prob, beta):
        ...     return beta * (log_prob - ref_log_prob)
        >>> as_subject(penalty, settings={"beta": 0.1}).name
        'penalty'
    """
    settings = settings or {}
    if isinstance(loss, type) and issubclass(loss, KLTerm):
        loss, taken = constructed(loss, name_of(loss), settings)
        settings = {n: x for n, x in settings.items() if n not in taken}
    if isinstance(loss, (Subject, KLTerm, Cell)) and settings:
        raise LossCallError(
            "settings for a function, a module or a class", f"settings for {name or loss.name}", "leave them out"
        )
    if isinstance(loss, Subject):
        return loss
    if isinstance(loss, KLTerm):
        return of_rollout(name or loss.name, "term", lambda r: loss(r).loss, stacks=loss.reduction == "sequence")
    if isinstance(loss, Cell):
        summary = loss.summary
        stacks, instead = not loss.couples_groups, loss.instead
        return of_rollout(name or loss.name, "cell", loss, stacks=stacks, instead=instead, summary=summary)
    if callable(loss):
        return of_function(loss, name or name_of(loss), settings)
    raise LossCallError("a function, a module, a KLTerm or a Cell", type(loss).__name__, "pass the loss itself")


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


def of_function(function: Any, name: str, settings: Settings) -> Subject:
    """Wrap a loss that a user wrote."""
    return Subject(name, "function", own_loss(function, name, settings), summary=summary_of(function))
