"""Call a loss that a user wrote: find its arguments by their names, and the loss in what it returns."""

import ast
import difflib
import functools
import inspect
import os
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.rollout import Rollout
from ..enumeration import autoregressive
from ..errors import LossCallError, LossOutputError, UnknownNameError
from ..support import ARGUMENTS, LOGITS, argument_role
from .probes import Batch, from_problem

# What a role stands for: a tensor of the batch in the form that the loss wants, or the whole batch.

IGNORED = -100
"""The label of a masked token, as in `torch.nn.functional.cross_entropy`."""

PROMPT = 0
"""The token before the completion where a loss shifts its arguments itself."""

TENSORS = tuple(role for role in ARGUMENTS if role not in ("batch", "rollout"))
"""Roles that are one tensor; `**kwargs` receives all of them."""


@dataclass(frozen=True)
class Form:
    """How a loss wants some of its tensors, which their names do not tell.

    Attributes:
        advantages: one per completion, (B,), or one per token, (B, T).
        mask: whether it is bool, of integers, or of the type of the log-probs.
        labels: the label of a masked token.
        is_shifted: whether the logits at a position are those of the next token, with one prompt token in front:
            `logits[:, :-1]` belongs to `labels[:, 1:]`. Otherwise they are those of the token there.
    """

    advantages: Literal["completion", "token"] = "token"
    mask: Literal["bool", "int", "float"] = "bool"
    labels: int = IGNORED
    is_shifted: bool = False

    def tensor(self, batch: Batch, role: str) -> Tensor:
        """The tensor of a role."""
        if role == "advantages":
            return batch.advantages[:, 0] if self.advantages == "completion" else batch.advantages
        if role == "mask":
            types = {"bool": torch.bool, "int": torch.long, "float": batch.logp.dtype}
            return self._after_prompt(batch.mask, False).to(types[self.mask])
        if role == "lengths":
            return batch.mask.sum(-1)
        if role == "tokens":
            return self._after_prompt(batch.tokens, PROMPT)
        if role == "labels":
            return self._after_prompt(torch.where(batch.mask, batch.tokens, self.labels), IGNORED)
        x: Tensor = getattr(batch, role)
        if role in LOGITS.values() and self.is_shifted:
            return torch.cat([x, x[:, -1:].detach().flip(-1)], 1)  # after the last token: any logits
        return x

    def _after_prompt(self, x: Tensor, first: int | bool) -> Tensor:
        return torch.cat([x.new_full((len(x), 1), first), x], 1) if self.is_shifted else x

    def describe(self, role: str) -> str:
        """A role with the shape and the kind of its tensor: `mask (B, T) bool`."""
        batch = _trial_batch()
        sizes = self.tensor(batch, role).shape
        axes = ("B", "T" if sizes[1:2] == batch.logp.shape[1:] else "T+1", "V")[: len(sizes)]
        shape = f"({', '.join(axes)})" if len(axes) > 1 else "(B,)"
        kinds = {"mask": self.mask, "advantages": f"per {self.advantages}", "labels": f"{self.labels} where masked"}
        return " ".join(filter(None, (role, shape, kinds.get(role))))


class Record(dict[str, object]):
    """What a loss of one argument receives: `batch["ref_log_prob"]`, `batch.ref_log_prob`, or any other known name."""

    # A loop over the dictionary finds these. Every other name with a role is found too, if it is asked for.
    KEYS = (
        *(role for role in TENSORS if role not in ("rewards", "lengths", "behavior_logits")),
        *("per_token_logps", "ref_per_token_logps", "old_per_token_logps", "completion_mask", "completion_ids"),
        *("log_prob", "ref_log_prob", "old_log_probs", "rollout_log_probs", "response_mask", "responses"),
        *("log_probs", "base_action_log_probs", "action_log_probs", "action_mask", "student_logits", "teacher_logits"),
    )

    def __init__(self, tensors: Mapping[str, object]) -> None:
        super().__init__()
        self._tensors = tensors
        for name in self.KEYS:
            self.__missing__(name)

    def __missing__(self, name: str) -> object:
        role = argument_role(name)
        if role not in TENSORS:
            raise UnknownNameError("name of a batch", name, self.KEYS)
        self[name] = x = self._tensors[role]  # what a loss writes into it must be there again
        return x

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and argument_role(name) in TENSORS)

    def __getattr__(self, name: str) -> object:
        if name in ("batch", "tensors"):  # verl's DataProto keeps its tensors in `batch`
            return self
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def get(self, name: str, default: object = None) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tensor of a name, or the default if the name has no role."""
        return self[name] if name in self else default  # noqa: SIM401, it would call itself

    def pop(self, name: str, *default: object) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The same; the tensor stays, since another name may be asked for."""
        return self.get(name, *default) if default else self[name]

    def to(self, *_: object, **__: object) -> "Record":
        """The same batch: it is where the loss runs."""
        return self


