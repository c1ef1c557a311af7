"""A user's loss, ready to be called on the audit's batches."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..batch import Batch
from .construct import constructed
from .form import chosen_form
from .settings import Settings
from .signature import Filled, check_settings, fill
from .tensors import Form


@dataclass(frozen=True, eq=False)
class OwnLoss:
    """A loss, what its parameters receive, the form of its tensors, and the names of its settings."""

    function: Callable[..., object]
    filled: Filled
    form: Form
    settings: frozenset[str]

    def __call__(self, batch: Batch) -> object:
        """What the loss returns on a batch."""
        return self.filled.call(self.function, batch, self.form)

    @property
    def numbers(self) -> dict[str, int]:
        """The loss's own parameters that are integers: settings, and defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        values = {p.name: p.default for p in parameters} | self.filled.fixed
        return {name: x for name, x in values.items() if type(x) is int}

    @property
    def place(self) -> str:
        """The file and line where the loss is defined, or an empty text."""
        return place_of(self.function)


def own_loss(loss: Any, name: str, settings: Settings) -> OwnLoss:
    """Prepare a function, a module, another callable, or a class of these that needs no arguments.

    Args:
        loss: what the user wrote.
        name: for messages.
        settings: values of its own parameters, or of those of its constructor.

    Returns:
        The loss, to be called with a `Batch`.
    """
    check_settings(loss, name, settings)
    function, taken = constructed(loss, name, settings) if inspect.isclass(loss) else (loss, set())
    rest = {n: x for n, x in settings.items() if n not in taken}
    filled = fill(function, name, rest)
    return OwnLoss(function, filled, chosen_form(function, filled, name), frozenset(settings))


def name_of(loss: Any) -> str:
    """The name of a loss in reports, if none was given."""
    if isinstance(loss, functools.partial):
        return name_of(loss.func)
    return getattr(loss, "__name__", None) or type(loss).__name__


def summary_of(loss: Any) -> str:
    """The first line of the documentation that the user wrote, without that of a base class."""
    if isinstance(loss, functools.partial):
        return summary_of(loss.func)
    own = loss if inspect.isroutine(loss) or inspect.isclass(loss) else type(loss)
    return (inspect.cleandoc(own.__doc__) if own.__doc__ else "").split("\n")[0]


def place_of(loss: Any) -> str:
    """The file and line where a loss is defined, or an empty text."""
    if isinstance(loss, functools.partial):
        return place_of(loss.func)
    if not inspect.isroutine(loss):
        loss = type(loss).forward if isinstance(loss, nn.Module) else type(loss).__call__
    code = getattr(inspect.unwrap(loss), "__code__", None)
    return "" if code is None else f"{code.co_filename}, line {code.co_firstlineno}"
