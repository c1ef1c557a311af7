"""Decide, by the names of a loss's parameters, what each of them receives."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from ...core.rollout import Rollout
from ...errors import LossCallError
from ..batch import Batch
from .record import Record
from .settings import Settings
from .tensors import DESCRIBED, Form, argument_role, tensor

RECORD = {
    *("batch", "inputs", "data", "model_inputs", "micro_batch", "minibatch", "mini_batch", "mb", "sample", "samples"),
    *("experience", "experiences", "rollouts", "example", "examples", "input_data", "tensors", "trajectory"),
}
"""Names of a parameter that receives the whole batch, as a dictionary."""

CANONICAL = (*DESCRIBED.split(", "), "labels", "token_reverse_kl", "token_forward_kl")
"""What `**kwargs` receives."""

Whole = Literal["record", "rollout"]


@dataclass(frozen=True)
class Filled:
    """What the parameters of a loss receive.

    Attributes:
        roles: parameter to the role of its tensor.
        whole: parameter to the form in which it receives the whole batch.
        fixed: parameter to a setting, or to the default of a positional one.
        positional: the parameters that must be given by position, in order.
    """

    roles: dict[str, str] = field(default_factory=dict)
    whole: dict[str, Whole] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    positional: tuple[str, ...] = ()

    def call(self, function: Callable[..., object], batch: Batch, form: Form) -> object:
        """Call the loss."""
        given: dict[str, Any] = dict(self.fixed)
        given |= {name: tensor(batch, role, form) for name, role in self.roles.items()}
        for name, kind in self.whole.items():
            given[name] = Record(batch, form) if kind == "record" else batch.rollout()
        by_position = [given.pop(name) for name in self.positional]
        return function(*by_position, **given)

    def uses(self, role: str) -> bool:
        """Whether the loss may look at the tensor of a role."""
        return role in self.roles.values() or "record" in self.whole.values()


def signature_of(loss: Callable[..., object]) -> inspect.Signature:
    """The signature of a function, or of the `forward` of a module, whose `__call__` tells nothing."""
    return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)


def own_settings(loss: Any, settings: Settings) -> dict[str, Any]:
    """Those of the settings that are parameters of a loss, or of its class."""
    return {name: x for name, x in settings.items() if name in _own_names(loss)}


def _own_names(loss: Any) -> list[str]:
    called = [loss]
    if inspect.isclass(loss):
        called.append(loss.forward if issubclass(loss, nn.Module) else loss.__call__)
    found: dict[str, None] = {}
    for function in called:
        try:
            found |= dict.fromkeys(n for n, p in signature_of(function).parameters.items() if n != "self")
        except (ValueError, TypeError):  # without a signature it is no loss, and is refused for that
            continue
    return list(found)


def check_settings(loss: Any, name: str, settings: Settings) -> None:
    """Raise an error for settings that a loss does not have."""
    known = _own_names(loss)
    stray = [n for n in settings if n not in known]
    if stray and not takes_any(loss):
        near = [m for n in stray for m in difflib.get_close_matches(n, known, n=1, cutoff=0.5)]
        raise LossCallError(
            f"settings that are parameters of {name}: {', '.join(known)}",
            ", ".join(stray),
            f"did you mean {' or '.join(map(repr, near))}?" if near else "leave them out",
        )


def takes_any(loss: Any) -> bool:
    """Whether a loss takes arguments of any name."""
    try:
        return any(p.kind is p.VAR_KEYWORD for p in signature_of(loss).parameters.values())
    except (ValueError, TypeError):
        return False


def fill(loss: Callable[..., object], name: str, settings: Settings) -> Filled:
    """Find what to give to a loss.

    Args:
        loss: a function, a module, or another callable.
        name: for messages.
        settings: values of the loss's own parameters, instead of tensors.

    Returns:
        What each parameter receives. Parameters with a default and without a role are left out.

    Raises:
        LossCallError: a required parameter has no known name, or there are no tensors.
    """
    try:
        parameters = signature_of(loss).parameters
    except (ValueError, TypeError) as error:
        methods = [] if callable(loss) else loss_methods(type(loss))
        near = f"name a method, {' or '.join(f'{name}.{method}' for method in methods)}" if methods else None
        raise LossCallError(
            f"{name} to have a signature",
            "an object that cannot be called" if near else str(error),
            near or "wrap it in a Python function that names its tensors",
        ) from error
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    filled = Filled(fixed=dict(settings), positional=tuple(n for n, p in named.items() if p.kind is p.POSITIONAL_ONLY))
    bound = loss.keywords if isinstance(loss, functools.partial) else {}
    unknown = [p for n, p in named.items() if n not in settings and n not in bound and not _placed(p, filled)]
    if takes_any(loss):
        taken = {*filled.roles.values(), *named, *settings}
        filled.roles.update((role, role) for role in CANONICAL if role not in taken)
    if unknown or not (filled.roles or filled.whole):
        raise _refused(name, list(named.values()), unknown)
    return filled


def loss_methods(cls: type) -> list[str]:
    """The public methods that take tensors of an audit, of a class and of its bases in the same file."""
    own = [base for base in cls.__mro__ if base.__module__ == cls.__module__]
    names = {n: None for base in own for n, x in vars(base).items() if inspect.isroutine(x) and not n.startswith("_")}
    return [name for name in names if _is_loss(getattr(cls, name))]


def _is_loss(method: Callable[..., object]) -> bool:
    try:
        fill(method, "", {"self": None})
    except LossCallError:
        return False
    return True


def _placed(p: inspect.Parameter, filled: Filled) -> bool:
    """Find what one parameter receives; False if it is required and has no known name."""
    required = p.default is p.empty
    role = argument_role(p.name)
    if role is not None and (required or _means_tensor(p.default, role)):
        filled.roles[p.name] = role
    elif required and _means_rollout(p):
        filled.whole[p.name] = "rollout"
    elif required and (p.name in RECORD or p.annotation in (dict, "dict") or _is_mapping(p.annotation)):
        filled.whole[p.name] = "record"
    elif p.kind is p.POSITIONAL_ONLY and not required:
        filled.fixed[p.name] = p.default
    else:
        return not required
    return True


def _means_tensor(default: object, role: str) -> bool:
    """Whether a parameter with this default may be a tensor: `tokens=128` is none, and `mask=1.0` is."""
    return default is None or isinstance(default, Tensor) or (role == "mask" and isinstance(default, (int, float)))


def _means_rollout(p: inspect.Parameter) -> bool:
    return p.annotation is Rollout or p.annotation == "Rollout" or (p.name == "rollout" and p.annotation is p.empty)


def _is_mapping(annotation: object) -> bool:
    """Whether an annotation is that of a dictionary: `dict[str, Tensor]`, `Mapping[...]` or a string of it."""
    shown = annotation if isinstance(annotation, str) else str(annotation)
    return shown.split("[")[0].rsplit(".", 1)[-1] in ("dict", "Dict", "Mapping", "MutableMapping")


def _refused(name: str, parameters: list[inspect.Parameter], unknown: list[inspect.Parameter]) -> LossCallError:
    given = ", ".join(p.name for p in parameters) or "(none)"
    if not unknown:
        remedy = "wrap it in a function that takes these names"
    else:
        first = unknown[0].name
        remedy = f"if {first} is a setting, give it by --set {first}=VALUE; if it is a tensor, use a name of these"
    return LossCallError(
        f"{name} to take some of: {DESCRIBED}, or their names in TRL, verl or OpenRLHF",
        f"parameters {given}" + (f", of which {', '.join(_names(unknown))} is not known" if unknown else ""),
        remedy,
    )


def _names(parameters: list[inspect.Parameter]) -> Iterator[str]:
    return (p.name for p in parameters)