# Find the loss in what a function returned.


def scalar(name: str, out: object, batch: Batch) -> Tensor:
    """The loss as a scalar: a mean over completions, and a sum over live tokens and over the vocabulary.

    `out` is a tensor, a tuple or list that begins with one, a dictionary with the key `loss`, or an object with the
    attribute `loss`. The tensor is a scalar, (B,), (B, T), or (B, T, V).
    """
    rows, columns = batch.logp.shape
    if _is_logp_and_mask(out, batch):
        raise LossOutputError(
            f"{name} to return a loss",
            "the log-probs of the tokens and a mask",
            "name the function that makes a loss of them",
        )
    out = _loss_in(out)
    if not isinstance(out, Tensor):
        kind = type(out).__name__
        if isinstance(out, Mapping):
            kind = f"a dictionary with the keys {', '.join(map(str, out)) or '(none)'}"
        elif isinstance(out, (int, float)):
            kind = f"the number {out}, which has no gradient (without `.item()` it is a tensor)"
        raise LossOutputError(
            f"{name} to return a scalar or a {(rows, columns)} tensor",
            kind,
            "return the loss as a tensor, or (loss, metrics), {'loss': loss} or an object with `.loss`",
        )
    if out.numel() == 1:
        return out.reshape(())
    if out.shape == batch.logits.shape:
        out = out.sum(-1)
    if out.shape == batch.logp.shape:
        return torch.where(batch.mask, out, 0).sum() / rows
    if out.shape in ((rows,), (rows, 1)):
        return out.sum() / rows
    raise LossOutputError(
        f"{name} to return a scalar, or a tensor of shape ({rows},) or {(rows, columns)}: (B,) or (B, T)",
        f"a tensor of shape {tuple(out.shape)}",
        "average the values with `.mean()`, or return one value per completion or per token",
    )


def reduction_of(out: object, batch: Batch) -> str:
    """What `scalar` does to values that are none; empty for a scalar."""
    out = _loss_in(out)
    if not isinstance(out, Tensor) or out.numel() == 1:
        return ""
    of_tokens = out.shape[:2] == batch.logp.shape and out.dim() > 1
    values = "values per token are summed over each completion and" if of_tokens else "values per completion are"
    return f"; its {values} averaged over completions here: a trainer may divide otherwise"


def _is_logp_and_mask(out: object, batch: Batch) -> bool:
    """Whether a helper returned what a loss is made of."""
    if not isinstance(out, (tuple, list)) or len(out) < 2:
        return False
    if not all(isinstance(x, Tensor) and x.shape == batch.logp.shape for x in out[:2]):
        return False
    logp, live = out[0].to(batch.logp), batch.mask
    return torch.equal(out[1].bool(), live) and torch.allclose(logp[live], batch.logp[live])


def _loss_in(out: object) -> object:
    if isinstance(out, Mapping):
        return _loss_in(out["loss"]) if "loss" in out else out
    if hasattr(out, "loss"):
        return out.loss  # pyright: ignore[reportAttributeAccessIssue]
    return _loss_in(out[0]) if isinstance(out, (tuple, list)) and out else out


# Values for arguments: settings, as given by `--set NAME=VALUE`, and roles, by `--name ARGUMENT=ROLE`.


class Role(str):
    """Among settings: the argument receives what this role stands for."""


Settings = Mapping[str, object]
"""Arguments of a loss by name: values, or a `Role` for what the audit should give."""


def parse_settings(choices: Iterable[str]) -> dict[str, object]:
    """Read `NAME=VALUE`, with a Python literal as the value.

    Any other text is a string; `true`, `false` and `none` may be written small. The name of a tensor is refused: the
    loss would get it as text.

    Example:
        >>> from klgrad.audit.call import parse_settings
        >>> parse_settings(["beta=0.04", "estimator=k3", "clip=none"])
        {'beta': 0.04, 'estimator': 'k3', 'clip': None}
    """
    settings: dict[str, object] = {}
    for name, text in _parted(choices, "--set beta=0.04", "NAME=VALUE"):
        role = argument_role(text)
        if role in (*LOGITS, *LOGITS.values(), "old_logp", "mask", "advantages"):  # `group` or `tokens` may be a value
            raise LossCallError(
                f"a value for {name}",
                f"{name}={text}, the name of a tensor, which the loss would get as text",
                f"write --name {name}={role}",
            )
        small = {"true": True, "false": False, "none": None}
        try:
            settings[name] = small[text.lower()] if text.lower() in small else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            settings[name] = text
    return settings


def parse_names(choices: Iterable[str]) -> dict[str, Role]:
    """Read `ARGUMENT=ROLE` from text."""
    return roles_of(dict(_parted(choices, "--name x=logp", "ARGUMENT=ROLE")))


def roles_of(names: Mapping[str, str]) -> dict[str, Role]:
    """The roles of arguments, as settings; a name that is no role is an error."""
    for name, role in names.items():
        if role not in ARGUMENTS:
            near = difflib.get_close_matches(role, ARGUMENTS, n=1)
            raise LossCallError(
                f"a role for {name}: {', '.join(ARGUMENTS)}",
                repr(role),
                f"did you mean {near[0]!r}?" if near else "for a value, use a setting",
            )
    return {name: Role(role) for name, role in names.items()}


def _parted(choices: Iterable[str], example: str, form: str) -> Iterator[tuple[str, str]]:
    for choice in choices:
        name, equals, value = (part.strip() for part in choice.partition("="))
        if not equals or not name.isidentifier():
            raise LossCallError(form, repr(choice), f"write for example {example}")
        yield name, value


# A loss, and a class or a method of a class that first has to be made.


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Method:
    """A method of a class of which there is no instance yet: the settings are also for the constructor."""

    cls: type
    name: str


def parameters_of(loss: object) -> dict[str, inspect.Parameter]:
    """The parameters of a loss; of a class or a `Method`, those of the constructor and then of the call."""
    functions = [loss]
    if isinstance(loss, Method):
        functions = [loss.cls, getattr(loss.cls, loss.name)]
    elif inspect.isclass(loss):
        functions.append(loss.forward if issubclass(loss, nn.Module) else loss.__call__)
    parameters: dict[str, inspect.Parameter] = {}
    for function in functions:
        with suppress(ValueError, TypeError):  # without a signature it is no loss, and is refused for that
            parameters |= {n: p for n, p in _signature(function).items() if n != "self"}
    return parameters


def _signature(loss: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, or of the `forward` of a module, whose `__call__` tells nothing."""
    return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def settings_for(loss: object, settings: Settings) -> dict[str, object]:
    """Those of the settings that are parameters of a loss, or of its class."""
    known = parameters_of(loss)
    return {name: x for name, x in settings.items() if name in known}


def makes_callables(cls: type) -> bool:
    """Whether the instances of a class can be called."""
    return issubclass(cls, nn.Module) or any("__call__" in vars(base) for base in cls.__mro__)


def loss_methods(cls: type) -> list[str]:
    """The public methods that take tensors of an audit, of a class and of its bases in the same file."""
    bases = [base for base in cls.__mro__ if base.__module__ == cls.__module__]
    names = {n: None for base in bases for n, x in vars(base).items() if inspect.isroutine(x) and not n.startswith("_")}
    return [name for name in names if _is_loss(getattr(cls, name))]


def _is_loss(method: Callable[..., object]) -> bool:
    try:
        fill(method, "", {"self": None})
    except LossCallError:
        return False
    return True


def construct(loss: type | Method, name: str, settings: Settings) -> tuple[Any, set[str]]:
    """Make an instance, or its method, and tell which of the settings its constructor took.

    The other parameters of the constructor need defaults; the other settings may be those of the loss itself.
    """
    cls = loss.cls if isinstance(loss, Method) else loss
    try:
        parameters = inspect.signature(cls).parameters
    except (ValueError, TypeError) as error:
        raise LossCallError(f"{name} to have a constructor", str(error), "pass an instance") from error
    known = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    arguments = {n: x for n, x in settings.items() if n in known and not isinstance(x, Role)}
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in VARIADIC]
    lacking = [n for n in required if n not in arguments]
    if lacking:
        raise LossCallError(
            f"a class {name} that can be made without arguments",
            f"a constructor that needs {', '.join(lacking)}",
            f"give them by --set {lacking[0]}=VALUE, or make an instance in the file and audit that",
        )
    try:
        instance = cls(**arguments)
    except Exception as error:
        raise LossCallError(
            f"{cls.__name__}({_written(arguments)}) to make a loss",
            f"{type(error).__name__}: {error}",
            "make an instance in the file and audit that",
        ) from error
    return (getattr(instance, loss.name) if isinstance(loss, Method) else instance), set(arguments)


def _written(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_value(x)}" for name, x in values.items())


def _value(x: object) -> str:
    """A value as text, which is the same in every process: the `repr` of an object may have its address."""
    return reprlib.repr(x) if type(x).__module__ == "builtins" else type(x).__name__


# Decide, by the names of a loss's parameters, what each of them receives.


@dataclass(frozen=True, eq=False)
class UserLoss:
    """A loss that a user wrote, to be called with a `Batch`.

    Attributes:
        function: what is called.
        roles: parameter to the role of what it receives.
        values: parameter to a setting.
        settings: the names of all settings, those of a constructor included.
        form: how it wants its tensors.
        label: the function as code, with the constructor of its class.
    """

    function: Callable[..., object]
    roles: dict[str, str]
    values: dict[str, object]
    settings: frozenset[str] = frozenset()
    form: Form = Form()
    label: str = ""

    def __call__(self, batch: Batch) -> object:
        """What the loss returns on a batch."""
        tensors = {r: self.form.tensor(batch, r) for r in TENSORS if self.uses(r)}
        if "rollout" in self.roles.values():
            return self._of_tensors(tensors | {"rollout": batch.rollout()})
        return self._of_tensors(tensors)

    @cached_property
    def _of_tensors(self) -> Callable[[dict[str, Any]], object]:
        library = library_of(self.function)
        return self._of_arrays if library == "torch" else in_torch(lambda x: _loss_in(self._of_arrays(x)), library)

    def _of_arrays(self, arrays: dict[str, Any]) -> object:
        arrays = arrays | ({"batch": Record(arrays)} if "batch" in self.roles.values() else {})
        return self.function(**self.values, **{name: arrays[role] for name, role in self.roles.items()})

    def uses(self, role: str) -> bool:
        """Whether the loss may look at the tensor of a role."""
        return role in self.roles.values() or "batch" in self.roles.values()

    @property
    def text(self) -> str:
        """How it is called, in one line: what each argument receives, and where logits belong."""
        tensors = f"dictionary of all tensors, {self.form.describe('mask')}, {self.form.describe('advantages')}"
        whole = {"batch": tensors, "rollout": "Rollout"}
        arguments = {n: p.default for n, p in _signature(self.function).items() if p.kind not in VARIADIC} | self.values
        texts = {n: _value(x) for n, x in arguments.items()}
        texts |= {n: whole.get(role) or self.form.describe(role) for n, role in self.roles.items()}
        line = f"{self.label}({', '.join(f'{n}={x}' for n, x in texts.items())})"
        names = {role: n for n, role in self.roles.items()}
        logits = names.get("logits", "logits")
        tokens = next((names[role] for role in ("labels", "tokens", "mask") if role in names), "tokens")
        if self.form.is_shifted:
            return f"{line}; {logits}[:, :-1] belongs to {tokens}[:, 1:], with one prompt token in front"
        return f"{line}; {logits}[:, t] belongs to {tokens}[:, t], with no prompt token" if "logits" in names else line


def fill(loss: Callable[..., object], name: str, settings: Settings) -> UserLoss:
    """Find what each parameter of a loss receives; one with a default and without a role is left out.

    Raises:
        LossCallError: a required parameter has no known name, or there are no tensors.
    """
    try:
        parameters = _signature(loss)
    except (ValueError, TypeError) as error:
        raise LossCallError(
            f"{name} to have a signature", str(error), "wrap it in a Python function that names its tensors"
        ) from error
    named = {n: p for n, p in parameters.items() if p.kind not in VARIADIC}
    roles: dict[str, str] = {n: str(x) for n, x in settings.items() if isinstance(x, Role)}
    values = {n: x for n, x in settings.items() if n not in roles}
    bound = loss.keywords if isinstance(loss, functools.partial) else {}
    unknown = []
    for n, p in named.items():
        if n in settings or n in bound:
            continue
        role = _role(p)
        if role is not None:
            roles[n] = role
        elif p.default is p.empty:
            unknown.append(n)
    if _takes_any(parameters):
        taken = {*roles.values(), *named, *settings}
        roles |= {role: role for role in TENSORS if role not in taken}
    if unknown or not roles:
        raise _refusal(name, list(named), unknown)
    return UserLoss(loss, roles, values)


def _role(p: inspect.Parameter) -> str | None:
    """What a parameter receives by its name, its annotation and its default; None if they do not tell."""
    role, required = argument_role(p.name), p.default is p.empty
    if role in TENSORS:
        # `tokens=128` is no tensor, and `mask=1.0` is one.
        tensor = p.default is None or isinstance(p.default, Tensor)
        return role if required or tensor or (role == "mask" and isinstance(p.default, (int, float))) else None
    if not required:
        return None
    if p.annotation in (Rollout, "Rollout") or (role == "rollout" and p.annotation is p.empty):
        return "rollout"
    kind = p.annotation.__name__ if inspect.isclass(p.annotation) else str(p.annotation)
    mapping = kind.split("[")[0].rsplit(".", 1)[-1] in ("dict", "Dict", "Mapping", "MutableMapping")
    return "batch" if mapping or role == "batch" else None


def _refusal(name: str, parameters: list[str], unknown: list[str]) -> LossCallError:
    pairs = [n for n in unknown if re.search(r"(^|_)(chosen|rejected)(_|$)", n)]
    if pairs:
        return LossCallError(
            f"{name} to be a loss of sampled completions",
            f"a preference loss, of {', '.join(pairs)}: pairs that are given, not sampled, so that there is no KL on "
            "samples to audit",
            "write it for every pair of rows of `logp` and `ref_logp` (B, T), to see what it does on samples",
        )
    remedy = "wrap it in a function that takes these names"
    if unknown:
        x = unknown[0]
        remedy = (
            f"if {x} is a tensor, give its role by --name {x}=ROLE, such as {x}=logp; if it is a setting, or nothing "
            f"that the KL needs (a critic's values), give it by --set {x}=VALUE"
        )
    return LossCallError(
        f"{name} to take some of: {', '.join(ARGUMENTS)}, or their names in TRL, verl or OpenRLHF",
        f"parameters {', '.join(parameters) or '(none)'}"
        + (f", of which {', '.join(unknown)} is not known" if unknown else ""),
        remedy,
    )


# Find, by trial, the form in which a loss wants its tensors.


@cache
def _trial_batch() -> Batch:
    """Four completions of up to three tokens over a vocabulary of two: no size can be taken for another one."""
    problem = autoregressive(2, 3, ends=True, seed=0, away_from_ref=0.5)
    return from_problem(problem, torch.tensor([[3, 0, 1, 2]]), torch.tensor([0.7, -1.1, 0.4, 0.3], dtype=torch.float64))


def in_its_form(loss: UserLoss) -> UserLoss:
    """The loss with the first form that it accepts; with the usual one if it accepts none, so that its error is of it.

    An advantage per completion is tried before one per token: where a loss expects (B, T), it fails with (B,), since
    no size equals another; where it expects (B,), `advantages[:, None]` would silently accept (B, T) too.
    """
    choices = product(
        (False, True) if loss.uses("logits") else (False,),
        (IGNORED, PROMPT) if loss.uses("labels") else (IGNORED,),
        ("bool", "int", "float") if loss.uses("mask") else ("bool",),
        ("completion", "token") if loss.uses("advantages") else ("token",),
    )
    for is_shifted, label, mask, advantages in choices:
        trial = replace(loss, form=Form(advantages, mask, label, is_shifted))
        used = _used_positions(trial)
        if used is None:
            continue
        if not is_shifted and used[:-1].any() and not used[-1]:  # it leaves the last logits out: it shifts
            shifted = replace(loss, form=replace(trial.form, is_shifted=True))
            used = _used_positions(shifted)
            return shifted if used is not None and bool(used.all()) else trial
        return trial
    return loss


def _used_positions(loss: UserLoss) -> Tensor | None:
    """(T,) whether logits of a whole completion have a gradient at each position; None if the loss fails."""
    batch = _trial_batch().fresh()
    try:
        with (
            open(os.devnull, "w") as nowhere,  # what the loss prints is kept back: the audit calls it again
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
            warnings.catch_warnings(action="ignore"),
            torch.enable_grad(),
        ):
            out = scalar(loss.label, loss(batch.copy()), batch)
            grad = torch.autograd.grad(out, [batch.logits], allow_unused=True)[0] if out.requires_grad else None
    except Exception:  # whatever it raises: the audit calls it again, and reports the error
        return None
    return batch.mask.new_zeros(batch.mask.shape[1]) if grad is None else (grad[0] != 0).any(-1)


def prepare(loss: Any, name: str, settings: Settings) -> UserLoss:
    """Prepare a function, a module, another callable, a class of these, or a `Method` for calls with a `Batch`.

    The settings are values of its own parameters, or of those of its constructor, and roles of its arguments.
    """
    if inspect.isclass(loss) and not makes_callables(loss):
        methods = " or ".join(f"{name}.{method}" for method in loss_methods(loss))
        remedy = f"name a method, {methods}" if methods else "name a function"
        raise LossCallError(f"{name} to be a loss", "a class that cannot be called", remedy)
    known = parameters_of(loss)
    stray = [n for n in settings if n not in known]
    if stray and not _takes_any(known):
        near = [m for n in stray for m in difflib.get_close_matches(n, known, n=1, cutoff=0.5)]
        raise LossCallError(
            f"settings that are parameters of {name}: {', '.join(known)}",
            ", ".join(stray),
            f"did you mean {' or '.join(map(repr, near))}?" if near else "leave them out",
        )
    function, label, taken = loss, name_of(loss), set()
    if isinstance(loss, Method) or inspect.isclass(loss):
        function, taken = construct(loss, name, settings)
        made = f"({_written({n: settings[n] for n in settings if n in taken})})"
        label = f"{loss.cls.__name__}{made}.{loss.name}" if isinstance(loss, Method) else label + made
    user_loss = fill(function, name, {n: x for n, x in settings.items() if n not in taken})
    return in_its_form(replace(user_loss, settings=frozenset(settings), label=label))


def name_of(loss: object) -> str:
    """The name of a loss in reports, if none was given."""
    if isinstance(loss, functools.partial):
        return name_of(loss.func)
    return getattr(loss, "__name__", None) or type(loss).__name__


def summary_of(loss: object) -> str:
    """The first line of the documentation that the user wrote, without that of a base class."""
    if isinstance(loss, functools.partial):
        return summary_of(loss.func)
    documented = loss if inspect.isroutine(loss) or inspect.isclass(loss) else type(loss)
    return (inspect.cleandoc(documented.__doc__) if documented.__doc__ else "").split("\n")[0]


def place_of(loss: object) -> tuple[str, int] | None:
    """The file and line where a loss is defined, or None."""
    if isinstance(loss, functools.partial):
        return place_of(loss.func)
    if not inspect.isroutine(loss):
        loss = type(loss).forward if isinstance(loss, nn.Module) else type(loss).__call__
    code = getattr(inspect.unwrap(loss), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


# Losses of JAX and MLX arrays, called with tensors of PyTorch.
#
# A loss belongs to the library that its code names. That library differentiates it: `jax.vjp`, compiled, or `mx.vjp`.
# Neither is imported for a loss that does not use it.


Tensors = dict[str, Tensor]
OfArrays = Callable[[dict[str, Any]], Any]
"""A loss of arrays by name."""

ValueAndSlopes = Callable[[Tensors, Tensors, Tensor | None], tuple[Tensor, Tensors]]
"""The value of a loss, and its derivatives by the first tensors: of its sum, or in the direction of a cotangent."""

# Which library a loss belongs to.

Library = Literal["torch", "jax", "mlx"]

PACKAGES: dict[str, Library] = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "mlx": "mlx"}
"""A loss that names PyTorch and another library converts its tensors itself: it is of PyTorch."""


def library_of(loss: object) -> Library:
    """The library that the code of a loss names, or else its module.

    Example:
        >>> from klgrad.audit.call import library_of
        >>> library_of(lambda logp, ref_logp: (logp - ref_logp).square())
        'torch'
    """
    function: Any = _function_behind(loss)
    known = getattr(function, "__globals__", {})
    names = function.__code__.co_names if known else ()
    named = [ModuleType(name) if name in PACKAGES else known.get(name) for name in names]
    return _first_library(named) or _first_library(known.values()) or "torch"


def _function_behind(x: Any) -> object:
    """What a partial, a method, a decorated or compiled function, or a callable object runs."""
    x = inspect.unwrap(x.func if isinstance(x, functools.partial) else x)
    if callable(x) and not inspect.isroutine(x) and not inspect.isclass(x):
        x = type(x).__call__
    return inspect.unwrap(getattr(x, "__func__", x))


def _first_library(values: Iterable[Any]) -> Library | None:
    """By the packages that modules, functions, classes and other values are from."""
    names = (x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", type(x).__module__) for x in values)
    packages = {str(name).partition(".")[0] for name in names}
    return next((library for package, library in PACKAGES.items() if package in packages), None)


# The value of a loss by another library, through which gradients flow.


def in_torch(loss: OfArrays, library: Literal["jax", "mlx"]) -> Callable[[Tensors], Tensor]:
    """A loss of arrays of a library as one of tensors.

    Args:
        loss: returns one array.
        library: that of the arrays.

    Returns:
        The function of tensors by name. It computes on the CPU, in the precision of the tensors.
    """
    derivatives = _by_jax(loss) if library == "jax" else _by_mlx(loss)

    def of_tensors(tensors: Tensors) -> Tensor:
        moving = {name: x for name, x in tensors.items() if x.requires_grad}
        fixed = {name: x for name, x in tensors.items() if not x.requires_grad}
        return _Bridge.apply(derivatives, fixed, tuple(moving), *moving.values())

    return of_tensors


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, derivatives: ValueAndSlopes, fixed: Tensors, names: tuple[str, ...], *moving: Tensor
    ) -> Tensor:
        def along(cotangent: Tensor | None) -> tuple[Tensor, list[Tensor]]:
            out, slopes = derivatives(dict(zip(names, moving, strict=True)), fixed, cotangent)
            return out, [slopes[name] for name in names]

        ctx.along = along
        out, ctx.slopes = along(None)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> Any:
        if cotangent[0].dim() == 0:
            return None, None, None, *(cotangent[0] * slope for slope in ctx.slopes)
        return None, None, None, *ctx.along(cotangent[0])[1]


def _by_jax(loss: OfArrays) -> ValueAndSlopes:
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    # An audit calls the loss about a hundred times, with twenty shapes: most of its time is compilation.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
    def derivatives(moving: Any, fixed: Any, cotangent: Any) -> Any:
        out, pull_back = jax.vjp(lambda x: jnp.asarray(loss(fixed | x)), moving)
        return out, *pull_back(jnp.ones_like(out) if cotangent is None else cotangent.astype(out.dtype))

    def of_tensors(*tensors: Any) -> Any:
        leaves = jax.tree.leaves(tensors)
        wide = any(x.dtype == torch.float64 for x in leaves)
        with jax.enable_x64(wide), jax.default_device(jax.devices("cpu")[0]):
            derived = derivatives(*jax.tree.map(lambda x: x.detach().numpy(), tensors))
        return jax.tree.map(torch.from_dlpack, derived)

    return of_tensors


def _by_mlx(loss: OfArrays) -> ValueAndSlopes:
    import mlx.core as mx  # pyright: ignore[reportMissingImports]

    def array(x: Tensor) -> Any:
        name = str(x.dtype).removeprefix("torch.")
        return mx.array(x.detach(), dtype=getattr(mx, {"bool": "bool_"}.get(name, name)))

    def tensor(x: Any) -> Tensor:
        # MLX computes exponentials of float64 in float32: the audit has tolerances for numbers that are rounded so.
        return torch.from_dlpack(x).float().to(torch.float64 if x.dtype == mx.float64 else torch.float32)

    def derivatives(moving: Tensors, fixed: Tensors, cotangent: Tensor | None) -> tuple[Tensor, Tensors]:
        mx.disable_compile()  # a compiled function would wait for a C++ compiler, for each shape
        with mx.stream(mx.cpu):  # a GPU of Apple has no float64
            known = {name: array(x) for name, x in fixed.items()}
            at = [array(x) for x in moving.values()]
            of_moving = lambda *some: loss(known | dict(zip(moving, some, strict=True)))
            out = of_moving(*at)
            along = mx.ones_like(out) if cotangent is None else array(cotangent).astype(out.dtype)
            _, slopes = mx.vjp(of_moving, at, [along])
        mx.enable_compile()
        return tensor(out), {name: tensor(x) for name, x in zip(moving, slopes, strict=True)}

    return derivatives
